"""Collectives on what is seldom passed: shared memory, columns, NaN, callers that differ, and after a timeout."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rankwise
from rankwise.base.errors import CollectiveError, CollectiveTimeoutError, UsageError
from rankwise.parallel.accumulation import accumulate, loss_scale
from rankwise.parallel.ddp import apply_ddp
from rankwise.parallel.model_check import check_replicas
from rankwise.runtime import collectives
from rankwise.runtime.signature import naming
from rankwise.testing.ranks import run_ranks, try_ranks

BIG = 1 << 19  # elements of float32: above what travels in a bucket


def join(timeout_s: float = 20.0) -> rankwise.RankContext:
    return rankwise.init(device="cpu", timeout_s=timeout_s)


def read_errors(function: Any, world_size: int = 2, *args: Any) -> str:
    """Return the message of the CollectiveError that all ranks must have raised alike."""

    def run() -> str:
        with join() as ctx:
            try:
                return f"no error: {function(ctx, *args)}"
            except CollectiveError as error:
                return f"{error.message}\n{error.hint}"

    seen = run_ranks(run, world_size)
    assert len(set(seen)) == 1, seen
    return str(seen[0])


# ------------------------------------------------------------------ memory


def test_tied_weights_are_reduced_once_in_place() -> None:
    """A tensor that is there twice gets the sum, not the sum of sums."""

    def body() -> Any:
        with join():
            tied, small = torch.ones(BIG), torch.zeros(2)
            collectives.all_reduce_([tied, small, tied])
            return tied.unique().tolist()

    assert run_ranks(body, 2) == [[2.0]] * 2


def test_views_that_overlap_get_the_sum_of_what_was_there() -> None:
    """Two reductions in place at one memory would add each other's results."""

    def body() -> Any:
        with join():
            whole = torch.ones(BIG + BIG // 2)
            collectives.all_reduce_([whole[:BIG], whole[BIG // 2 :]])
            return whole.unique().tolist()

    assert run_ranks(body, 2) == [[2.0]] * 2


def test_weights_tied_on_one_rank_only_are_told() -> None:
    """The ranks would send different numbers of tensors."""

    def body(ctx: Any) -> None:
        tied = torch.ones(3)
        other = torch.ones(3)
        collectives.all_reduce_([tied, other if ctx.rank else tied])

    assert "which tensors are the same one" in read_errors(body)


def test_a_pending_minus_is_not_lost() -> None:
    """The imaginary part of a conjugate is stored with the other sign; a maximum must not see it."""

    def body() -> Any:
        with join() as ctx:
            x = torch.full((BIG,), complex(0, ctx.rank + 1)).conj().imag
            assert x.is_neg()
            collectives.all_reduce_(x, "max")
            return x.unique().tolist()

    assert run_ranks(body, 2) == [[-1.0]] * 2


@pytest.mark.parametrize("call", ["all_gather", "broadcast", "scatter", "all_to_all", "into", "grad"])
def test_a_column_of_a_batch_of_one_travels(call: str) -> None:
    """It is contiguous, with a stride that no view as bytes takes."""

    def body() -> Any:
        with join() as ctx:
            x = torch.full((1, 5), float(ctx.rank))[:, 0]
            if call == "into":
                collectives.all_gather_into(out := torch.empty(2), x)
                return out.tolist()
            if call == "grad":
                return collectives.all_gather_with_grad(x).tolist()
            if call == "broadcast":
                return [collectives.broadcast(x).item(), 1.0]
            if call == "scatter":
                return [0.0 * collectives.scatter([x, x]).item(), 1.0]
            moved = collectives.all_gather(x) if call == "all_gather" else collectives.all_to_all([x, x])
            return torch.cat(moved).tolist()

    assert run_ranks(body, 2) == [[0.0, 1.0]] * 2


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_wins_in_a_minimum_whoever_holds_it(who: int, op: Any) -> None:
    """Gloo keeps or drops NaN by the order of the ranks; torch.max always keeps it."""

    def body() -> str:
        with join() as ctx:
            nan = float("nan")
            row = torch.tensor([1.0, nan if ctx.rank == who else 1.0])
            numbers = collectives.all_reduce([row[1].item(), row, row.numpy()], op)
            collectives.all_reduce_(row, op)
            slots = collectives.reduce_scatter([torch.ones(1), torch.full((1,), nan if ctx.rank == who else 1.0),
                                                torch.ones(1)], op)  # fmt: skip
            return str([numbers[0], numbers[1].tolist(), numbers[2].tolist(), row.tolist(), slots.tolist()])

    one, two, three = run_ranks(body, 3)
    assert one == three == "[nan, [1.0, nan], [1.0, nan], [1.0, nan], [1.0]]"
    assert two == "[nan, [1.0, nan], [1.0, nan], [1.0, nan], [nan]]"


@pytest.mark.parametrize("call", ["reduce", "reduce_scatter"])
def test_a_sum_that_does_not_fit_is_told_to_all_ranks(call: str) -> None:
    """Only one rank holds the result; the others must not go on without it."""

    def body(_ctx: Any) -> Any:
        full, small = torch.tensor([100], dtype=torch.int8), torch.tensor([1], dtype=torch.int8)
        return collectives.reduce(full) if call == "reduce" else collectives.reduce_scatter([small, full])

    told = read_errors(body)
    assert "is 200, and int8 ends at" in told
    assert f"rank {0 if call == 'reduce' else 1}" in told


def test_torch_names_of_operations_and_times_are_understood() -> None:
    """Who comes from torch.distributed brings ReduceOp and timedelta."""

    def body() -> Any:
        with join() as ctx:
            group = collectives.new_group([0, 1], timeout_s=timedelta(seconds=7))
            collectives.barrier(timeout_s=timedelta(seconds=7))
            op: Any = dist.ReduceOp.MAX
            return [
                collectives.all_reduce(ctx.rank, op),
                collectives.all_reduce(1.0, "mean"),
                group.timeout_s,
            ]

    assert run_ranks(body, 2) == [[1, 1.0, 7.0]] * 2


def test_an_operation_or_time_that_is_none_is_told() -> None:
    """Never a TypeError of one rank alone."""
    assert "no operation" in read_errors(lambda _: collectives.all_reduce(1, op=object))  # type: ignore[arg-type]
    assert "timeout_s is 'soon'" in read_errors(lambda _: collectives.new_group([0], timeout_s="soon"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no checking level 'none'"):
        collectives.set_checking("none")  # type: ignore[arg-type]


class Box(MutableMapping[str, Any]):
    """Keeps its values in a dict, which a shallow copy shares."""

    def __init__(self, **values: Any) -> None:
        self.values_of = values

    def __getitem__(self, key: str) -> Any:
        return self.values_of[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.values_of[key] = value

    def __delitem__(self, key: str) -> None:
        del self.values_of[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_of)

    def __len__(self) -> int:
        return len(self.values_of)


def test_a_mapping_with_a_dict_inside_is_not_modified() -> None:
    """What went in holds what it held."""

    def body() -> Any:
        with join():
            box = Box(a=1)
            result = collectives.all_reduce(box)
            return type(result).__name__, box["a"], result["a"]

    assert run_ranks(body, 2) == [("Box", 1, 2)] * 2


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "broadcast", "broadcast_", "all_to_all"])
def test_a_list_that_holds_itself_is_told_to_all_ranks(call: str) -> None:
    """The others do not wait for the rank that could not even list its leaves."""

    def body(ctx: Any) -> Any:
        loop: list[Any] = [torch.ones(1)]
        if ctx.rank == 0:
            loop.append(loop)
        return getattr(collectives, call)([loop, loop] if call == "all_to_all" else loop)

    assert "does it contain itself?" in read_errors(body)


# ------------------------------------------------------------------ who calls what


def call_one(kind: str, ctx: Any) -> Any:
    model = torch.nn.Linear(2, 2)
    calls: dict[str, Any] = {
        "all_reduce": lambda: collectives.all_reduce(1),
        "apply_ddp": lambda: apply_ddp(model),
        "check_replicas": lambda: check_replicas(model),
        "agree": lambda: ctx.agree(3, "epoch"),
        "loss_scale": lambda: loss_scale(3),
    }
    return calls[kind]()


@pytest.mark.parametrize("pair", [("all_reduce", "apply_ddp"), ("check_replicas", "agree"), ("loss_scale", "all_reduce"),
                                  ("apply_ddp", "loss_scale")])  # fmt: skip
def test_calls_of_different_kinds_are_named_on_all_ranks(pair: tuple[str, str]) -> None:
    """What one rank compares is never read by another kind of call."""
    told = read_errors(lambda ctx: call_one(pair[ctx.rank], ctx))
    assert "the ranks called different collectives" in told
    assert all(kind in told for kind in pair)


def test_calls_with_a_root_meet_from_different_lines() -> None:
    """`if rank == root: broadcast(x) else: broadcast(None)` is right."""

    def body() -> Any:
        with join() as ctx:
            if ctx.rank == 0:
                sent = collectives.broadcast("x")
                part = collectives.scatter([1, 2])
                collectives.gather(ctx.rank)
            else:
                sent = collectives.broadcast(None)
                part = collectives.scatter(None)
                collectives.gather(ctx.rank)
            return sent, part

    assert run_ranks(body, 2) == [("x", 1), ("x", 2)]


def test_a_wrapper_on_one_rank_is_no_difference() -> None:
    """A profiler or a progress bar on rank 0 only changes who calls, and not what is called."""

    def body() -> Any:
        with join() as ctx:

            def step() -> Any:
                return collectives.all_reduce(1)

            if ctx.rank == 0:
                return [each() for each in (lambda: step(),)][0]  # noqa: PLW0108, RUF015
            return step()

    assert run_ranks(body, 2) == [2, 2]


# ------------------------------------------------------------------ after an error


def test_a_barrier_that_ran_out_of_time_may_be_tried_again() -> None:
    """The second try goes on with the wait of the first: the next call is paired with the others' next call."""

    def body() -> Any:
        with join() as ctx:
            tries = 0
            if ctx.rank == 1:
                ctx.store.wait(["first try over"], timedelta(seconds=20))
            while True:
                try:
                    collectives.barrier("epoch", timeout_s=0.3 if ctx.rank == 0 else 20)
                    break
                except CollectiveTimeoutError:
                    tries += 1
                    ctx.store.set("first try over", "1")
            return tries > 0, collectives.all_reduce(ctx.rank)

    assert run_ranks(body, 2) == [(True, 1), (False, 1)]


def test_another_call_after_a_time_out_is_refused() -> None:
    """It would be paired with the call that the others still make."""

    def body() -> Any:
        with join() as ctx:
            if ctx.rank == 1:
                ctx.store.wait(["rank 0 is through"], timedelta(seconds=20))
                return None
            try:
                collectives.barrier("epoch", timeout_s=0.2)
            except CollectiveTimeoutError:
                collectives.all_reduce(1)
            finally:
                ctx.store.set("rank 0 is through", "1")
            return None

    first = try_ranks(body, 2)[0].error
    assert isinstance(first, CollectiveError)
    assert "an earlier call (barrier at" in str(first)


def test_only_a_lost_connection_is_called_a_peer_that_left() -> None:
    """An error that merely names Gloo or NCCL is passed on."""
    with pytest.raises(RuntimeError, match="gloo: wrong dtype"), naming(0, "all_reduce"):
        raise RuntimeError("ProcessGroup gloo: wrong dtype")
    with pytest.raises(CollectiveError, match="a peer left"), naming(0, "all_reduce"):
        raise RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4242")


def test_a_living_tensor_is_no_temporary_after_a_tracer() -> None:
    """Reference counts that were taken under a tracer say nothing about a run without one."""

    def body() -> Any:
        with join():
            living = torch.ones(2)
            before = sys.gettrace()
            sys.settrace(lambda *_: None)
            try:
                collectives.all_reduce_(living)
            finally:
                sys.settrace(before)
            collectives.all_reduce_(living)
            return living.tolist()

    assert run_ranks(body, 2) == [[4.0, 4.0]] * 2


def test_an_accumulation_that_was_dropped_may_be_left() -> None:
    """After zero_grad no gradient of one rank alone is there: a step skipped for NaN is no error."""

    def body(drops: bool) -> str:
        with join():
            ddp = apply_ddp(torch.nn.Linear(2, 2))
            for micro in accumulate(ddp, [torch.ones(1, 2)] * 3):
                ddp(micro).sum().backward()
                if drops:
                    ddp.zero_grad()
                break
            try:
                ddp(torch.ones(1, 2)).sum().backward()
            except CollectiveError:
                return "refused"
            return "ok"

    assert run_ranks(body, 2, True) == ["ok"] * 2
    assert run_ranks(body, 2, False) == ["refused"] * 2


# ---------------------------------------------------------------- compiled


def test_collectives_in_a_compiled_function_give_what_they_give_outside() -> None:
    """torch.compile leaves the collectives out of its graphs: the same values and gradients, and the rest is compiled."""

    def body() -> Any:
        with join() as ctx:
            graphs = []

            def count(graph: Any, _inputs: Any) -> Any:
                graphs.append(graph)
                return graph.forward

            def step(x: torch.Tensor) -> torch.Tensor:
                y = x * 2
                mean = collectives.all_reduce(y.detach(), "mean")
                total = torch.ones(2)
                collectives.all_reduce_(total)
                collectives.broadcast_(total)
                collectives.barrier()
                return (mean * total[0] + 1).sum() + sum(part.sum() for part in collectives.all_gather_with_grad(y))

            seen = []
            for run in (step, torch.compile(step, backend=count)):
                x = torch.full((3,), float(ctx.rank), requires_grad=True)
                loss = run(x)
                loss.backward()  # type: ignore[no-untyped-call]
                assert x.grad is not None
                seen.append((loss.item(), x.grad.tolist()))
            return seen, len(graphs)

    for (plain, compiled), num_graphs in run_ranks(body, 2):
        assert compiled == plain
        assert num_graphs >= 2


def test_compiled_callers_are_not_warned_or_recompiled_for_our_sake() -> None:
    """Other names, containers and targets at each call: no warning, no frame of ours is compiled, and living targets are written."""

    def body() -> Any:
        with join() as ctx:
            import torch._dynamo

            # Of the step itself; how often that is compiled anew for another n is torch's affair.
            torch._dynamo.config.recompile_limit = 64

            def step(x: torch.Tensor, n: int) -> torch.Tensor:
                t = x * 2
                collectives.all_reduce_(t)
                collectives.all_reduce_([t] * (n + 1), name=f"a{n}")
                collectives.broadcast_({"t": t} if n % 2 else (t,), name=f"b{n}")
                out = torch.empty(ctx.world_size, 3)
                collectives.all_gather_into(out, t[None])
                collectives.barrier(f"c{n}")
                return collectives.all_reduce(t, "mean", name=f"d{n}") + out.sum()

            compiled = torch.compile(step, backend="eager")
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                told = [compiled(torch.ones(3), n).tolist() for n in range(12)]
            ours = str(Path(rankwise.__file__).parent)
            compiled_files = {one.co_filename for one in torch._dynamo.utils.get_compilation_metrics()}
            return (
                told,
                any(file.endswith("states.py") for file in compiled_files),
                [file for file in compiled_files if file.startswith(ours)],
            )

    assert run_ranks(body, 2) == [([[56.0] * 3] * 12, True, [])] * 2
