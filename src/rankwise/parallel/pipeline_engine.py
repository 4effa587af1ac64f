"""Runs the micro-batches of a batch through the stages of a pipeline, in training by torch's schedules, in evaluation forward only."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from rankwise.base.errors import CollectiveError, UsageError
from rankwise.parallel.pipeline_batches import (
    Call,
    Chunk,
    Stub,
    ask,
    combine,
    count_samples,
    describe_batch,
    detach,
    digest,
    has_count,
    read_loss,
    split,
)
from rankwise.parallel.trees import list_tensors, put_tensors, take_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.parallel.pipeline_layout import Deal
    from rankwise.parallel.pipeline_plan import Plan, Shapes
    from rankwise.parallel.pipeline_profile import Recorder
    from rankwise.parallel.pipeline_stage import Stage
    from rankwise.runtime.context import RankContext


#: What a rank is about to do when it compares its batch with the others'.
_STEP = "a step of a pipeline (do all stages have the same batch?)"


@final
class Engine:
    """The stages of this rank, and how they are run."""

    def __init__(
        self,
        ctx: RankContext,
        model: nn.Module,
        kind: Kind,
        stages: Sequence[Stage],
        shapes: Shapes,
        *,
        deal: Deal,
        microbatches: int,
        group: dist.ProcessGroup,
    ) -> None:
        self.ctx, self.model, self.kind, self.stages, self.shapes = ctx, model, kind, stages, shapes
        self.deal, self.microbatches, self.group = deal, microbatches, group
        self.column = tuple(dist.get_process_group_ranks(group))
        self.last = kind.place(stages[0].num_stages - 1, len(self.column))
        for stage in stages:
            stage.own = {one.stage_index: one for one in stages}
        self._homes = {number: kind.place(number, len(self.column)) for number in range(stages[0].num_stages)}
        self._schedules: dict[int, Any] = {}
        self._form: Any = None
        self._num_runs = 0
        #: Samples of the batch at hand, on this rank.
        self.num_samples = 0
        #: What the steps have counted whose gradients were not averaged yet.
        self.counted: list[Tensor] = []
        #: Notes what steps take, while they are profiled.
        self.recorder: Recorder | None = None

    @property
    def has_last(self) -> bool:
        """Whether the last stage is this rank's."""
        return any(one.is_last for one in self.stages)

    # ---------------------------------------------------------------- training

    def run(self, batch: Any, loss: Callable[[Any, Any], Any], factor: Callable[[Any], Any]) -> Any:
        """Compute the gradients of a batch: those of this rank's stages are added to what their parameters have.

        Given what the loss function has returned, ``factor`` returns what the batch's loss is multiplied by.

        Returns:
            What the loss function would have returned for the whole batch, the same on all stages; without gradients.

        Collective: every rank.
        """
        chunks, calls, autocast, plans = self._prepare(batch, loss)
        returned: list[Any] = []

        def compute(output: Any, chunk: Chunk) -> Tensor:
            module: Any = next(one for one in self.stages if one.is_last).submod
            whole = put_tensors(module.turn.returned, output if isinstance(output, tuple) else (output,))
            value = loss(Stub(self.model, whole, is_asked=False), chunk.batch)
            returned.append(detach(value))
            if not chunk.num_samples:
                return sum(one.sum() * 0 for one in list_tensors(whole) if one.requires_grad)
            own = read_loss(value, self.ctx.rank)
            scale = factor(value)
            weighed = own * (scale if has_count(value) else scale * chunk.share)
            if self.recorder:
                self.recorder.extend()
            return weighed

        number = len(chunks)
        if number not in self._schedules:
            self._schedules[number] = build_schedule(self.kind, self.stages, number, _refuse)
        schedule = self._schedules[number]
        schedule._loss_fn = compute
        self._begin(plans, calls, autocast, self.recorder)
        if self.recorder:
            # So that all ranks count from the same moment, whatever their clocks show.
            dist.barrier(self.group)
            self.recorder.begin()
        run_schedule(schedule, chunks)
        schedule._loss_fn = _refuse
        return self._share(combine(returned, chunks) if self.has_last else None)

    def _begin(self, plans: Sequence[Plan], calls: Sequence[Call], autocast: Any, recorder: Recorder | None) -> None:
        """Tell this rank's stages what they are about to compute."""
        for stage in self.stages:
            stage.prepare(plans, calls)
            stage.has_backward, stage.stage_index_to_group_rank = True, self._homes
            stage.autocast, stage.recorder = autocast, recorder

    def _prepare(self, batch: Any, loss: Callable[[Any, Any], Any]) -> tuple[list[Chunk], list[Call], Any, list[Plan]]:
        """Cut a batch into micro-batches, as many on every rank, and find out what each needs."""
        described, problem = describe_batch(batch)
        if self._num_runs < 1 and not problem:
            described += "\t" + digest(batch)
        self._num_runs += 1
        self.num_samples = count_samples(described)
        compared = f"{problem or ''}\t{described}"
        # What this rank does for itself takes about as long as the comparison, of which it hides the wait.
        self.ctx.control.post(compared, what=_STEP)
        try:
            prepared = None if problem else self._cut(batch, loss, self.num_samples)
        finally:
            largest = self._agree(compared)
        return prepared if prepared and largest == self.num_samples else self._cut(batch, loss, largest)

    def _cut(
        self, batch: Any, loss: Callable[[Any, Any], Any], largest: int
    ) -> tuple[list[Chunk], list[Call], Any, list[Plan]]:
        number = max(find_least(self.kind, len(self.column)), min(self.microbatches, largest))
        chunks = split(batch, number)
        asked = [ask(self.model, chunk.batch, loss) for chunk in chunks]
        calls = [call for call, _ in asked]
        plans = [self.shapes.find(*call, self.deal, training=True) for call in calls]
        return chunks, calls, asked[-1][1], plans

    def _agree(self, compared: str) -> int:
        """Return how many samples the largest batch of all ranks has: those of one pipeline have the same batch, others may have more."""
        of_all = self.ctx.control.compare(compared, what=_STEP)
        if of_all is None:
            of_all = [compared] * len(self.ctx.control.ranks)
        self._check_batches(dict(zip(self.ctx.control.ranks, of_all, strict=True)))
        return max(count_samples(one.partition("\t")[2]) for one in of_all)

    def _check_batches(self, of_rank: dict[int, str]) -> None:
        failed = {rank: one.partition("\t")[0] for rank, one in of_rank.items() if one.partition("\t")[0]}
        if failed:
            rank, problem = next(iter(failed.items()))
            raise UsageError(
                problem, rank=rank, hint="every stage is given the batch: nested tensors whose dim 0 are the samples"
            )
        first = self.column[0]
        other = next((rank for rank in self.column if of_rank[rank] != of_rank[first]), None)
        if other is not None:
            forms = [of_rank[rank].split("\t") for rank in (first, other)]
            what = (
                f"{forms[0][1]} on rank {first} and {forms[1][1]} on rank {other}"
                if forms[0][1] != forms[1][1]
                else f"the same shapes, but other values on rank {first} than on rank {other}"
            )
            raise CollectiveError(
                f"the stages of a pipeline have different batches: {what}",
                rank=self.ctx.rank,
                hint="all stages take the same batch: make samplers from ctx.data_size and ctx.data_rank, or use rankwise.DataLoader",
            )

    def _share(self, returned: Any) -> Any:
        """Give all stages what the loss function has returned on the last."""
        device = self.ctx.device
        tree, values = (None, ()) if returned is None else take_tensors(returned)
        if self._form is None:
            box = [[tree, [str(one.dtype).removeprefix("torch.") for one in values]]]
            dist.broadcast_object_list(box, src=self.column[self.last], group=self.group)
            self._form = box[0]
        elif self.has_last and repr(self._form[0]) != repr(tree):
            raise UsageError(
                f"the loss function returned a different kind than before: {tree!r}",
                rank=self.ctx.rank,
                hint="return the same kind and names for every batch",
            )
        tree, dtypes = self._form
        flat = (
            torch.stack([one.double() for one in values]).to(device)
            if self.has_last
            else torch.empty(len(dtypes), dtype=torch.float64, device=device)
        )
        self._pass_on(flat)
        return put_tensors(
            tree, [one.to(getattr(torch, dtype)) for one, dtype in zip(flat.unbind(), dtypes, strict=True)]
        )

    def _pass_on(self, flat: Tensor) -> None:
        """Give a tensor of the rank with the last stage to all, from neighbour to neighbour.

        Backwards end there first, so that each has it before it has ended its own; a broadcast would wait for all of
        them.
        """
        own = self.column.index(self.ctx.rank)
        if own != self.last:
            nearer = own + (1 if own < self.last else -1)
            dist.recv(flat, src=self.column[nearer], group=self.group)
        farther = {own - 1} if own < self.last else {own + 1} if own > self.last else {own - 1, own + 1}
        works = [
            dist.isend(flat, dst=self.column[one], group=self.group)
            for one in sorted(farther)
            if 0 <= one < len(self.column)
        ]
        for work in works:
            work.wait()

    # -------------------------------------------------------------- evaluation

    def infer(self, call: Call) -> Any:
        """Compute what the model returns, on all stages; without gradients.

        Collective: every rank of the pipeline.
        """
        plan = self.shapes.find(*call, self.deal, training=self.model.training)
        self._begin([plan], [call], None, None)
        sending: list[Any] = []
        output: Any = None
        for stage in sorted(self.stages, key=lambda one: one.stage_index):
            for work in _launch(stage.get_fwd_recv_ops(0)):
                work.wait()
            output = stage.forward_one_chunk(0)
            sending += _launch(stage.get_fwd_send_ops(0))
        for work in sending:
            work.wait()
        for stage in self.stages:
            stage.forget()
        device = self.ctx.device
        tensors = [torch.empty(one.shape, dtype=one.dtype, device=device) for one in plan.output_forms]
        if self.has_last:
            tensors = list(output) if isinstance(output, tuple) else [output]
        for one in tensors:
            if one.numel():
                dist.broadcast(one.contiguous() if self.has_last else one, src=self.column[self.last], group=self.group)
        return put_tensors(plan.output, tensors)


def _launch(ops: list[Any]) -> list[Any]:
    return dist.batch_isend_irecv(ops) if ops else []


def _refuse(*_: Any) -> Tensor:
    raise UsageError("a pipeline's schedule was run outside of a step")


# ---------------- torch's schedules by name, what each needs, and which rank has which stage


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A schedule.

    Attributes:
        name: As callers say it.
        torch_name: Of torch's class.
        stages_per_rank: How many by default.
        placement: "single", one stage for each rank; "loop", the next rank has the next stage, and after the last the
            first; "v", back from the last rank to the first.
        stand_in: A schedule of the same placement that takes any number of micro-batches: for a batch that is too
            small.
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
    found = next((one for one in KINDS.values() if plain in {_simplify(one.name), _simplify(one.torch_name)}), None)
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


def find_misfit(kind: Kind, microbatches: int, num_ranks: int, stages_per_rank: int) -> tuple[str, str] | None:
    """Say why a schedule can't run so many micro-batches over so many stages, and what would do; None if it can."""
    stages = num_ranks * stages_per_rank
    if kind.placement == "single" and stages_per_rank != 1:
        return (
            f"{kind.name} has 1 stage on each rank, and not {stages_per_rank}",
            "schedule='interleaved_1f1b', or leave stages_per_rank out",
        )
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


def build_schedule(kind: Kind, stages: Sequence[Any], microbatches: int, loss: Callable[[Any, Any], Any]) -> Any:
    """Return torch's schedule for so many micro-batches; what doesn't fit runs by the stand-in, with the same result."""
    per_rank = len(stages)
    num_ranks = stages[0].num_stages // per_rank
    if find_misfit(kind, microbatches, num_ranks, per_rank) is not None:
        kind = KINDS[kind.stand_in]
    made = getattr(pipelining, kind.torch_name)
    held = stages[0] if kind.placement == "single" else list(stages)
    # torch 2.8 refuses any schedule of one stage a rank for fewer micro-batches than stages; GPipe's order is the same
    # for any number.
    least = stages[0].num_stages if kind.name == "gpipe" else 1
    built = made(held, max(microbatches, least), loss_fn=loss, scale_grads=False)
    built._n_microbatches = microbatches
    return built


def find_least(kind: Kind, num_ranks: int) -> int:
    """Return how many micro-batches a step must have, some of which may be of no samples."""
    # In torch 2.8 the ranks of a loop run in step with each other, and of fewer micro-batches one would compute before
    # it has received.
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
