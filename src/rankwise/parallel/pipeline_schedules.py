"""The order in which a pipeline's stages compute: torch's schedules by name, what each needs, and which rank has which stage."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, final

from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A schedule.

    Attributes:
        name: As callers say it.
        torch_name: Of torch's class.
        stages_per_rank: How many by default.
        placement: "single", one stage for each rank; "loop", the next rank has the next stage, and after the last the first;
            "v", back from the last rank to the first.
        stand_in: A schedule of the same placement that takes any number of micro-batches: for a batch that is too small.
        has_halves: Whether gradients of the weights are computed after those of the inputs.
    """

    name: str
    torch_name: str
    stages_per_rank: int
    placement: Literal["single", "loop", "v"]
    stand_in: str
    has_halves: bool = False

    def place(self, stage: int, num_ranks: int) -> int:
        """Return which rank of the pipeline has a stage."""
        if self.placement == "v" and stage >= num_ranks:
            return 2 * num_ranks - 1 - stage
        return stage % num_ranks


KINDS = {
    kind.name: kind
    for kind in (
        Kind(name="gpipe", torch_name="ScheduleGPipe", stages_per_rank=1, placement="single", stand_in="gpipe"),  # arXiv:1811.06965
        Kind(name="1f1b", torch_name="Schedule1F1B", stages_per_rank=1, placement="single", stand_in="gpipe"),  # arXiv:2006.09503
        Kind(name="interleaved_1f1b", torch_name="ScheduleInterleaved1F1B", stages_per_rank=2, placement="loop", stand_in="looped_bfs"),  # arXiv:2104.04473
        Kind(name="looped_bfs", torch_name="ScheduleLoopedBFS", stages_per_rank=2, placement="loop", stand_in="looped_bfs"),  # arXiv:2211.05953
        Kind(name="interleaved_zero_bubble", torch_name="ScheduleInterleavedZeroBubble", stages_per_rank=2, placement="loop", stand_in="looped_bfs", has_halves=True),  # arXiv:2401.10241
        Kind(name="zbv", torch_name="ScheduleZBVZeroBubble", stages_per_rank=2, placement="v", stand_in="zbv", has_halves=True),  # arXiv:2401.10241
        Kind(name="dualpipev", torch_name="ScheduleDualPipeV", stages_per_rank=2, placement="v", stand_in="zbv", has_halves=True),  # arXiv:2412.19437
    )
}  # fmt: skip


def find_kind(name: str, *, rank: int | None = None) -> Kind:
    """Return a schedule by its name, or by that of torch's class."""
    plain = _simplify(str(name))
    found = next((one for one in KINDS.values() if plain in {_simplify(one.name), _simplify(one.torch_name)}), None)  # fmt: skip
    if found is None:
        raise UsageError(f"schedule={name!r}", rank=rank, hint=f"one of {', '.join(KINDS)}")
    if not hasattr(pipelining, found.torch_name):
        raise UsageError(
            f"schedule={name!r} is {found.torch_name}, which this torch does not have",
            rank=rank,
            hint="take a newer torch, or schedule='1f1b'",
        )
    return found


def _simplify(name: str) -> str:
    plain = name.lower().replace("_", "").replace("-", "").removeprefix("schedule")
    return "zbv" if plain == "zbvzerobubble" else plain


def find_misfit(
    kind: Kind, microbatches: int, num_ranks: int, stages_per_rank: int
) -> tuple[str, str] | None:
    """Say why a schedule can't run so many micro-batches over so many stages, and what would do; None if it can."""
    stages = num_ranks * stages_per_rank
    if kind.placement == "single" and stages_per_rank != 1:
        return f"{kind.name} has 1 stage on each rank, and not {stages_per_rank}", "schedule='interleaved_1f1b', or leave stages_per_rank out"  # fmt: skip
    if kind.placement == "v" and stages_per_rank != 2:
        return (
            f"{kind.name} has 2 stages on each rank, and not {stages_per_rank}",
            "leave stages_per_rank out",
        )
    if kind.name in {"1f1b", "dualpipev"} and microbatches < stages:
        return (
            f"{kind.name} needs at least as many micro-batches as stages: {microbatches} for {stages}",
            f"microbatches={stages}, or schedule={kind.stand_in!r}, which takes any number",
        )
    rounds = max(1, microbatches // num_ranks)
    if kind.name in {"interleaved_1f1b", "interleaved_zero_bubble"} and microbatches % rounds:
        return (
            f"{kind.name} runs micro-batches in rounds of {num_ranks} ranks, and {microbatches} don't make {rounds} equal ones",
            f"microbatches={rounds * num_ranks} or {(rounds + 1) * num_ranks}, or schedule='looped_bfs'",
        )
    return None


def build_schedule(
    kind: Kind, stages: Sequence[Any], microbatches: int, loss: Callable[[Any, Any], Any]
) -> Any:
    """Return torch's schedule for so many micro-batches; what doesn't fit runs by the stand-in, with the same result."""
    per_rank = len(stages)
    num_ranks = stages[0].num_stages // per_rank
    if find_misfit(kind, microbatches, num_ranks, per_rank) is not None:
        kind = KINDS[kind.stand_in]
    made = getattr(pipelining, kind.torch_name)
    held = stages[0] if kind.placement == "single" else list(stages)
    # torch 2.8 refuses any schedule of one stage a rank for fewer micro-batches than stages; GPipe's order is the same for any number.
    least = stages[0].num_stages if kind.name == "gpipe" else 1
    built = made(held, max(microbatches, least), loss_fn=loss, scale_grads=False)
    built._n_microbatches = microbatches
    return built


def find_least(kind: Kind, num_ranks: int) -> int:
    """Return how many micro-batches a step must have, some of which may be of no samples."""
    # In torch 2.8 the ranks of a loop run in step with each other, and of fewer micro-batches one would compute before it has received.
    is_in_step = not issubclass(getattr(pipelining, kind.torch_name), _PipelineScheduleRuntime)
    return num_ranks if kind.placement == "loop" and is_in_step else 1


def run_schedule(schedule: Any, targets: Sequence[Any]) -> None:
    """Run one step."""
    options = {"return_outputs": False} if _may_return_outputs(type(schedule).__name__) else {}
    schedule._step_microbatches([()] * len(targets), [{}] * len(targets), list(targets), None, **options)


@cache
def _may_return_outputs(torch_name: str) -> bool:
    run = getattr(pipelining, torch_name)._step_microbatches
    return "return_outputs" in inspect.signature(run).parameters
