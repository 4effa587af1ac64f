"""A state that some number of ranks saved loads on any other, exactly, however it was spread over them."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import rankwise
from rankwise import checkpoint
from rankwise.base.errors import CheckpointError
from rankwise.checkpoint import plan
from rankwise.testing import run_ranks, try_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.runtime.context import RankContext

WIDTH = 7  # not divisible: some ranks come away with less, or with nothing


def build(kind: str, ctx: RankContext, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with its optimizer, spread over the ranks."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(5, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    if kind == "ddp" and ctx.world_size > 1:
        model = rankwise.apply_ddp(model)
    elif kind == "fsdp":
        mesh = init_device_mesh("cpu", (ctx.world_size,), mesh_dim_names=("shard",))
        for layer in (model[0], model[2], model):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def whole(value: Any) -> Any:
    """A nested state with whole tensors."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {str(key).removeprefix("module."): whole(one) for key, one in value.items()}
    return [whole(one) for one in value] if isinstance(value, list) else value


def same(left: Any, right: Any) -> bool:
    """Whether two nested states are equal to the bit."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def save_trained(kind: str, folder: Path) -> tuple[Any, Any]:
    """Train a step, save, and return what was saved."""
    with rankwise.init(device="cpu") as ctx:
        model, optimizer = build(kind, ctx, seed=0)
        x_BF = torch.randn(6, 5, generator=torch.Generator().manual_seed(ctx.rank))
        model(x_BF).square().mean().backward()
        optimizer.step()
        checkpoint.save(folder, {"model": model, "optimizer": optimizer, "epoch": 3}, step=1)
        return whole(model.state_dict()), whole(optimizer.state_dict())


def load_anew(kinds: list[str], folder: Path) -> list[tuple[Any, Any, Any]]:
    """Load into models built with another seed; return what they have then."""
    found = []
    with rankwise.init(device="cpu") as ctx:
        for kind in kinds:
            model, optimizer = build(kind, ctx, seed=1 + ctx.rank if kind == "plain" else 1)
            state = {"model": model, "optimizer": optimizer, "epoch": 0}
            assert checkpoint.load(folder, state) == 1
            found.append((whole(model.state_dict()), whole(optimizer.state_dict()), state["epoch"]))
    return found


@pytest.mark.parametrize(("kind", "num_ranks"), [("fsdp", 3), ("ddp", 2), ("plain", 1)])
def test_saved_by_some_loads_on_any(tmp_path: Path, kind: str, num_ranks: int) -> None:
    """Parameters and the optimizer's states are the same to the bit at 1, 2 and 4 ranks, sharded, copied or plain."""
    saved = run_ranks(save_trained, num_ranks, kind, tmp_path)[0]
    assert checkpoint.verify(tmp_path) == []
    for size, kinds in [(1, ["plain", "fsdp"]), (2, ["fsdp", "ddp", "plain"]), (4, ["fsdp"])]:
        for found in run_ranks(load_anew, size, kinds, tmp_path):
            for other, (model, optimizer, epoch) in zip(kinds, found, strict=True):
                assert same(model, saved[0]), (other, size)
                assert same(optimizer, saved[1]), (other, size)
                assert epoch == 3
    read = checkpoint.read(tmp_path)
    assert same(whole(read["model"]), saved[0])


def test_copies_share_the_work_and_shards_are_written_once(tmp_path: Path) -> None:
    """Of a model that all ranks have a copy of, each writes about as much, and all bytes are there once."""

    def body() -> int:
        plan._LARGE_BYTES = 4096
        with rankwise.init(device="cpu"):
            torch.manual_seed(0)
            model = nn.ModuleDict({f"layer{num}": nn.Linear(32, 32) for num in range(9)})
            model["large"] = nn.Linear(64, 128, bias=False)
            checkpoint.save(tmp_path, {"model": rankwise.apply_ddp(model)}, step=1, rng=False)
            return sum(value.nbytes for value in model.state_dict().values())

    total = run_ranks(body, 3)[0]
    sizes = [path.stat().st_size for path in sorted((tmp_path / "step-1").glob("shard-*"))]
    assert len(sizes) == 3
    assert total <= sum(sizes) <= total + 3 * 2048
    assert max(sizes) <= 1.2 * min(sizes)
    heads = [checkpoint.list_checkpoints(tmp_path)[0].path.joinpath(f"shard-{rank:05d}.safetensors").read_bytes() for rank in range(3)]  # fmt: skip
    assert sum(b"large.weight[" in head for head in heads) > 1  # cut in rows, for several ranks
    model = nn.ModuleDict({f"layer{num}": nn.Linear(32, 32) for num in range(9)})
    model["large"] = nn.Linear(64, 128, bias=False)
    checkpoint.load(tmp_path, {"model": model})
    torch.manual_seed(0)
    expected = nn.ModuleDict({f"layer{num}": nn.Linear(32, 32) for num in range(9)})
    expected["large"] = nn.Linear(64, 128, bias=False)
    assert same(whole(model.state_dict()), whole(expected.state_dict()))
    assert checkpoint.verify(tmp_path) == []


def test_any_placement_becomes_any_other(tmp_path: Path) -> None:
    """A DTensor over two mesh axes loads into one that lies otherwise, and into a plain tensor."""
    values = torch.arange(35.0).view(5, 7)

    ways = [[Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(0), Replicate()], [Shard(0), Shard(0)]]

    def save() -> None:
        with rankwise.init(device="cpu"):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            for number, placements in enumerate(ways):
                state = {"t": distribute_tensor(values, mesh, placements)}
                checkpoint.save(tmp_path / str(number), state, step=1)

    def load() -> None:
        with rankwise.init(device="cpu") as ctx:
            mesh = init_device_mesh("cpu", (ctx.world_size,))
            for number, saved in enumerate(ways):
                for placements in ([Shard(1)], [Replicate()]):
                    target = distribute_tensor(torch.zeros(5, 7), mesh, placements)
                    checkpoint.load(tmp_path / str(number), {"t": target})
                    assert torch.equal(target.full_tensor(), values), (saved, placements)

    run_ranks(save, 4)
    run_ranks(load, 3)
    for number, saved in enumerate(ways):
        assert checkpoint.list_checkpoints(tmp_path / str(number))[0].manifest.mesh == {"a": 2, "b": 2}  # type: ignore[union-attr]
        plain = {"t": torch.zeros(5, 7)}
        checkpoint.load(tmp_path / str(number), plain)
        assert torch.equal(plain["t"], values), saved


def test_what_each_rank_has_comes_back_to_it(tmp_path: Path) -> None:
    """PerRank parts, and parts whose plain values differ by rank, go back to their rank, tensors and all; at another size they are refused or kept."""

    def save() -> None:
        with rankwise.init(device="cpu") as ctx:
            own = {"buffer": torch.full((ctx.rank + 1,), ctx.rank), "rank": ctx.rank}
            keep = checkpoint.PerRank(ctx.rank, at_other_size="keep")
            checkpoint.save(tmp_path, {"own": checkpoint.PerRank(own), "cursor": {"at": 10 * ctx.rank, "order": torch.tensor([ctx.rank, 7])}, "both": 5, "keep": keep}, step=1)  # fmt: skip

    def load(names: list[str]) -> Any:
        with rankwise.init(device="cpu"):
            parts: dict[str, Any] = {
                "own": checkpoint.PerRank(None), "cursor": {"at": 0, "order": torch.zeros(2, dtype=torch.int64)}, "both": None, "keep": checkpoint.PerRank("mine", at_other_size="keep"),
            }  # fmt: skip
            state = {name: parts[name] for name in names}
            checkpoint.load(tmp_path, state)
            return {name: getattr(value, "value", value) for name, value in state.items()}

    run_ranks(save, 2)
    for rank, state in enumerate(run_ranks(load, 2, ["own", "cursor", "both", "keep"])):
        assert state["own"]["buffer"].tolist() == [rank] * (rank + 1)
        assert (state["own"]["rank"], state["both"], state["keep"]) == (rank, 5, rank)
        assert state["cursor"]["at"] == 10 * rank
        assert state["cursor"]["order"].tolist() == [rank, 7]
    assert run_ranks(load, 3, ["both", "keep"]) == [{"both": 5, "keep": "mine"}] * 3
    for name, told in (
        ("own", "each of 2 ranks has saved its own 'own'"),
        ("cursor", "'cursor' differed between the 2 ranks"),
    ):
        for outcome in try_ranks(load, 3, [name]):
            assert isinstance(outcome.error, CheckpointError)
            assert told in str(outcome.error)
            assert "there are 3 ranks now" in str(outcome.error)


def draw() -> list[float]:
    """Some random numbers of each generator."""
    import numpy as np

    return [
        random.random(),
        float(torch.rand(1)),
        float(np.random.rand()),
    ]


def test_random_numbers_go_on_at_the_same_size(tmp_path: Path) -> None:
    """Each rank draws after loading what it would have drawn; at another size each draws something new, always the same."""

    def save() -> list[float]:
        with rankwise.init(device="cpu") as ctx:
            ctx.seed(3)
            draw()
            checkpoint.save(tmp_path, {"n": 1}, step=1)
            return draw()

    def load(*, rng: bool = True) -> list[float]:
        with rankwise.init(device="cpu"):
            draw()
            checkpoint.load(tmp_path, {"n": 1}, rng=rng)
            return draw()

    saved = run_ranks(save, 2)
    assert saved[0] != saved[1]
    assert run_ranks(load, 2) == saved
    elsewhere = run_ranks(load, 3)
    assert len({tuple(numbers) for numbers in [*elsewhere, *saved]}) == 5
    assert run_ranks(load, 3) == elsewhere
    assert run_ranks(load, 1) == run_ranks(load, 1)
    assert not any(numbers in saved for numbers in run_ranks(lambda: load(rng=False), 2))


def test_it_works_with_torchs_own_groups_and_with_none(tmp_path: Path) -> None:
    """A script that made its groups by init_process_group, and one that has none, save and load all the same."""

    def body(background: bool) -> tuple[int | None, Any]:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        checkpoint.save(tmp_path, {"t": torch.ones(3), "rank": rank}, step=4, background=background).wait()
        state = {"t": torch.zeros(3), "rank": None}
        step = checkpoint.load(tmp_path, state)
        dist.destroy_process_group()
        return step, (state["t"].tolist(), state["rank"])

    for background in (False, True):
        assert run_ranks(body, 2, background) == [(4, ([1.0] * 3, rank)) for rank in range(2)]

    def alone() -> tuple[int | None, list[float]]:
        state = {"t": torch.zeros(3)}
        checkpoint.save(tmp_path / "alone", {"t": torch.ones(3)}, step=5)
        return checkpoint.load(tmp_path, state), state["t"].tolist()

    no_rank: dict[str, str | None] = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
    assert run_ranks(alone, 1, env=no_rank) == [(4, [1.0] * 3)]


def test_it_works_again_in_a_second_group(tmp_path: Path) -> None:
    """After a group was destroyed and made anew, saves go on; nothing of the first is spoken to."""

    def body() -> list[int]:
        found = []
        for turn in range(3):
            store = dist.FileStore(str(tmp_path / f"store-{turn}"), 2)
            dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
            checkpoint.save(tmp_path / "runs", {"n": turn}, step=turn)
            found.append(checkpoint.load(tmp_path / "runs", {"n": 0}))
            dist.destroy_process_group()
        return found

    assert run_ranks(body, 2) == [[0, 1, 2]] * 2
