"""Runs the micro-batches of a batch through the stages of a pipeline, in training by torch's schedules, in evaluation forward only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
from rankwise.parallel.pipeline_schedules import Kind, build_schedule, find_least, run_schedule
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
        self, ctx: RankContext, model: nn.Module, kind: Kind, stages: Sequence[Stage], shapes: Shapes, *,
        deal: Deal, microbatches: int, group: dist.ProcessGroup,
    ) -> None:  # fmt: skip
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

    def _begin(
        self, plans: Sequence[Plan], calls: Sequence[Call], autocast: Any, recorder: Recorder | None
    ) -> None:
        """Tell this rank's stages what they are about to compute."""
        for stage in self.stages:
            stage.prepare(plans, calls)
            stage.has_backward, stage.stage_index_to_group_rank = True, self._homes
            stage.autocast, stage.recorder = autocast, recorder

    def _prepare(self, batch: Any, loss: Callable[[Any, Any], Any]) -> tuple[list[Chunk], list[Call], Any, list[Plan]]:  # fmt: skip
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

    def _cut(self, batch: Any, loss: Callable[[Any, Any], Any], largest: int) -> tuple[list[Chunk], list[Call], Any, list[Plan]]:  # fmt: skip
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
            raise UsageError(problem, rank=rank, hint="every stage is given the batch: nested tensors whose dim 0 are the samples")  # fmt: skip
        first = self.column[0]
        other = next((rank for rank in self.column if of_rank[rank] != of_rank[first]), None)
        if other is not None:
            forms = [of_rank[rank].split("\t") for rank in (first, other)]
            what = f"{forms[0][1]} on rank {first} and {forms[1][1]} on rank {other}" if forms[0][1] != forms[1][1] else f"the same shapes, but other values on rank {first} than on rank {other}"  # fmt: skip
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
        flat = torch.stack([one.double() for one in values]).to(device) if self.has_last else torch.empty(len(dtypes), dtype=torch.float64, device=device)  # fmt: skip
        self._pass_on(flat)
        return put_tensors(tree, [one.to(getattr(torch, dtype)) for one, dtype in zip(flat.unbind(), dtypes, strict=True)])  # fmt: skip

    def _pass_on(self, flat: Tensor) -> None:
        """Give a tensor of the rank with the last stage to all, from neighbour to neighbour.

        Backwards end there first, so that each has it before it has ended its own; a broadcast would wait for all of them.
        """
        own = self.column.index(self.ctx.rank)
        if own != self.last:
            nearer = own + (1 if own < self.last else -1)
            dist.recv(flat, src=self.column[nearer], group=self.group)
        farther = {own - 1} if own < self.last else {own + 1} if own > self.last else {own - 1, own + 1}
        works = [dist.isend(flat, dst=self.column[one], group=self.group) for one in sorted(farther) if 0 <= one < len(self.column)]  # fmt: skip
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
                dist.broadcast(one.contiguous() if self.has_last else one, src=self.column[self.last], group=self.group)  # fmt: skip
        return put_tensors(plan.output, tensors)


def _launch(ops: list[Any]) -> list[Any]:
    return dist.batch_isend_irecv(ops) if ops else []


def _refuse(*_: Any) -> Tensor:
    raise UsageError("a pipeline's schedule was run outside of a step")
