"""Killed at any write, sync or rename of a save, a folder still loads: the old state or the new one, never half of one."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from faulty_disks import FaultyDisk
from rankwise import checkpoint
from rankwise.checkpoint import saving
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.linux

HALVES = ("write", "remove")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory if there is one: a sync of a disk takes long, and SIGKILL does not ask what was synced."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        yield Path(name)


def make_state(step: int) -> dict[str, Any]:
    """A state with its step in every value."""
    return {
        "weights": {name: torch.full((5, 3), float(step)) for name in "ab"},
        "count": torch.tensor(step),
        "step": step,
    }


def read_step(state: dict[str, Any]) -> int:
    """Return the step that a whole state is of."""
    found = {int(value) for tensor in state["weights"].values() for value in tensor.flatten()}
    found |= {int(state["count"]), state["step"]}
    assert len(found) == 1, f"a state of several steps: {found}"
    return found.pop()


def check_folder(folder: Path, case: object) -> int:
    """Load what is in the folder, then save there again: nothing half written may be left."""
    state = make_state(0)
    assert checkpoint.load(folder, state) in {1, 2}, case
    assert checkpoint.verify(folder) == [], case
    checkpoint.save(folder, make_state(3), step=3, keep=checkpoint.Keep(last=1))
    names = sorted(path.name for path in folder.iterdir() if path.name != ".writer")
    assert names == ["step-3"], case
    return read_step(state)


def fork(body: Callable[[], object]) -> int:
    """Run something in a forked process; return its id."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return pid


def wait_killed(pid: int) -> bool:
    """Wait for a forked process; return whether it was killed, not ended."""
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child raised"
    return os.WIFSIGNALED(status)


def list_cases(kinds: list[str]) -> list[tuple[int, str]]:
    """All places of a save where it can be killed."""
    cases = [(place, "before") for place in range(1, len(kinds) + 1)]
    cases += [(place, "halfway") for place, kind in enumerate(kinds, 1) if kind in HALVES]
    return [*cases, (len(kinds), "after")]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("step", [1, 2], ids=["again", "next"])
def test_one_rank_killed_at_every_operation(folder: Path, background: bool, step: int) -> None:
    """Whichever operation is the last, the folder loads whole, and the new state from its rename on."""

    def sweep() -> list[tuple[str, int]]:
        old = folder / "old"
        fork_pid = fork(lambda: checkpoint.save(old, make_state(1), step=1))
        assert not wait_killed(fork_pid)

        def save(target: Path, disk: FaultyDisk) -> None:
            saving.DISK = disk
            state = make_state(2)
            checkpoint.save(target, state, step=step, keep=checkpoint.Keep(last=1), background=background).wait()

        def count() -> None:
            disk = FaultyDisk(0)
            save(shutil.copytree(old, folder / "count"), disk)
            (folder / "kinds").write_text(" ".join(disk.done))

        assert not wait_killed(fork(count))
        kinds, outcomes = (folder / "kinds").read_text().split(), []
        for at, when in list_cases(kinds):
            copy = shutil.copytree(old, folder / f"{at}-{when}")
            assert wait_killed(fork(lambda: save(copy, FaultyDisk(at, when=when))))  # noqa: B023 - ends in this turn
            found = check_folder(copy, (at, when))
            is_after = at > 1 + kinds.index("rename") or when == "after"
            assert found == (2 if is_after else 1), (at, when, kinds)
            outcomes.append((f"{kinds[at - 1]} {when}", found))
        return outcomes

    outcomes = run_ranks(sweep, 1)[0]
    assert {"write halfway", "sync before", "rename before", "remove halfway"} <= {what for what, _ in outcomes}
    assert {found for _, found in outcomes} == {1, 2}


@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_ranks_killed_at_every_operation(folder: Path, victim: int) -> None:
    """A rank that dies in the middle takes the save with it, or not, but never half of it."""

    def sweep() -> list[int]:
        old = folder / "old"
        assert not wait_killed(fork(lambda: checkpoint.save(old, make_state(1), step=1)))

        def save(rank: int, target: Path, disk: FaultyDisk) -> None:
            store = dist.FileStore(f"{target}.store", 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
            if rank == victim:
                saving.DISK = disk
            checkpoint.save(target, make_state(2), step=2, keep=checkpoint.Keep(last=1))
            if rank == victim:
                Path(f"{target}.kinds").write_text(" ".join(disk.done))

        def run(target: Path, disk: FaultyDisk) -> bool:
            pids = [fork(lambda rank=rank: save(rank, target, disk)) for rank in range(2)]
            was_killed = wait_killed(pids[victim])
            if was_killed:
                os.kill(pids[1 - victim], signal.SIGKILL)  # as a launcher would; it may have raised before
                os.waitpid(pids[1 - victim], 0)
            else:
                assert not wait_killed(pids[1 - victim])
            return was_killed

        copy = shutil.copytree(old, folder / "count")
        assert not run(copy, FaultyDisk(0))
        kinds, found = Path(f"{copy}.kinds").read_text().split(), []
        for at, when in list_cases(kinds):
            copy = shutil.copytree(old, folder / f"{at}-{when}")
            assert run(copy, FaultyDisk(at, when=when))
            found.append(check_folder(copy, (victim, at, when)))
        return found

    found = run_ranks(sweep, 1)[0]
    assert set(found) <= {1, 2}
    assert found[0] == 1
    # Rank 1 has nothing to do with the commit: it can die only before.
    assert 2 in found or victim == 1
