"""Copies of the state in the hosts' memory: each rank's variable names the memory of its host, as the launcher does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankwise
from rankwise import checkpoint
from rankwise.base.errors import CheckpointError
from rankwise.base.host_memory import VARIABLE
from rankwise.checkpoint import agreeing
from rankwise.testing.ranks import run_ranks


def enter_host(root: Path, host: int) -> Path:
    """Be on a host of its own, as far as memory goes."""
    memory = root / f"memory{host}"
    memory.mkdir(exist_ok=True)
    os.environ[VARIABLE] = str(memory)
    return memory


def save_numbers(root: str, hosts: list[int], steps: list[tuple[int, bool]]) -> None:
    """Save some steps; True for those into memory."""
    with rankwise.init(device="cpu") as ctx:
        enter_host(Path(root), hosts[ctx.rank])
        for step, memory in steps:
            state = {"x": torch.full((5,), float(step)), "own": checkpoint.PerRank(ctx.rank * 100 + step)}
            checkpoint.save(Path(root) / "disk", state, step=step, memory=memory)


def load_numbers(root: str, hosts: list[int]) -> tuple[int | None, float, Any]:
    """Load the latest."""
    with rankwise.init(device="cpu") as ctx:
        enter_host(Path(root), hosts[ctx.rank])
        state: dict[str, Any] = {"x": torch.zeros(5), "own": checkpoint.PerRank(None, "keep")}
        step = checkpoint.load(Path(root) / "disk", state)
        return step, float(state["x"].sum()), state["own"].value


def test_the_later_of_memory_and_disk_is_loaded(tmp_path: Path) -> None:
    """Whichever was saved last is the latest, and only one copy stays in memory."""
    root = str(tmp_path)
    run_ranks(save_numbers, 2, root, [0, 0], [(1, False), (2, True), (3, True)])
    assert [one.step for one in checkpoint.list_checkpoints(tmp_path / "disk")] == [1]
    assert len(list(tmp_path.glob("memory0/*/step-*"))) == 1
    assert run_ranks(load_numbers, 2, root, [0, 0]) == [(3, 15.0, 3), (3, 15.0, 103)]
    run_ranks(save_numbers, 2, root, [0, 0], [(2, False)])  # the job went back by itself
    assert run_ranks(load_numbers, 2, root, [0, 0])[0][0] == 2


def test_without_the_memory_the_disk_is_loaded(tmp_path: Path) -> None:
    """A host that has lost its memory costs the steps since the last checkpoint on disk, and nothing else."""
    root = str(tmp_path)
    run_ranks(save_numbers, 2, root, [0, 0], [(1, False), (2, True)])
    shutil.rmtree(tmp_path / "memory0")
    assert run_ranks(load_numbers, 2, root, [0, 0])[1][:2] == (1, 5.0)


def test_every_host_keeps_what_its_ranks_need(tmp_path: Path) -> None:
    """On two hosts each memory has a whole copy of what all ranks share, and its own ranks' parts."""
    root = str(tmp_path)
    run_ranks(save_numbers, 3, root, [0, 1, 1], [(4, True)])
    assert len(list(tmp_path.glob("memory*/*/step-4"))) == 2
    assert run_ranks(load_numbers, 3, root, [0, 1, 1]) == [(4, 20.0, 4), (4, 20.0, 104), (4, 20.0, 204)]


def test_a_rank_on_a_new_host_gets_the_values_from_others(tmp_path: Path) -> None:
    """Rank 2 finds an empty memory: another rank reads for it."""
    root = str(tmp_path)
    run_ranks(save_numbers, 3, root, [0, 1, 1], [(4, True)])
    assert [one[:2] for one in run_ranks(load_numbers, 3, root, [0, 1, 2])] == [(4, 20.0)] * 3


def test_a_damaged_copy_is_passed_over(tmp_path: Path) -> None:
    """Memory that changed is noticed like a disk that did: the checkpoint on disk is loaded by all ranks."""
    root = str(tmp_path)
    run_ranks(save_numbers, 2, root, [0, 1], [(1, False), (2, True)])
    shard = next(tmp_path.glob("memory1/*/step-2/shard*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert [one[:2] for one in run_ranks(load_numbers, 2, root, [0, 1])] == [(1, 5.0)] * 2


def save_sharded(root: str, hosts: list[int], step: int, *, memory: bool) -> None:
    """Save a sharded model whose weights are known."""
    with rankwise.init(device="cpu") as ctx:
        enter_host(Path(root), hosts[ctx.rank])
        checkpoint.save(Path(root) / "disk", {"model": build_sharded(ctx, float(step))}, step=step, memory=memory)


def load_sharded(root: str, hosts: list[int]) -> tuple[int | None, bool]:
    """Load it; tell whether the weights are right."""
    with rankwise.init(device="cpu") as ctx:
        enter_host(Path(root), hosts[ctx.rank])
        model = build_sharded(ctx, 0.0)
        step = checkpoint.load(Path(root) / "disk", {"model": model})
        weight = model.weight.full_tensor()  # type: ignore[operator]
        return step, bool((weight == torch.arange(21.0).view(7, 3) + float(step or 0)).all())


def build_sharded(ctx: rankwise.RankContext, plus: float) -> nn.Linear:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(3, 7, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(21.0).view(7, 3) + plus)
    fully_shard(model, mesh=init_device_mesh("cpu", (ctx.world_size,)))
    return model


@pytest.mark.parametrize(("hosts", "later"), [([0, 0, 1], [0, 0, 1]), ([0, 0, 1], [1, 0, 0]), ([0, 1, 2], [2, 0, 1])])
def test_shards_find_their_ranks_again(tmp_path: Path, hosts: list[int], later: list[int]) -> None:
    """Each host's memory has its ranks' shards only; wherever the ranks come to be, as long as all memories are there, they load."""
    root = str(tmp_path)
    run_ranks(lambda: save_sharded(root, hosts, 5, memory=True), 3)
    assert run_ranks(load_sharded, 3, root, later) == [(5, True)] * 3


def test_shards_of_a_lost_host_are_missed(tmp_path: Path) -> None:
    """With a host its shards are gone: the copies are not whole, and the disk is loaded."""
    root = str(tmp_path)
    run_ranks(lambda: save_sharded(root, [0, 1], 1, memory=False), 2)
    run_ranks(lambda: save_sharded(root, [0, 1], 2, memory=True), 2)
    shutil.rmtree(tmp_path / "memory1")
    assert run_ranks(load_sharded, 2, root, [0, 1]) == [(1, True)] * 2


def test_memory_that_is_too_small_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that does not fit is refused before anything is written: a full tmpfs would take the memory from all."""
    (tmp_path / "memory0").mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "memory0"))
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result((1, 1, 10, 10, 10, 0, 0, 0, 0, 255)))
    with pytest.raises(CheckpointError, match=r"needs 0\.00 GB.* free"):
        checkpoint.save(tmp_path / "disk", {"x": torch.zeros(1000)}, step=1, memory=True)


def test_without_the_launcher_copies_go_to_disk(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Where nobody would clean up the memory, the copy is a checkpoint on disk, and that is said once."""
    monkeypatch.delenv(VARIABLE, raising=False)
    agreeing._warn_of_no_memory.cache_clear()
    for step in (1, 2):
        checkpoint.save(tmp_path, {"x": torch.zeros(3)}, step=step, memory=True)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-2"
    assert capfd.readouterr().err.count("no copies in memory") == 1


def test_a_lost_host_costs_its_ranks_own_parts(tmp_path: Path) -> None:
    """What all share is still in the other memory, but not rank 1's own: the disk is loaded, on all ranks."""
    root = str(tmp_path)
    run_ranks(save_numbers, 2, root, [0, 1], [(1, False), (2, True)])
    shutil.rmtree(tmp_path / "memory1")
    assert [one[:2] for one in run_ranks(load_numbers, 2, root, [0, 1])] == [(1, 5.0)] * 2


@pytest.mark.parametrize("lost", [0, 1])
def test_without_a_hosts_generators_all_are_seeded_anew(tmp_path: Path, lost: int) -> None:
    """Generators are no reason to lose steps: the copy is loaded, and the ranks draw differently from each other."""

    def save() -> None:
        with rankwise.init(device="cpu") as ctx:
            enter_host(tmp_path, ctx.rank)
            for step, memory in ((1, False), (2, True)):
                checkpoint.save(tmp_path / "disk", {"x": torch.full((5,), float(step))}, step=step, memory=memory)

    def load() -> tuple[int | None, float, float]:
        with rankwise.init(device="cpu") as ctx:
            enter_host(tmp_path, ctx.rank)
            state = {"x": torch.zeros(5)}
            torch.manual_seed(7)
            step = checkpoint.load(tmp_path / "disk", state, rng=True)
            return step, float(state["x"].sum()), float(torch.rand(1))

    run_ranks(save, 2)
    shutil.rmtree(tmp_path / f"memory{lost}")
    first, again = run_ranks(load, 2), run_ranks(load, 2)
    assert [one[:2] for one in first] == [(2, 10.0)] * 2
    assert first[0][2] != first[1][2]
    assert first == again


def test_after_a_lost_host_the_disk_counts_on(tmp_path: Path) -> None:
    """A job that resumed from a memory that rank 0's host has not, saves to the disk: that is the latest."""

    def save(steps: list[tuple[int, bool]], *, resume: bool) -> int | None:
        with rankwise.init(device="cpu") as ctx:
            enter_host(tmp_path, ctx.rank)
            state = {"x": torch.zeros(5)}
            began = checkpoint.load(tmp_path / "disk", state) if resume else None
            for step, memory in steps:
                checkpoint.save(tmp_path / "disk", {"x": torch.full((5,), float(step))}, step=step, memory=memory)
            return began

    run_ranks(lambda: save([(10, False), (15, True), (16, True), (17, True)], resume=False), 2)
    shutil.rmtree(tmp_path / "memory0")
    assert run_ranks(lambda: save([(20, False), (30, False)], resume=True), 2) == [17, 17]
    assert run_ranks(lambda: save([], resume=True), 2) == [30, 30]
