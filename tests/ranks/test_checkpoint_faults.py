"""What goes wrong on one rank is told on all of them, by file and cause, and none waits for ever."""

from __future__ import annotations

import errno
import io
import os
import shutil
from contextlib import redirect_stderr
from typing import TYPE_CHECKING, Any

import pytest
import torch

import rankwise
from faulty_disks import FaultyDisk, die, fail
from rankwise import checkpoint
from rankwise.base.errors import CheckpointError, CollectiveTimeoutError, UsageError
from rankwise.checkpoint import reading, saving, sources, writing
from rankwise.testing import RankOutcome, run_ranks, try_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def make_state(step: int, rank: int = 0) -> dict[str, Any]:
    return {"weights": {name: torch.full((4, 4), float(step)) for name in "abc"}, "step": step, "own": checkpoint.PerRank(rank)}  # fmt: skip


def read_step(state: dict[str, Any]) -> int:
    found = {int(value) for tensor in state["weights"].values() for value in tensor.flatten()} | {state["step"]}
    assert len(found) == 1, found
    return int(found.pop())


def save(folder: Path, step: int, rank: int = 0, **options: Any) -> None:
    checkpoint.save(folder, make_state(step, rank), step=step, **options)


def load(folder: Path, **options: Any) -> int | None:
    state = make_state(0)
    step = checkpoint.load(folder, state, **options)
    assert read_step(state) == (step or 0)
    return step


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".writer")


def read_same_error(outcomes: list[RankOutcome], kind: type[BaseException] = CheckpointError) -> str:
    """Return the error's text, after a look whether all ranks have it."""
    texts = {str(outcome.error).replace("[rank 0] ", "").replace("[rank 1] ", "") for outcome in outcomes}
    assert all(isinstance(outcome.error, kind) for outcome in outcomes), [outcome.error for outcome in outcomes]
    assert len(texts) == 1, texts
    return texts.pop()


# ------------------------------------------------------------------ saving


@pytest.mark.parametrize("victim", [0, 1])
def test_a_disk_error_at_every_operation_of_one_rank(tmp_path: Path, victim: int) -> None:
    """The error is the same on both ranks and names rank, file and cause; the old state loads, the next save works."""

    def body() -> None:
        with rankwise.init(device="cpu") as ctx:
            at, is_through = 0, False
            while not is_through:
                at += 1
                folder = tmp_path / f"runs-{at}"
                saving.DISK = FaultyDisk(0)
                save(folder, 1, ctx.rank)
                saving.DISK = disk = FaultyDisk(
                    at, fail(errno.ENOSPC), when="halfway", only=("write", "sync", "make_folder")
                )
                if ctx.rank != victim:
                    saving.DISK = FaultyDisk(0)
                told = ""
                try:
                    save(folder, 2, ctx.rank)
                except CheckpointError as error:
                    told = str(error)
                everywhere = ctx.control.exchange(told, what="test")
                is_through = told == ""
                assert set(everywhere) == {told}
                assert is_through or ("No space left on device" in told and f"[rank {victim}]" in told), told
                assert is_through or str(folder) in told, told
                is_through = bool(ctx.control.exchange(is_through and at > 3, what="test")[0])
                if ctx.rank == 0:
                    assert len(names(folder)) == (2 if not told else 1), names(folder)
                saving.DISK = FaultyDisk(0)
                assert load(folder) == (1 if told else 2)
                save(folder, 3, ctx.rank)
                assert load(folder) == 3
                disk.at = 0

    run_ranks(body, 2)


def test_no_memory_for_the_copy_on_one_rank(tmp_path: Path) -> None:
    """A rank that can't copy its share tells the others, who don't save either; the next save works."""

    def body() -> str:
        with rankwise.init(device="cpu") as ctx:
            copy = saving.Staging.copy
            if ctx.rank == 1:
                saving.Staging.copy = lambda *_: (_ for _ in ()).throw(MemoryError("no memory"))  # type: ignore[method-assign,misc]
            with pytest.raises(
                CheckpointError, match=r"\[rank 1\] step 1 was not saved: .*MemoryError: no memory"
            ) as caught:
                save(tmp_path, 1)
            saving.Staging.copy = copy  # type: ignore[method-assign]
            rankwise.barrier()
            assert names(tmp_path) == []
            save(tmp_path, 2)
            return str(caught.value)

    assert len(set(run_ranks(body, 2))) == 1


def test_a_bug_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    """An exception that nobody has thought of, on the way to the disk, ends the save on all ranks."""

    def body(victim: int, name: str) -> None:
        with rankwise.init(device="cpu") as ctx:
            if ctx.rank == victim:
                setattr(writing, name, lambda *_, **__: 1 / 0)
            save(tmp_path, 1, ctx.rank)

    for victim, name in ((0, "write_shard"), (1, "write_shard"), (0, "dump_index")):
        assert "step 1 was not saved: ZeroDivisionError" in read_same_error(try_ranks(body, 2, victim, name))
    assert names(tmp_path) == []


def test_a_state_that_one_rank_cant_give(tmp_path: Path) -> None:
    """A state_dict that raises on one rank, or holds what can't be saved there, is told on the others."""

    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("lost")

        def load_state_dict(self, _: dict[str, Any]) -> None:
            raise KeyError("lost")

    def body(build: Callable[[int], Any]) -> None:
        with rankwise.init(device="cpu") as ctx:
            checkpoint.save(tmp_path, {"part": build(ctx.rank)}, step=1)

    first, second = try_ranks(body, 2, lambda rank: Broken() if rank else {"n": 1})
    assert isinstance(second.error, KeyError)
    assert "the state could not be taken apart: KeyError: 'lost'" in str(first.error)
    first, second = try_ranks(body, 2, lambda rank: object() if rank else 1)
    assert "[rank 1] the state could not be taken apart: part is a builtins.object" in str(first.error)
    assert "part is a builtins.object" in str(second.error)


@pytest.mark.parametrize(
    ("give", "told"),
    [
        (lambda rank: {"step": 5 + rank}, "the step is 5 on rank 0 and 6 on rank 1"),
        (lambda rank: {"folder": f"run-{rank}"}, "run-0' on rank 0 and"),
        (lambda rank: {"parts": ["a", "b"] if rank else ["a"]}, "rank 0 and rank 1 don't save the same parts: ['b']"),
        (lambda rank: {"own": rank}, "the own parts is"),
        (lambda rank: {"metrics": {"loss": "x"} if rank else None}, "checkpoint.save(metrics={'loss': 'x'})"),
        (lambda rank: {"shape": rank + 1}, "is float32 [1] on rank 0 and float32 [2] on rank 1"),
    ],
    ids=["step", "folder", "parts", "own", "metrics", "shape"],
)  # fmt: skip
def test_ranks_that_dont_mean_the_same(tmp_path: Path, give: Callable[[int], dict[str, Any]], told: str) -> None:
    """Step, folder, parts or tensors that differ by rank are an error with both values, and nothing is written."""

    def body() -> None:
        with rankwise.init(device="cpu") as ctx:
            said = give(ctx.rank)
            state: dict[str, Any] = {"p": 1, **dict.fromkeys(said.get("parts", ()), 1)}
            if "shape" in said:
                state["t"] = torch.zeros(said["shape"])
            if said.get("own"):
                state["p"] = checkpoint.PerRank(1)
            folder = tmp_path / said.get("folder", "runs")
            checkpoint.save(folder, state, step=said.get("step", 1), metrics=said.get("metrics"))

    outcomes = try_ranks(body, 2)
    assert all(isinstance(outcome.error, (UsageError, CheckpointError)) for outcome in outcomes), outcomes
    assert all(told in str(outcome.error) for outcome in outcomes), [str(outcome.error) for outcome in outcomes]
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    """A rank that never calls ``save`` is named when the time is over."""

    def body() -> None:
        with rankwise.init(device="cpu", timeout_s=1.0) as ctx:
            if ctx.rank == 0:
                with pytest.raises(
                    CollectiveTimeoutError, match=r"checkpoint\.save of step 1: .* not entered by rank 1"
                ):
                    save(tmp_path, 1)
            os._exit(0)

    try_ranks(body, 2)


def test_a_rank_that_dies_in_the_middle_is_named(tmp_path: Path) -> None:
    """A rank that dies while it writes ends the save of the other, in time and by name; the old state is left."""

    def body() -> None:
        writing._FAREWELL_S = 0.1
        with rankwise.init(device="cpu", timeout_s=1.5) as ctx:
            save(tmp_path, 1)
            if ctx.rank == 1:
                saving.DISK = FaultyDisk(1, die, only=("write",))
            save(tmp_path, 2, ctx.rank)

    survivor, victim = try_ranks(body, 2)
    assert victim.exit_code == -9
    assert isinstance(survivor.error, CheckpointError), survivor.traceback
    assert "step 2 was not saved: for 2 s rank 1 did nothing, and had not reported a result" in str(survivor.error)
    assert names(tmp_path) == ["step-1"]
    assert checkpoint.verify(tmp_path) == []


def test_two_jobs_in_one_folder(tmp_path: Path) -> None:
    """The second job is refused on all its ranks, and told who is there."""
    save(tmp_path, 1)

    def body() -> None:
        with rankwise.init(device="cpu"):
            save(tmp_path, 2)

    told = read_same_error(try_ranks(body, 2))
    assert "step 2 was not saved: another job writes checkpoints into" in told
    assert f"process {os.getpid()} on host" in told
    assert load(tmp_path) == 1


def test_a_part_that_is_not_seen_on_rank_0(tmp_path: Path) -> None:
    """Hosts that don't share the folder are told so, and which file is not seen."""

    def body() -> None:
        writing._VISIBLE_S = 0.2
        with rankwise.init(device="cpu") as ctx:
            if ctx.rank == 1:
                write = writing.write_file
                writing.write_file = lambda disk, path, pieces: write(disk, path.with_name("elsewhere"), pieces)
            save(tmp_path, 1, ctx.rank)

    told = read_same_error(try_ranks(body, 2))
    assert "rank 1 wrote" in told
    assert "part-00001.json, but it is not visible on rank 0's host" in told
    assert "all hosts must share the folder" in told
    assert names(tmp_path) == []


# ------------------------------------------------------------------ loading


def save_two(folder: Path) -> None:
    def body() -> None:
        with rankwise.init(device="cpu") as ctx:
            for step in (1, 2):
                save(folder, step, ctx.rank)

    run_ranks(body, 2)


def test_a_bad_read_on_one_rank_is_a_bad_read_for_all(tmp_path: Path) -> None:
    """If one rank can't read the newest, all load the one before; asked for by its step, it is an error on all."""
    save_two(tmp_path)

    def body(step: int | None) -> int | None:
        with rankwise.init(device="cpu") as ctx:
            if ctx.rank == 1:
                read = reading.read_chunk

                def fail_of_step_2(path: Path, *rest: Any) -> None:
                    if path.parent.name == "step-2":
                        raise CheckpointError(f"{path} is damaged here")
                    read(path, *rest)

                reading.read_chunk = fail_of_step_2
            return load(tmp_path, step=step)

    assert run_ranks(body, 2, None) == [1, 1]
    told = {str(outcome.error).partition("can be loaded:")[2] for outcome in try_ranks(body, 2, 2)}
    assert len(told) == 1
    assert "step-2/shard" in told.pop()


def test_damage_is_agreed_on_by_all(tmp_path: Path) -> None:
    """A damaged newest is passed over on all ranks, and rank 0 alone says so."""
    save_two(tmp_path)
    path = tmp_path / "step-2" / "shard-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    def body() -> tuple[int | None, int]:
        with rankwise.init(device="cpu"), redirect_stderr(io.StringIO()) as said:
            step = load(tmp_path, rng=True)
            return step, said.getvalue().count("skipped step 2")

    assert run_ranks(body, 2) == [(1, 1), (1, 0)]


def hide(ranks: tuple[int, ...], rank: int) -> None:
    """Make this rank see no checkpoint, if it is one of those."""
    if rank in ranks:
        sources.list_checkpoints = lambda _folder: []  # type: ignore[attr-defined]
        sources.open_checkpoint = lambda path: pytest.fail(f"{path} was opened")  # type: ignore[attr-defined]


def test_where_only_rank_0_sees_the_folder_it_reads_for_all(tmp_path: Path) -> None:
    """Ranks without the folder are sent what they need, each its own; damage is noticed then too."""
    save_two(tmp_path)

    def body() -> tuple[int | None, Any]:
        with rankwise.init(device="cpu") as ctx, redirect_stderr(io.StringIO()) as said:
            hide((1,), ctx.rank)
            state = make_state(0)
            step = checkpoint.load(tmp_path, state, rng=True)
            assert read_step(state) == step
            assert ctx.rank or "rank 1 can't see" in said.getvalue()
            return step, state["own"].value

    assert run_ranks(body, 2) == [(2, 0), (2, 1)]
    path = tmp_path / "step-2" / "shard-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert run_ranks(body, 2) == [(1, 0), (1, 1)]


def test_where_rank_0_sees_nothing_it_is_an_error(tmp_path: Path) -> None:
    """A folder that only another rank's host has is named, on all ranks: nobody begins anew in silence."""
    save_two(tmp_path)

    def body() -> None:
        with rankwise.init(device="cpu") as ctx:
            hide((0,), ctx.rank)
            load(tmp_path)

    told = read_same_error(try_ranks(body, 2))
    assert f"rank 0 sees no checkpoint in {tmp_path}, and rank 1 sees step-2" in told


def test_an_older_view_on_one_rank_changes_nothing(tmp_path: Path) -> None:
    """A rank whose host does not show the newest yet is sent it, and not left behind with an older one."""
    save_two(tmp_path)
    stale = shutil.copytree(tmp_path, tmp_path / "stale")
    shutil.rmtree(stale / "step-2")

    def body() -> int | None:
        with rankwise.init(device="cpu") as ctx:
            if ctx.rank == 1:
                look = sources.list_checkpoints
                sources.list_checkpoints = lambda _folder: look(stale)  # type: ignore[attr-defined]
            return load(tmp_path)

    assert run_ranks(body, 2) == [2, 2]


def test_a_misfit_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    """A model that does not fit on one rank, and a load_state_dict that raises there, end the load on all."""
    save_two(tmp_path)

    class Picky:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, _: Any) -> None:
            raise ValueError("not mine")

    def body(build: Callable[[int], dict[str, Any]]) -> None:
        with rankwise.init(device="cpu") as ctx:
            checkpoint.load(tmp_path, build(ctx.rank))

    first, second = try_ranks(body, 2, lambda rank: {"absent": 1} if rank else {"step": 0})
    assert "has no part 'absent'" in str(first.error)
    assert "has no part 'absent'" in str(second.error)
    first, second = try_ranks(body, 2, lambda rank: {"step": Picky() if rank else 0})
    assert "[rank 1] ValueError: not mine" in str(first.error)
    assert isinstance(second.error, ValueError)
