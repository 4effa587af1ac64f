"""Begins the recording of a rank: puts its parts together, when the script imports torch.distributed and not before.

This file stands alone, as ``rank_exit.py`` does.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: How many collectives torch keeps in its flight recorder.
_FLIGHT_ENTRIES = b"2000"


def begin(module: Any, channel: dict[str, Any], load: Callable[[str], Any], recorder: Any) -> None:
    """Begin to record in this process.

    Args:
        module: torch.distributed.distributed_c10d, which has just been imported.
        channel: What the parent has told: the memory file's descriptor, that of the questions, and what both are; and
            which process it has told.
        load: Returns a module of ours by its name.
        recorder: Notes how this process ends.
    """
    fds = (channel["file"], channel["asks"])
    if os.getpid() != channel["pid"] or not _are_ours(fds, tuple(channel["identities"])):
        return
    try:
        _begin(module, channel, load, recorder)
    except Exception as error:  # the user's job matters more than our view of it
        sys.stderr.write(f"rankwise: this rank's collectives are not recorded: {error!r}\n")


def _begin(module: Any, channel: dict[str, Any], load: Callable[[str], Any], recorder: Any) -> None:
    ring = load("ring")
    memory = ring.map_file(channel["file"])
    if not ring.claim(memory, os.getpid()):
        return  # another Python of this rank, which lives, records already
    writer = ring.RingWriter(memory, os.getpid())
    flight_recorder = load("flight_recorder")
    _switch_on_recorder(flight_recorder.SIZES)
    folder = os.path.dirname(sys.modules["torch"].__file__ or "")
    call_sites = load("call_sites").CallSites(writer.intern, folder, load("module_names"))
    recorder.name_module = call_sites.modules.find_raised
    flight = flight_recorder.Flight(ring, writer, call_sites)

    def find_module(frame: Any) -> str:
        return recorder_of_calls.stages.find_awaited(frame) or str(call_sites.modules.find(frame))

    side = load("responder").StackResponder(
        channel["asks"], ring, writer, flight, load("handled_exceptions").list_handled, find_module
    )

    def meet() -> None:
        side.begin()
        digests.begin()

    recorder_of_calls = load("intercept_calls").CollectiveRecorder(module, load, writer, call_sites, meet)
    digests = load("digests").Digests(load, ring, writer, call_sites.find_line, recorder_of_calls.groups)

    def forget() -> None:
        recorder_of_calls.forget()
        side.forget()
        digests.forget()
        _close(channel)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)
    recorder_of_calls.wrap(module.ProcessGroup, module.Work)


def _switch_on_recorder(names: tuple[str, ...]) -> None:
    """Have torch keep what it issues, before it makes its first group: up to 2.8 it does not unless it is told to.

    For C alone: the script, whose ``os.environ`` was read before, has the environment that torchrun would have given
        it.
    """
    if any(name in os.environ for name in names):
        return
    import ctypes

    ctypes.CDLL(None).setenv(names[0].encode(), _FLIGHT_ENTRIES, 0)


def _close(channel: dict[str, Any]) -> None:
    """Let a forked child have neither: the numbers are free for what it opens."""
    fds = (channel["file"], channel["asks"])
    if _are_ours(fds, tuple(channel["identities"])):
        for fd in fds:
            os.close(fd)


def _are_ours(fds: tuple[int, ...], identities: tuple[int, ...]) -> bool:
    """Whether the numbers are still our files: a script may have closed them, and opened its own there."""
    try:
        files = [os.fstat(fd) for fd in fds]
    except OSError:
        return False
    return tuple(number for file in files for number in (file.st_dev, file.st_ino)) == identities
