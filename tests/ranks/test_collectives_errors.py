"""Mistakes that torch lets pass: each rank reads the same clear error, and nothing hangs, aborts or goes wrong in silence."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import rankwise
from rankwise.base.errors import CollectiveError, CollectiveTimeoutError, UsageError
from rankwise.base.rank_names import name_ranks
from rankwise.runtime import collectives
from rankwise.testing.ranks import run_ranks, try_ranks

if TYPE_CHECKING:
    from collections.abc import Callable


def join() -> Any:
    return rankwise.init(timeout_s=20)


def expect(function: Callable[[int], Any], *words: str, world_size: int = 3) -> str:
    """Run on several ranks; return the error's message, which is the same on each and holds all these words."""

    def run() -> str:
        ctx = join()
        try:
            function(ctx.rank)
        except CollectiveError as error:
            return f"{error.message}\n{error.hint}"
        return "no error"

    seen = run_ranks(run, world_size)
    assert len(set(seen)) == 1, seen
    for word in words:
        assert word in seen[0], seen[0]
    return seen[0]


def test_shapes_that_differ_are_named() -> None:
    """C5: all_reduce of (4,) on rank 0 and (3,) elsewhere names both shapes and their ranks."""
    expect(lambda rank: collectives.all_reduce({"x": torch.ones(3 if rank else 4)}), "rank 0: ['x'] is float32 (4,)", "ranks 1, 2: ['x'] is float32 (3,)", "test_collectives_errors.py:")  # fmt: skip


def test_shapes_of_equal_size_that_differ_are_named() -> None:
    """C6: (2, 3) and (3, 2) are not scrambled into each other."""
    expect(
        lambda rank: collectives.all_reduce(torch.ones((3, 2) if rank else (2, 3))),
        "float32 (2, 3)",
        "float32 (3, 2)",
    )


def test_dtypes_that_differ_are_named() -> None:
    """C7: float32 and int32 are not added bit by bit."""
    expect(lambda rank: collectives.all_reduce(torch.ones(3, dtype=torch.int32 if rank == 1 else torch.float32)), "ranks 0, 2: float32 (3,)", "rank 1: int32 (3,)", "cast")  # fmt: skip


def test_a_number_and_a_tensor_are_told_apart() -> None:
    """C7: a float on one rank where the others have a tensor."""
    expect(lambda rank: collectives.all_reduce(torch.ones(()) if rank else 1.0), "rank 0: float", "float32 ()")


def call_other_things(rank: int) -> None:
    if rank == 1:
        collectives.broadcast(torch.ones(3))
    else:
        collectives.all_reduce(torch.ones(3))


def test_calls_that_differ_are_named() -> None:
    """C8: all_reduce against broadcast does not hang."""
    expect(call_other_things, "ranks 0, 2: all_reduce", "rank 1: broadcast")


@pytest.mark.parametrize("call", ["broadcast", "broadcast_", "reduce", "gather", "scatter"])
def test_roots_that_differ_are_named(call: str) -> None:
    """C8: `root=rank` does not hang."""
    x = torch.ones(3)
    expect(
        lambda rank: getattr(collectives, call)([x] * 3 if call == "scatter" else x, root=rank),
        "the root differs",
        "rank 1: root 1",
    )


def test_operations_that_differ_are_named() -> None:
    """C8: max on one rank, sum on the others."""
    expect(
        lambda rank: collectives.all_reduce(1.0, "sum" if rank else "max"),
        "rank 0: op max",
        "ranks 1, 2: op sum",
    )


def reorder(rank: int) -> None:
    def loss() -> Any:
        return collectives.all_reduce(torch.tensor(1.0))

    def accuracy() -> Any:
        return collectives.all_reduce(torch.tensor(100.0))

    for call in (loss, accuracy) if rank else (accuracy, loss):
        call()


def test_calls_in_another_order_are_not_paired() -> None:
    """C3: two all_reduces of equal shapes in different orders raise before their values mix."""
    expect(reorder, "the call site differs", "out of step")


def reorder_in_helper(rank: int) -> None:
    def mean(value: float, name: str) -> Any:
        return collectives.all_reduce(value, "mean", name=name)

    for name in ("loss's", "accuracy") if rank else ("accuracy", "loss's"):
        mean(1.0, name)


def test_calls_in_another_order_through_a_helper_are_told_apart_by_name() -> None:
    """C3: the line is the same; names, with whatever quotes in them, tell the calls apart."""
    expect(reorder_in_helper, "the call site differs", "loss's")


def call_from_two_lines(level: str, name: str | None) -> Any:
    ctx = join()
    collectives.set_checking(level)  # type: ignore[arg-type]
    if ctx.rank:
        return collectives.all_reduce(1, name=name)
    return collectives.all_reduce(1, name=name)


@pytest.mark.parametrize(("level", "name"), [("full", "meet"), ("calls", None), ("off", None)])
def test_calls_from_different_lines_can_be_meant(level: str, name: str | None) -> None:
    """With a common name, or the line not compared, two lines are one call."""
    assert run_ranks(call_from_two_lines, 2, level, name) == [2, 2]


def test_keys_that_differ_are_named() -> None:
    """C4: metrics that only some ranks have are named with their ranks."""
    expect(lambda rank: collectives.all_reduce({"loss": 1.0, "f1" if rank else "acc": 2.0}), "rank 0: has ['acc']", "ranks 1, 2: has ['f1']")  # fmt: skip


@pytest.mark.parametrize("call", ["broadcast", "broadcast_", "reduce", "gather", "scatter"])
def test_a_root_outside_the_group_is_refused(call: str) -> None:
    """C11: roots are global ranks; the error names the members."""
    x = torch.ones(1)
    expect(
        lambda _: getattr(collectives, call)([x] * 3 if call == "scatter" else x, root=7),
        "root 7",
        "ranks 0-2",
    )


def call_from_outside(rank: int) -> Any:
    group = collectives.new_group([0, 2])
    if rank == 1:
        collectives.all_reduce(1, group=group)
    raise CollectiveError(
        "rank 1 called a collective of a group that it is not in (ranks 0, 2)", hint="only members may call"
    )


def test_a_rank_outside_the_group_is_told_so() -> None:
    """C11: it does not wait; the members are not concerned."""
    outcomes = try_ranks(lambda: call_from_outside(join().rank), 3)
    assert "not in (ranks 0, 2)" in str(outcomes[1].error)


def test_groups_of_different_lists_are_named() -> None:
    """C10: rank-dependent lists raise on all ranks."""
    expect(
        lambda rank: collectives.new_group([0, 1] if rank < 2 else [1, 2]),
        "ranks 0, 1: ranks [0, 1]",
        "rank 2: ranks [1, 2]",
    )


@pytest.mark.parametrize(
    ("ranks", "word"), [([0, 9], "9, which is not a rank"), ([0, 0], "rank 0 twice"), ([], "no ranks")]
)
def test_groups_that_cannot_be_are_refused(ranks: list[int], word: str) -> None:
    """C10: unknown, doubled or no members."""
    expect(lambda _: collectives.new_group(ranks), word, world_size=2)


@pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="CPython 3.14 lends references: a variable looks like a temporary"
)
def test_a_temporary_is_refused_in_place() -> None:
    """C15: a tensor that nobody holds would lose its result; so inside containers that nobody holds."""
    kept = torch.ones(2)
    expect(lambda _: collectives.all_reduce_(torch.ones(2)), "temporary", "keep it in a variable", world_size=2)
    expect(
        lambda _: collectives.all_reduce_({"a": kept, "b": [kept + 1]}),
        "['b'][0] is a temporary",
        world_size=2,
    )
    expect(lambda _: collectives.all_reduce_(kept.double(), group=None), "temporary", world_size=2)


@pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="CPython 3.14 lends references: a variable looks like a temporary"
)
def test_a_temporary_is_refused_where_a_broadcast_arrives() -> None:
    """C15: on the ranks that receive; the root only gives, and may pass what it likes."""
    expect(lambda _: collectives.broadcast_(torch.ones(2), root=1), "rank 0:", "temporary", world_size=2)


@pytest.mark.parametrize("leaf", [0.5, 3, "text"])
def test_a_number_is_refused_in_place(leaf: Any) -> None:
    """C18: the path, the value and what to call instead; on all ranks though only rank 1 did it."""
    x = torch.ones(1)
    expect(lambda rank: collectives.all_reduce_({"x": x, "loss": leaf if rank == 1 else x}), "rank 1", "['loss']", repr(leaf), "new = all_reduce(old)")  # fmt: skip


def test_a_parameter_that_requires_grad_is_refused_in_place() -> None:
    """C13: overwriting what autograd has recorded is refused."""
    weight = torch.nn.Parameter(torch.ones(2))
    expect(lambda _: collectives.all_reduce_(weight), "requires grad", "detach()", world_size=2)


def test_objects_are_refused_in_reductions() -> None:
    """C18: with path and value; all_gather is named as the way."""
    expect(
        lambda _: collectives.all_reduce({"name": "run"}),
        "['name'] is a str ('run')",
        "all_gather",
        world_size=2,
    )


@pytest.mark.parametrize(
    ("leaf", "op", "word"),
    [
        (torch.tensor([1j]), "max", "complex"),
        (torch.tensor([1.0]), "any", "is for bools"),
        (torch.tensor([True]), "product", "use op='all'"),
        (torch.float8_e4m3fn, "sum", "no arithmetic"),
        (torch.tensor([1.0]), "avg", "there is no operation 'avg'"),
        (torch.tensor([1.0]).to_sparse(), "sum", "to_dense()"),
        (torch.empty(1, device="meta"), "sum", "meta device"),
        (2**63, "sum", "63 can be sent"),
    ],
)
def test_what_cannot_be_reduced_is_refused(leaf: Any, op: str, word: str) -> None:
    """Operations that make no sense for a dtype, and tensors without plain values."""

    def call(_: int) -> None:
        # torch can't pickle a float8 tensor on its way to the ranks: made there.
        value = torch.ones(1).to(leaf) if isinstance(leaf, torch.dtype) else leaf
        collectives.all_reduce([value], op)  # type: ignore[arg-type]

    expect(call, word, world_size=2)


def test_a_sum_that_does_not_fit_is_an_error() -> None:
    """100 + 100 + 100 in int8 is no 44: the true sum and the limits are told."""
    expect(lambda _: collectives.all_reduce(torch.tensor([100], dtype=torch.int8)), "is 300", "-128 and 127")


def fail_in_place() -> list[Any]:
    ctx = join()
    first, second = torch.ones(3), torch.tensor([100], dtype=torch.int8)
    with pytest.raises(CollectiveError):
        collectives.all_reduce_([first, second])
    with pytest.raises(CollectiveError):
        collectives.broadcast_([first, torch.ones(2 + ctx.rank)])
    return [first.tolist(), second.tolist()]


def test_after_an_error_nothing_is_half_modified() -> None:
    """The first tensor could have been reduced, the second could not: both hold what they held."""
    assert run_ranks(fail_in_place, 2) == [[[1.0, 1.0, 1.0], [100]]] * 2


def test_slots_that_do_not_fit_the_ranks_are_refused() -> None:
    """C19: one slot for each rank, whoever is wrong."""
    expect(lambda rank: collectives.all_to_all([1] * (3 if rank else 2)), "rank 0", "got 2 slots for 3 ranks")
    expect(lambda rank: collectives.scatter([1, 2] if rank == 0 else None), "got 2 slots for 3 ranks")
    expect(lambda _: collectives.reduce_scatter(torch.ones(4)), "shape (4,)", "3 equal parts")


def gather_with_out_everywhere() -> Any:
    ctx = join()
    out = torch.zeros(2)
    collectives.gather_into(out, torch.tensor([float(ctx.rank)]), root=0)
    return out.tolist()


def test_storage_given_off_the_root_is_left_alone() -> None:
    """C19: torch raises on that rank and lets the root wait; here it is simply not looked at."""
    assert run_ranks(gather_with_out_everywhere, 2) == [[0.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("size", [5, 7])
def test_storage_of_the_wrong_size_is_named(size: int) -> None:
    """Both sizes are told, on all ranks, for even rows and for uneven ones."""
    out = torch.empty(size)
    expect(
        lambda rank: collectives.gather_into(out if rank == 0 else None, torch.ones(2)),
        f"{size} rows on rank 0",
        "pass 6 (2 + 2 + 2)",
    )
    expect(
        lambda rank: collectives.all_gather_into(out, torch.ones(rank + 1)),
        f"{size} rows on rank 0",
        "pass 6 (1 + 2 + 3)",
    )
    expect(lambda _: collectives.all_gather_into(out, torch.ones(2).int()), "out is float32", "int32 (2,)")
    expect(lambda _: collectives.all_gather_into(out, torch.ones(2, 3)), "(total, 3)")


def broadcast_list() -> Any:
    ctx = join()
    return collectives.broadcast(["a", {"b": 2}] if ctx.rank == 0 else [None] * 5)


def test_object_lists_of_different_lengths_do_not_abort() -> None:
    """C20: only the root's list counts, where torch ends the receiver with SIGABRT."""
    assert run_ranks(broadcast_list, 2) == [["a", {"b": 2}]] * 2


def test_what_cannot_be_pickled_is_told_to_all() -> None:
    """C20: a lambda on the root is everybody's error, not a wait."""
    expect(lambda rank: collectives.broadcast((lambda: 1) if rank == 0 else None), "rank 0", "can't be pickled")


def skip_a_call(call: str) -> str:
    ctx = join()
    group = collectives.new_group([0, 1], timeout_s=1)
    if ctx.rank == 1:
        ctx.store.wait(["told"])
        return ""
    try:
        if call == "barrier":
            collectives.barrier("epoch 3", timeout_s=1)
        else:
            getattr(collectives, call)(torch.ones(1), group=group)
    except CollectiveTimeoutError as error:
        return str(error)
    finally:
        ctx.store.set("told", "")
    return "no error"


@pytest.mark.parametrize("call", ["barrier", "all_reduce", "all_gather", "broadcast"])
def test_a_rank_that_does_not_come_is_named(call: str) -> None:
    """C1, C27: within the bound, the waiting rank reads who is missing and in which call."""
    text = run_ranks(skip_a_call, 2, call)[0]
    assert call in text
    assert "rank 1" in text


def exchange_alone() -> str:
    ctx = rankwise.init(device="cpu", timeout_s=1)
    if ctx.rank == 1:
        ctx.store.wait(["told"])
        return ""
    try:
        ctx.control.exchange("here", what="exchange", timeout_s=30)
    except CollectiveTimeoutError as error:
        return str(error)
    finally:
        ctx.store.set("told", "")
    return "no error"


def test_where_gloo_gives_up_before_us_the_absent_rank_is_named_too() -> None:
    """Gloo has a limit of its own for each operation: when that comes first, the error is the same."""
    text = run_ranks(exchange_alone, 2)[0]
    assert "exchange: after 1 s not entered by rank 1" in text


def test_barriers_of_different_names_raise() -> None:
    """A rank in another epoch's barrier is not let through."""
    expect(
        lambda rank: collectives.barrier(f"epoch {3 if rank else 2}"),
        "rank 0: name epoch 2",
        "ranks 1, 2: name epoch 3",
    )


def meet_from_two_lines() -> bool:
    if join().rank:
        collectives.barrier()
    else:
        collectives.barrier()
    return True


def test_barriers_from_different_lines_meet() -> None:
    """Rank-0-first code, in which the two arms each hold a barrier, is legal."""
    assert run_ranks(meet_from_two_lines, 2) == [True, True]


def call_without_init() -> str:
    try:
        collectives.all_reduce(1)
    except UsageError as error:
        return str(error)
    return "no error"


def test_a_call_without_init_says_so() -> None:
    """Not a bare ValueError about a default process group."""
    assert "init()" in run_ranks(call_without_init, 1)[0]


def test_many_ranks_are_told_briefly() -> None:
    """Ranges, and an end to them."""
    assert name_ranks(range(1000)) == "ranks 0-999"
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([7, 0, 1]) == "ranks 0, 1, 7"
    assert len(name_ranks(range(0, 1000, 2))) < 60
