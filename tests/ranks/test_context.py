"""What a rank does with its context: turns, seeds, batch sizes, agreement, and leaving."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

import pytest

import rankwise
from rankwise import CollectiveError, CollectiveTimeoutError, UsageError
from rankwise.runtime.batch import plan_batch
from rankwise.runtime.rng import derive_seed
from rankwise.testing import run_ranks, try_ranks
from support import free_port

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux


def test_print_speaks_once_or_with_the_rank_in_front() -> None:
    """By default only rank 0 prints; with all_ranks every line has its rank."""

    def program() -> str:
        with rankwise.init() as ctx, redirect_stdout(io.StringIO()) as out:
            ctx.print("a", end=" ", flush=True)
            ctx.print(1)
            ctx.print("x\ny", all_ranks=True)
        return out.getvalue()

    assert run_ranks(program, 2) == ["a 1\n[rank 0] x\n[rank 0] y\n", "[rank 1] x\n[rank 1] y\n"]


def test_main_first_lets_the_others_in_after_rank_0(tmp_path: Path) -> None:
    """What rank 0 has made in the block is there for all others, also the second time."""

    def program() -> list[bool]:
        seen = []
        with rankwise.init() as ctx:
            for number in range(2):
                path = tmp_path / str(number)
                with ctx.main_first():
                    seen.append(path.exists())
                    if ctx.is_main:
                        time.sleep(0.1)
                    path.touch()
        return seen

    assert run_ranks(program, 3) == [[False, False], [True, True], [True, True]]


def test_main_first_per_node(tmp_path: Path) -> None:
    """Per node, the first rank of each host goes first, and waits for no other host's."""

    def program() -> bool:
        rank = int(os.environ["RANK"])
        os.environ.update(
            LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2", GROUP_RANK=str(rank // 2), GROUP_WORLD_SIZE="2"
        )
        with rankwise.init() as ctx:
            path = tmp_path / str(ctx.node_rank)
            with ctx.main_first(per_node=True):
                seen = path.exists()
                path.touch()
        return seen

    assert run_ranks(program, 4) == [False, True, False, True]


def test_a_failure_in_main_first_reaches_all() -> None:
    """When rank 0's block raises, the others don't wait: they read what rank 0 raised, and rank 0 raises it."""

    def program() -> None:
        with rankwise.init() as ctx, ctx.main_first():
            raise FileNotFoundError("train.csv")

    outcomes = try_ranks(program, 3, timeout_s=20)
    assert isinstance(outcomes[0].error, FileNotFoundError)
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, CollectiveError)
        assert "rank 0 failed in the block: FileNotFoundError: train.csv" in str(outcome.error)


def test_main_first_has_a_bound() -> None:
    """Whoever waits for rank 0 longer than timeout_s is told so."""

    def program() -> None:
        with rankwise.init() as ctx, ctx.main_first(timeout_s=0.3):
            time.sleep(2 if ctx.is_main else 0)

    outcomes = try_ranks(program, 2, timeout_s=20)
    assert isinstance(outcomes[1].error, CollectiveTimeoutError)
    assert "rank 0 had not finished after 0.3 s" in str(outcomes[1].error)


def test_seeds_differ_by_rank_and_can_be_repeated() -> None:
    """X6: ranks draw different numbers, the same in every run; with same=True they draw the same."""

    def program() -> list[Any]:
        import random

        import torch

        with rankwise.init() as ctx:
            drawn: list[Any] = []
            for same in (False, True):
                ctx.seed(7, same=same)
                drawn.append((random.random(), torch.rand(2).tolist(), sys.modules["numpy"].random.rand()))
        return drawn

    first, again = run_ranks(program, 2), run_ranks(program, 2)
    assert first == again
    assert first[0][0] != first[1][0]
    assert first[0][1] == first[1][1]


def test_neighbouring_seeds_share_no_streams() -> None:
    """Rank 1 of seed 7 and rank 0 of seed 8 would be the same with seed + rank."""
    seeds = {derive_seed(seed, rank) for seed in range(100) for rank in range(100)}
    assert len(seeds) == 100 * 100
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("world_size", "arguments", "shown"),
    [
        (
            4,
            {"global_size": 256, "micro_size": 16},
            "global batch 256 = 4 ranks x 4 passes x 16 samples at most",
        ),
        (4, {"per_rank": 32}, "global batch 128 = 4 ranks x 1 passes x 32 samples at most"),
        (
            3,
            {"global_size": 10, "micro_size": 2},
            "global batch 10 = 3 ranks x 2 passes x 2 samples at most (ranks hold 4 or 3)",
        ),
    ],
)
def test_the_effective_batch_is_worked_out(world_size: int, arguments: dict[str, int], shown: str) -> None:
    """X18, M8: global size, ranks, passes and samples are told in one line, and add up."""
    plan = plan_batch(world_size, **arguments)
    assert str(plan) == shown
    assert sum(plan.sizes) == plan.global_size
    assert plan.micro_size * plan.accumulation >= max(plan.sizes)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"global_size": 8, "per_rank": 2},
        {"global_size": 3},
        {"per_rank": 0},
        {"global_size": 8, "micro_size": 0},
    ],
)
def test_batch_sizes_that_make_no_sense(arguments: dict[str, int]) -> None:
    """Nothing given, both given, or less than one sample for a rank is an error with a remedy."""
    with pytest.raises(UsageError) as caught:
        plan_batch(4, **arguments)
    assert caught.value.hint


def test_agreement_names_who_holds_what() -> None:
    """K8, X19: a value that differs between ranks is an error on all of them, with each value; equal ones pass."""

    def program() -> None:
        with rankwise.init() as ctx:
            ctx.agree({"length": 10}, "data set")
            ctx.agree("step-500" if ctx.rank != 2 else None, "checkpoint to resume from")

    for outcome in try_ranks(program, 3, timeout_s=20):
        assert isinstance(outcome.error, CollectiveError)
        assert "ranks 0, 1: checkpoint to resume from='step-500'; rank 2: checkpoint to resume from=None" in str(
            outcome.error
        )


def test_a_rank_that_does_not_come_to_agree_is_named() -> None:
    """Whoever waits in vain reads which rank did not come, to what and where."""

    def program() -> None:
        ctx = rankwise.init()
        if ctx.rank == 1:
            time.sleep(3)
            return
        ctx.agree(1, "length", timeout_s=1.5)

    outcomes = try_ranks(program, 3, timeout_s=20)
    assert outcomes[1].error is None
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, CollectiveTimeoutError)
        told = str(outcomes[rank].error)
        assert re.search(r"agree on length at test_context\.py:\d+.*: after 1.5 s not entered by rank 1", told), told


def test_new_groups_of_the_context_have_its_timeout() -> None:
    """I20: timeout_s is what the group of all ranks has; a timedelta will do."""

    def program() -> tuple[float, float]:
        from datetime import timedelta

        import torch.distributed as dist

        with rankwise.init(timeout_s=timedelta(seconds=77)) as ctx:
            backend = ctx.group._get_backend(ctx.device)
            return ctx.timeout_s, (
                backend.options._timeout if hasattr(backend, "options") else dist.timedelta
            ).total_seconds()

    assert run_ranks(program, 2) == [(77.0, 77.0)] * 2


def test_leaving_with_work_pending_has_a_bound() -> None:
    """A rank that leaves by an exception, with a collective under way that nobody joins, is out in seconds."""

    def program() -> Any:
        import torch
        import torch.distributed as dist

        start = time.monotonic()
        ctx = rankwise.init(timeout_s=600)
        if ctx.rank == 1:
            time.sleep(5)
            return None

        def work() -> None:
            with ctx:
                dist.all_reduce(torch.ones(1), async_op=True)
                raise ValueError("boom")

        with redirect_stderr(io.StringIO()) as told, pytest.raises(ValueError, match="boom"):
            work()
        return time.monotonic() - start < 60, ctx.is_open, told.getvalue()

    in_time, is_open, told = run_ranks(program, 2)[0]
    assert in_time
    assert not is_open
    assert "left the job with a collective pending" in told


def test_closing_twice_and_after_the_script_did() -> None:
    """close() may be called twice, and after the script has destroyed the process group itself."""

    def program() -> bool:
        import torch.distributed as dist

        ctx = rankwise.init()
        dist.destroy_process_group()
        ctx.close()
        ctx.close()
        with pytest.raises(UsageError, match="has left the job"):
            ctx.agree(1, "one")
        with rankwise.init() as again:
            assert again is rankwise.current()
        return dist.is_initialized()

    assert run_ranks(program, 2) == [False, False]


def test_a_forked_child_has_no_part_in_the_job() -> None:
    """A child that a rank forks ends with its own exit code, and the rank goes on."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORK],
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (3, "")


_FORK = """
import os, sys, rankwise
with rankwise.init() as ctx:
    child = os.fork()
    if not child:
        sys.exit(3)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_rank_0_keeps_the_store_until_the_others_are_out() -> None:
    """Rank 0, which serves the store, is through first; rank 1 reaches main_first later and is not cut off."""

    def program() -> bool:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        with rankwise.init(init_method=f"tcp://127.0.0.1:{port}") as ctx:
            time.sleep(0.5 * ctx.rank)
            with ctx.main_first():
                return True

    port = free_port()
    assert run_ranks(program, 2) == [True, True]
