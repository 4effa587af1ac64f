"""Stacks of other people's processes, by py-spy: what its `dump` prints is read here, and it is run where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rankwise.evidence.reader.notes import Frame, Stack

if TYPE_CHECKING:
    from collections.abc import Sequence

_PROCESS = re.compile(r"^Process (?P<pid>\d+): ")
_THREAD = re.compile(r'^Thread (?P<id>\w+) \((?P<state>[^)]*)\)(?:: "(?P<name>.*)")?$')
_FRAME = re.compile(r"^ +(?P<function>\S.*) \((?P<file>.+):(?P<line>\d+)\)$")
#: In the text form files are without their folders: these are nobody's own.
_PACKAGES = frozenset({
    "accelerate", "apex", "datasets", "deepspeed", "lightning", "lightning_fabric", "megatron", "numpy", "peft", "pytorch_lightning",
    "torch", "torchdata", "torchvision", "transformers", "triton", "trl",
})  # fmt: skip
_TIMEOUT_S = 20
_INSTALL = "py-spy is not installed, so no stacks are read: pip install py-spy"
_REFUSED = "py-spy may not read the ranks, so no stacks are read: run it as root (sudo), or with --cap-add SYS_PTRACE in a container"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One thread of a dump.

    Attributes:
        is_active: Whether it ran at that moment.
    """

    name: str
    is_active: bool
    stack: Stack


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SpyDump:
    """What one dump tells of a process; the main thread comes first."""

    pid: int
    threads: tuple[Thread, ...]

    @property
    def stack(self) -> Stack:
        """The main thread's."""
        return self.threads[0].stack

    @property
    def is_idle(self) -> bool:
        """Whether none of its threads ran."""
        return not any(thread.is_active for thread in self.threads)


def is_dump(data: bytes) -> bool:
    """Tell whether a file is a dump, of text or of JSON."""
    head = data.lstrip()[:4096]
    return (head[:1] == b"[" and b'"thread_id"' in head) or re.search(
        rb"^Process \d+: ", head, re.MULTILINE
    ) is not None


def parse(data: bytes) -> SpyDump:
    """Read a dump; of a process and its children, the process itself.

    Raises:
        ValueError: It is none, or it has no thread.
    """
    text = data.decode("utf-8", "replace")
    try:
        pid, threads = _parse_json(text) if text.lstrip()[:1] == "[" else _parse_text(text)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not in py-spy's format: {error!r}") from None
    if not threads:
        raise ValueError("it has no Python thread")
    # Python below 3.11 names threads only where py-spy can read their names: the main thread is listed last.
    main = next((thread for thread in threads if thread.name == "MainThread"), threads[-1])
    return SpyDump(pid=pid, threads=(main, *(thread for thread in threads if thread is not main)))


def take(pid: int, *, pauses: bool = True) -> SpyDump | str:
    """Take the stacks of a process that runs here; where that can't be, return why, and what to do about it.

    Args:
        pid: Whose.
        pauses: Whether it may be stopped for a moment, so that it can be read while it runs.
    """
    beside = Path(sys.executable).with_name("py-spy")
    program = shutil.which("py-spy") or (str(beside) if beside.exists() else None)
    if program is None:
        return _INSTALL
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(pid), "--json", *(() if pauses else ("--nonblocking",))],
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode == 0:
            return parse(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return f"py-spy could not read process {pid}: {error}"
    words = done.stderr.decode("utf-8", "replace").strip()
    if re.search(r"permission|not permitted", words, re.IGNORECASE):
        return _REFUSED
    return f"py-spy could not read process {pid}: {words.splitlines()[0] if words else 'it printed nothing'}"


def have_joined(stacks: dict[int, Stack | None]) -> set[int]:
    """Return the ranks that have made a process group, as far as stacks tell.

    A rank in a collective has. One elsewhere has if another has, and nobody still waits in ``init_process_group``.
    """
    inits = {rank for rank, stack in stacks.items() if stack and _is_in_init(stack)}
    inside = {rank for rank, stack in stacks.items() if stack and stack.op and rank not in inits}
    return set(stacks) if inside and not inits else inside


def _is_in_init(stack: Stack) -> bool:
    return any(frame.function == "init_process_group" and not frame.is_users for frame in stack.frames)


def _parse_json(text: str) -> tuple[int, list[Thread]]:
    body: list[dict[str, Any]] = json.loads(text)
    if not body:
        return 0, []
    pid = int(body[0]["pid"])
    threads = [
        Thread(
            name=str(one.get("thread_name") or ("MainThread" if one.get("os_thread_id") == pid else "")),
            is_active=bool(one["active"]),
            stack=_to_stack(
                [(str(frame["filename"]), int(frame["line"]), str(frame["name"])) for frame in one["frames"]]
            ),
        )
        for one in body
        if one["pid"] == pid
    ]
    return pid, threads


def _parse_text(text: str) -> tuple[int, list[Thread]]:
    pid, threads = 0, list[Thread]()
    frames: list[tuple[str, int, str]] = []
    for line in text.splitlines():
        if found := _PROCESS.match(line):
            if pid:
                break  # its children
            pid = int(found["pid"])
        elif found := _THREAD.match(line):
            frames = []
            name = found["name"] or ("MainThread" if found["id"] == str(pid) else "")
            threads.append(Thread(name=name, is_active="active" in found["state"], stack=Stack()))
        elif threads and (found := _FRAME.match(line)):
            frames.append((found["file"], int(found["line"]), found["function"]))
            last = threads.pop()
            threads.append(Thread(name=last.name, is_active=last.is_active, stack=_to_stack(frames)))
    return pid, threads


def _to_stack(frames: Sequence[tuple[str, int, str]]) -> Stack:
    return Stack(
        frames=tuple(
            Frame(
                file=_lengthen(file, is_script=name == "<module>"),
                line=line,
                function=name.rpartition(".")[2],
            )
            for file, line, name in frames
            if file.endswith(".py") or file.startswith("<")  # native frames tell a user nothing
        )
    )


def _lengthen(file: str, *, is_script: bool) -> str:
    """Return a file with a folder in front that tells whose it is, where the text form has left it out."""
    if file.startswith(("/", "<")) or file[1:3] == ":\\":
        return file
    package = file.partition("/")[0]
    if package in _PACKAGES:
        return f"/site-packages/{file}"
    is_pythons = package.removesuffix(".py") in sys.stdlib_module_names and not (is_script and "/" not in file)
    return f"/lib/python3/{file}" if is_pythons else file
