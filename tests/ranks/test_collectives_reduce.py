"""Reductions over nested containers, compared with one process."""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

import rankwise
from rankwise.runtime import collectives
from rankwise.testing.ranks import run_ranks

SIZES = [1, 2, 3]


def join() -> Any:
    warnings.simplefilter("error")
    return rankwise.init(timeout_s=20)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Stats:
    loss: Any
    count: Any


def make_tree(rank: int) -> Any:
    generator = torch.Generator().manual_seed(rank)
    return {
        "weights": [
            torch.randn(3, 4, generator=generator, dtype=torch.float64),
            torch.randn(0, 2, dtype=torch.float64),
        ],
        "pair": Pair(torch.tensor(float(rank)), (rank + 1, rank / 4)),
        "stats": Stats(loss=torch.full((2, 2), rank + 0.5)[:, 1], count=10**15 + rank),
        "nothing": None,
        "big": torch.arange(300_000, dtype=torch.float32) + rank,
        7: torch.tensor([rank, -rank]),
    }


def pick_leaves(tree: Any) -> list[Any]:
    return [
        *tree["weights"], tree["pair"].left, *tree["pair"].right,
        tree["stats"].loss, tree["stats"].count, tree["big"], tree[7],
    ]  # fmt: skip


def reduce_by_hand(rows: list[Any], op: str) -> Any:
    if isinstance(rows[0], torch.Tensor):
        stacked = torch.stack(rows)
        names = {"sum": stacked.sum(0), "min": stacked.amin(0), "max": stacked.amax(0)}
        return names[op] if op in names else stacked.double().mean(0)
    return {"sum": sum, "min": min, "max": max, "mean": lambda row: sum(row) / len(row)}[op](rows)


def call_all_reduce(op: str) -> tuple[Any, bool]:
    ctx = join()
    tree = make_tree(ctx.rank)
    result = collectives.all_reduce(tree, op)
    same = all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        for a, b in zip(pick_leaves(tree), pick_leaves(make_tree(ctx.rank)), strict=True)
    )
    assert (type(result), type(result["pair"]), type(result["stats"])) == (dict, Pair, Stats)
    assert list(result) == list(tree)
    assert result["nothing"] is None
    return pick_leaves(result), same


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
def test_a_nested_all_reduce_equals_one_process(op: str, world_size: int) -> None:
    """Every leaf of a nested tree is what one process computes, on every rank; the input stays as it was."""
    rows = [pick_leaves(make_tree(rank)) for rank in range(world_size)]
    expected = [reduce_by_hand(list(column), op) for column in zip(*rows, strict=True)]
    for leaves, unmodified in run_ranks(call_all_reduce, world_size, op):
        assert unmodified
        for leaf, wanted in zip(leaves, expected, strict=True):
            assert isinstance(leaf, torch.Tensor) == isinstance(wanted, torch.Tensor)
            # Float sums of three may be rounded in another order.
            torch.testing.assert_close(
                torch.as_tensor(leaf).double(), torch.as_tensor(wanted).double(), rtol=1e-6, atol=0
            )


DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.complex64, torch.complex128,
]  # fmt: skip


def sum_dtypes() -> list[Any]:
    ctx = join()
    return collectives.all_reduce([torch.tensor([ctx.rank + 1, 2]).to(dtype) for dtype in DTYPES])


def test_every_dtype_can_be_added() -> None:
    """Sums keep the dtype, of int16 and complex too, which Gloo alone does not add or only in part."""
    for result in run_ranks(sum_dtypes, 2):
        assert [t.dtype for t in result] == DTYPES
        assert all(torch.equal(t, torch.tensor([3, 4]).to(t.dtype)) for t in result)


def reduce_numbers() -> dict[str, Any]:
    import numpy

    ctx = join()
    rank = ctx.rank
    return {
        "int": collectives.all_reduce(2**62 + rank),
        "product": collectives.all_reduce(2**40 + rank, "product"),
        "mean": collectives.all_reduce({"int": rank, "bool": rank == 0, "tensor": torch.tensor([rank])}, "mean"),
        "bool": collectives.all_reduce([rank == 0, torch.tensor([True, rank == 0])]),
        "any": collectives.all_reduce([rank == 0, torch.tensor([False, rank == 0])], "any"),
        "all": collectives.all_reduce([rank == 0, torch.tensor([True, rank == 0])], "all"),
        "numpy": collectives.all_reduce([numpy.full(2, rank, dtype=numpy.float32), numpy.float64(rank)]),
        "complex": collectives.all_reduce(complex(rank, 1)),
        "default": collectives.all_reduce(defaultdict(int, a=rank)),
        "ordered": collectives.all_reduce(OrderedDict(b=rank, a=1)),
    }


def test_numbers_come_back_as_numbers_and_are_exact() -> None:
    """Python's ints are added and multiplied beyond 64 bits, bools are counted, NumPy comes back as NumPy."""
    import numpy

    for seen in run_ranks(reduce_numbers, 2):
        assert seen["int"] == 2**63 + 1
        assert seen["product"] == 2**40 * (2**40 + 1)
        assert (seen["mean"]["int"], seen["mean"]["bool"]) == (0.5, 0.5)
        assert torch.equal(seen["mean"]["tensor"], torch.tensor([0.5], dtype=torch.float64))
        assert seen["bool"][0] == 1
        assert type(seen["bool"][0]) is int
        assert seen["bool"][1].tolist() == [2, 1]
        assert (seen["any"][0], seen["any"][1].tolist()) == (True, [False, True])
        assert (seen["all"][0], seen["all"][1].tolist()) == (False, [True, False])
        assert seen["numpy"][0].dtype == numpy.float32
        assert seen["numpy"][0].tolist() == [1, 1]
        assert type(seen["numpy"][1]) is numpy.float64
        assert seen["complex"] == 1 + 2j
        assert seen["default"] == {"a": 1}
        assert seen["default"].default_factory is int
        assert list(seen["ordered"].items()) == [("b", 1), ("a", 2)]


def add_small_to_large(precise: bool) -> float:
    ctx = join()
    value = torch.tensor(2.0**24 if ctx.rank == 0 else 1.0)
    return float(collectives.all_reduce(value, precise=precise))


def test_precise_sums_keep_what_float32_loses() -> None:
    """2**24 + 1 is no float32: only with `precise` does the sum hold it."""
    assert run_ranks(add_small_to_large, 2, True) == [2.0**24 + 1] * 2
    assert run_ranks(add_small_to_large, 2, False) == [2.0**24] * 2


def mean_of_large_halves() -> float:
    join()
    return float(collectives.all_reduce(torch.tensor(60000.0, dtype=torch.float16), "mean"))


def test_a_mean_of_halves_does_not_overflow() -> None:
    """The mean of 60000 and 60000 in float16 is 60000, though their sum is infinite."""
    assert run_ranks(mean_of_large_halves, 2) == [60000.0, 60000.0]


def reduce_in_another_order() -> dict[str, float]:
    ctx = join()
    names = ["loss", "f1", "acc"] if ctx.rank else ["acc", "loss", "f1"]
    return collectives.all_reduce({name: float(len(name)) for name in names})


def test_the_order_of_keys_does_not_matter() -> None:
    """Dicts filled in different orders, as from a set, are added key by key."""
    assert run_ranks(reduce_in_another_order, 2) == [{"loss": 8.0, "f1": 4.0, "acc": 6.0}] * 2


def reduce_in_place() -> list[Any]:
    ctx = join()
    x, buffer = torch.full((2, 3), float(ctx.rank + 1)), torch.zeros(4)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), float(ctx.rank))
    array = __import__("numpy").full(2, float(ctx.rank))
    assert collectives.all_reduce_({"x": x, "more": [buffer]}) is None
    collectives.all_reduce_(x[0])
    collectives.all_reduce_(x.to("cpu"))
    collectives.all_reduce_(x.T)
    collectives.all_reduce_([weight.grad])
    collectives.all_reduce_(weight.data)
    collectives.all_reduce_(torch.from_numpy(array))
    collectives.all_reduce_(tree={"x": x}["x"])
    with torch.no_grad():
        collectives.all_reduce_(weight)
    held = {"a": torch.ones(1)}
    collectives.all_reduce_(held)
    collectives.all_reduce_(list(held.values()))
    return [x, weight.grad, weight.detach(), array, held["a"]]


def test_in_place_takes_views_gradients_and_shared_memory() -> None:
    """What lives on elsewhere is never called a temporary: views, gradients, x.to() of the same device, NumPy's memory."""
    for x, grad, weight, array, held in run_ranks(reduce_in_place, 2):
        assert x.tolist() == [[48.0] * 3, [24.0] * 3]
        assert grad.tolist() == [1.0, 1.0]
        assert weight.tolist() == [4.0, 4.0]
        assert array.tolist() == [1.0, 1.0]
        assert held.tolist() == [4.0]


def reduce_to_root() -> Any:
    ctx = join()
    return collectives.reduce({"a": ctx.rank, "t": torch.ones(2)}, root=1)


def test_reduce_gives_the_result_to_the_root_only() -> None:
    """The other ranks hold None, not a partial sum."""
    seen = run_ranks(reduce_to_root, 3)
    assert (seen[0], seen[2]) == (None, None)
    assert seen[1]["a"] == 3
    assert seen[1]["t"].tolist() == [3.0, 3.0]


def scatter_sums() -> list[Any]:
    ctx = join()
    size = ctx.world_size
    return [
        collectives.reduce_scatter(torch.arange(2.0 * size) * (ctx.rank + 1)),
        collectives.reduce_scatter([{"t": torch.full((slot + 1,), 1.0), "n": slot + ctx.rank} for slot in range(size)]),
        collectives.reduce_scatter([torch.tensor([True])] * size, "all"),
    ]


@pytest.mark.parametrize("world_size", SIZES)
def test_reduce_scatter_gives_each_rank_its_own_sum(world_size: int) -> None:
    """Even and uneven slots: rank r holds what one process gets for slot r."""
    factor = sum(range(1, world_size + 1))
    for rank, (flat, tree, flag) in enumerate(run_ranks(scatter_sums, world_size)):
        assert flat.tolist() == [2.0 * rank * factor, (2.0 * rank + 1) * factor]
        assert tree["t"].tolist() == [float(world_size)] * (rank + 1)
        assert tree["n"] == rank * world_size + sum(range(world_size))
        assert flag.tolist() == [True]


def reduce_in_groups() -> tuple[float, int]:
    ctx = join()
    evens, odds = collectives.new_group([2, 0]), collectives.new_group([1], timeout_s=5)
    group = evens if ctx.rank % 2 == 0 else odds
    return collectives.all_reduce(float(ctx.rank + 1), group=group), int(group.timeout_s)


def test_groups_reduce_among_themselves_with_the_jobs_timeout() -> None:
    """Ranks 0 and 2 add up without rank 1; a group inherits the job's timeout unless it is given one."""
    assert run_ranks(reduce_in_groups, 3) == [(4.0, 20), (2.0, 5), (4.0, 20)]


def reduce_many() -> bool:
    ctx = join()
    sizes = [1, 100, 70_000, 300_000] * 10
    result = collectives.all_reduce([torch.full((size,), float(ctx.rank + index)) for index, size in enumerate(sizes)])
    own = len({leaf.untyped_storage().data_ptr() for leaf in result}) == len(sizes)
    return own and all(torch.equal(leaf, torch.full_like(leaf, 1.0 + 2 * index)) for index, leaf in enumerate(result))


def test_results_that_travelled_together_own_their_memory() -> None:
    """Small and large tensors mixed come back in their places, and none keeps the buffer of the others alive."""
    assert run_ranks(reduce_many, 2) == [True, True]


def reduce_empty_first() -> Any:
    join()
    return collectives.all_reduce([torch.zeros(0, 3), torch.ones(2)])


def test_an_empty_tensor_in_front_travels_too() -> None:
    """A tensor without elements comes back as such, and what follows it is not shifted."""
    for empty, ones in run_ranks(reduce_empty_first, 2):
        assert tuple(empty.shape) == (0, 3)
        assert ones.tolist() == [2.0, 2.0]
