"""Broadcast, gather, scatter, all_to_all and gathers into storage: anything goes, of any shape, to where it belongs."""

from __future__ import annotations

import warnings
from fractions import Fraction
from typing import Any

import pytest
import torch

import rankwise
from rankwise.runtime import collectives
from rankwise.testing.ranks import run_ranks

SIZES = [1, 2, 3]
DTYPES = [
    torch.bool, torch.int8, torch.int16, torch.uint16, torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.float64,
    torch.complex64,
]  # fmt: skip


def join() -> Any:
    warnings.simplefilter("error")
    return rankwise.init(timeout_s=20)


def make_tree(rank: int) -> Any:
    return {
        "rows": torch.arange(2.0 * (rank + 1)).view(rank + 1, 2) + rank,
        "kinds": [torch.tensor([rank % 2, 1]).to(dtype) for dtype in DTYPES],
        "scalar": torch.tensor(rank),
        "objects": ({"name": "x" * rank, "half": Fraction(1, rank + 2)}, None, 2**80 + rank),
        "large": torch.full((300_000 + rank,), rank, dtype=torch.int32),
        "empty": torch.zeros(0, 3),
        "turned": torch.arange(6).view(2, 3).T + rank,
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and bool((left.double() == right.double()).all() if not left.is_complex() else (left == right).all())
        )
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def broadcast_tree(root: int) -> bool:
    ctx = join()
    given = make_tree(root) if ctx.rank == root else None
    return same(collectives.broadcast(given, root=root), make_tree(root))


@pytest.mark.parametrize("world_size", SIZES)
def test_broadcast_carries_anything(world_size: int) -> None:
    """Every rank gets the root's tree, of all dtypes, objects and a tensor that is not contiguous; the others gave None."""
    assert all(run_ranks(broadcast_tree, world_size, world_size - 1))


def gather_trees() -> tuple[bool, bool, bool]:
    ctx = join()
    wanted = [make_tree(rank) for rank in range(ctx.world_size)]
    everywhere = collectives.all_gather(make_tree(ctx.rank))
    at_root = collectives.gather(make_tree(ctx.rank), root=ctx.world_size - 1)
    is_root = ctx.rank == ctx.world_size - 1
    return same(everywhere, wanted), is_root, same(at_root, wanted) if is_root else at_root is None


@pytest.mark.parametrize("world_size", SIZES)
def test_gathers_keep_uneven_trees_apart(world_size: int) -> None:
    """Trees whose tensors differ in shape on each rank arrive whole, without padding; of gather on the root only."""
    for everywhere, _, at_root in run_ranks(gather_trees, world_size):
        assert everywhere
        assert at_root


def gather_even() -> tuple[Any, Any, Any]:
    ctx = join()
    tree = {"t": torch.full((2, 3), ctx.rank, dtype=torch.int16), "flag": torch.tensor(ctx.rank == 0)}
    return collectives.all_gather(tree), collectives.gather(tree), collectives.all_gather(tree, concat=True)


def test_gathers_of_equal_shapes() -> None:
    """The short way for equal trees of tensors gives the same as the long one."""
    rows = [{"t": torch.full((2, 3), rank, dtype=torch.int16), "flag": torch.tensor(rank == 0)} for rank in range(3)]
    joined = {"t": torch.cat([row["t"] for row in rows]), "flag": torch.tensor([True, False, False])}
    for rank, (everywhere, at_root, concatenated) in enumerate(run_ranks(gather_even, 3)):
        assert same(everywhere, rows)
        assert same(at_root, rows) if rank == 0 else at_root is None
        assert same(concatenated, joined)


def gather_concat() -> Any:
    ctx = join()
    tree = {
        "logits": torch.full((ctx.rank, 2), float(ctx.rank)),
        "loss": torch.tensor(0.5 * ctx.rank),
        "name": f"r{ctx.rank}",
    }
    return collectives.all_gather(tree, concat=True)


def test_concat_joins_rows_and_lists_the_rest() -> None:
    """Uneven rows follow each other, of a rank with none too; 0-d tensors are stacked, objects listed."""
    for seen in run_ranks(gather_concat, 3):
        assert seen["logits"].tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
        assert seen["loss"].tolist() == [0.0, 0.5, 1.0]
        assert seen["name"] == ["r0", "r1", "r2"]


def gather_lists() -> Any:
    ctx = join()
    return collectives.all_gather(["prediction"] * ctx.rank)


def test_lists_of_objects_may_differ_in_length() -> None:
    """Each rank's list arrives at its own length, where torch aborts the receiver."""
    assert run_ranks(gather_lists, 3) == [[[], ["prediction"], ["prediction"] * 2]] * 3


def scatter_trees() -> tuple[bool, bool]:
    ctx = join()
    root, size = ctx.world_size - 1, ctx.world_size
    got = collectives.scatter([make_tree(rank) for rank in range(size)] if ctx.rank == root else None, root=root)
    rows = collectives.scatter(torch.arange(3 * size) if ctx.rank == 0 else None)
    return same(got, make_tree(ctx.rank)), rows.tolist() == [3 * ctx.rank, 3 * ctx.rank + 1, 3 * ctx.rank + 2]


@pytest.mark.parametrize("world_size", SIZES)
def test_scatter_gives_each_its_own(world_size: int) -> None:
    """Slots of different shapes and objects, and one tensor cut along dim 0."""
    assert run_ranks(scatter_trees, world_size) == [(True, True)] * world_size


def swap_trees() -> bool:
    ctx = join()
    size = ctx.world_size
    got = collectives.all_to_all([make_tree(10 * ctx.rank + to) for to in range(size)])
    return same(got, [make_tree(10 * source + ctx.rank) for source in range(size)])


@pytest.mark.parametrize("world_size", SIZES)
def test_all_to_all_swaps_anything(world_size: int) -> None:
    """Rank r gets from every rank what that one had for r, of any shape."""
    assert all(run_ranks(swap_trees, world_size))


def broadcast_in_place() -> tuple[Any, Any]:
    ctx = join()
    x, flags = torch.full((2, 2), float(ctx.rank)), torch.tensor([ctx.rank == 1])
    assert collectives.broadcast_({"x": x.T, "flags": flags}, root=1) is None
    linear = torch.nn.Linear(2, 2)
    with torch.no_grad():
        collectives.broadcast_(list(linear.parameters()), root=0)
    return (x, flags), [p.detach() for p in linear.parameters()]


def test_broadcast_in_place_writes_through_views() -> None:
    """Tensors and a model's parameters hold the root's values afterwards."""
    seen = run_ranks(broadcast_in_place, 2)
    assert all(same(first, (torch.ones(2, 2), torch.tensor([True]))) for first, _ in seen)
    assert same(seen[0][1], seen[1][1])


def gather_into_storage(uneven: bool) -> Any:
    ctx = join()
    rows = ctx.rank if uneven else 2
    total = sum(range(ctx.world_size)) if uneven else 2 * ctx.world_size
    tree = {
        "x": torch.full((rows, 3), ctx.rank + 0.5),
        "flags": torch.ones(rows, dtype=torch.int16) * ctx.rank,
    }
    out = {"flags": torch.full((total,), -1, dtype=torch.int16), "x": torch.full((total, 3), -1.0)}
    place = out["x"].data_ptr()
    collectives.all_gather_into(out, tree)
    assert out["x"].data_ptr() == place
    at_root = {name: torch.zeros_like(value) for name, value in out.items()} if ctx.rank == 0 else None
    collectives.gather_into(at_root, tree)
    assert ctx.rank != 0 or same({name: at_root[name] for name in out}, out)
    large = torch.arange(200_000 * (rows + 1)) + ctx.rank
    room = torch.empty(200_000 * (total + ctx.world_size), dtype=torch.int64)
    collectives.all_gather_into(room, large)
    wanted = torch.cat([torch.arange(200_000 * ((rank if uneven else 2) + 1)) + rank for rank in range(ctx.world_size)])
    return out, bool(torch.equal(room, wanted))


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("world_size", SIZES)
def test_gathers_into_storage_fill_it_in_the_order_of_ranks(world_size: int, uneven: bool) -> None:
    """Rows of all ranks follow each other in tensors that were there before, even or not, small or large."""
    counts = [rank if uneven else 2 for rank in range(world_size)]
    for out, large_fits in run_ranks(gather_into_storage, world_size, uneven):
        assert out["flags"].tolist() == [rank for rank in range(world_size) for _ in range(counts[rank])]
        assert out["x"][:, 2].tolist() == [rank + 0.5 for rank in range(world_size) for _ in range(counts[rank])]
        assert large_fits


def move_in_group() -> Any:
    ctx = join()
    group = collectives.new_group([1, 2])
    if ctx.rank not in group.ranks:
        return None
    x = torch.tensor([ctx.rank])
    out = torch.empty(2, dtype=torch.int64)
    collectives.all_gather_into(out, x, group=group)
    slots = ["for 1", "for 2"] if ctx.rank == 2 else None
    return [
        collectives.broadcast(ctx.rank, root=2, group=group),
        collectives.all_gather(ctx.rank, group=group),
        collectives.gather(x, root=2, group=group, concat=True),
        collectives.scatter(slots, root=2, group=group),
        collectives.all_to_all([f"{ctx.rank}-1", f"{ctx.rank}-2"], group=group),
        out.tolist(),
    ]


def test_roots_in_groups_are_global_ranks() -> None:
    """In the group of ranks 1 and 2, root=2 is the job's rank 2."""
    seen = run_ranks(move_in_group, 3)
    assert seen[0] is None
    assert seen[1] == [2, [1, 2], None, "for 1", ["1-1", "2-1"], [1, 2]]
    assert seen[2][:2] == [2, [1, 2]]
    assert seen[2][2].tolist() == [1, 2]
    assert seen[2][3:] == ["for 2", ["1-2", "2-2"], [1, 2]]


def work_alone() -> bool:
    join()
    x = torch.ones(2, requires_grad=True)
    results = [collectives.all_gather(x)[0], collectives.all_to_all([x])[0], collectives.all_reduce(x)]
    for result in results:
        result.zero_()
    collectives.barrier()
    return bool((x == 1).all()) and not any(result.requires_grad for result in results)


def test_a_world_of_one_behaves_as_a_larger_one() -> None:
    """Results are copies without gradient, as between several ranks: a script tested alone meets no surprise later."""
    assert run_ranks(work_alone, 1) == [True]
