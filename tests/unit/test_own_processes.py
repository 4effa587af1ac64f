"""Where the processes of a rank stand: those that it waits for are asked, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.evidence.reader import own_processes, pyspy
from rankwise.evidence.reader.notes import Frame, Stack
from scenes import elsewhere, in_loader, rank, scene, workers

if TYPE_CHECKING:
    import pytest

_DATA = "/env/lib/python3.11/site-packages/torch/utils/data/_utils"
_FORKED = (
    Frame(file=f"{_DATA}/worker.py", line=359, function="_worker_loop"),
    Frame(file="/env/lib/python3.11/multiprocessing/process.py", line=314, function="_bootstrap"),
    Frame(file="/home/u/train.py", line=23, function="<module>"),
)
_FETCHING = (
    Frame(file="/env/lib/python3.11/threading.py", line=320, function="wait"),
    Frame(file="/home/u/data.py", line=12, function="read_remote"),
    Frame(file="/home/u/data.py", line=8, function="__getitem__"),
    Frame(file=f"{_DATA}/fetch.py", line=54, function="fetch"),
)
_IDLE = (Frame(file="/env/lib/python3.11/multiprocessing/queues.py", line=113, function="get"),)


def test_only_living_workers_that_a_rank_waits_for_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank elsewhere, and workers that are dead or stopped, cost no look; one that can't be read is left without a stack, and none has the lines at which its rank has forked it."""
    asked = []

    def take(pid: int, *, pauses: bool) -> pyspy.SpyDump | str:
        assert not pauses
        asked.append(pid)
        if pid != 9000:
            return "py-spy may not read it"
        thread = pyspy.Thread(name="MainThread", is_active=False, stack=Stack(frames=_FETCHING + _FORKED))
        return pyspy.SpyDump(pid=pid, threads=(thread,))

    monkeypatch.setattr(pyspy, "take", take)
    apart = tuple(replace(one, pid=one.pid + 100) for one in workers("S"))
    found = own_processes.with_stacks(
        scene(
            rank(0, at=elsewhere(), children=apart, still_s=0.0),
            rank(1, at=in_loader(), children=workers("S", "S", "Z", "T")),
        )
    )
    assert sorted(asked) == [9000, 9001]
    stacks = [child.stack for one in found.ranks for child in one.children]
    assert [stack is None for stack in stacks] == [True, False, True, True, True]
    assert stacks[1] is not None
    assert [frame.file for frame in stacks[1].frames if frame.is_users] == ["/home/u/data.py"] * 2
