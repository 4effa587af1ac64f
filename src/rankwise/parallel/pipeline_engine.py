"""Runs the micro-batches of a batch through the stages of a pipeline, in training by torch's schedules, in evaluation forward only."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.base.errors import CollectiveError, UsageError
from rankwise.base.memory import view_memory
from rankwise.parallel.pipeline_forms import describe, put_tensors, take_tensors
from rankwise.parallel.pipeline_schedules import Kind, build_schedule, find_least, run_schedule
from rankwise.runtime.nested import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from rankwise.parallel.pipeline_layout import Deal
    from rankwise.parallel.pipeline_profile import Recorder
    from rankwise.parallel.pipeline_shapes import Shapes
    from rankwise.parallel.pipeline_stage import Stage
    from rankwise.runtime.context import RankContext

Call = tuple[tuple[Any, ...], dict[str, Any]]


class _CalledError(BaseException):
    """Ends a loss function where it calls the model; no Exception, which it might catch."""


@final
class _Stub:
    """Stands for the model where a loss function is asked what it calls the model with, or is given what the pipeline has computed."""

    def __init__(self, model: nn.Module, output: Any = None, *, is_asked: bool) -> None:
        self._model, self._output, self._is_asked = model, output, is_asked
        self.call: Call | None = None
        self.autocast: tuple[str, torch.dtype] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Note the call."""
        if self.call is not None:
            raise UsageError("the loss function calls the model twice", hint="a pipeline computes one forward for each micro-batch")  # fmt: skip
        self.call = (args, kwargs)
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        self.autocast = (kinds[0], torch.get_autocast_dtype(kinds[0])) if kinds else None
        if self._is_asked:
            raise _CalledError
        return self._output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """A micro-batch.

    Attributes:
        batch: What the loss function is given.
        share: Which part of the whole batch's samples it has.
        num_samples: How many.
    """

    batch: Any
    share: float
    num_samples: int


@final
class Engine:
    """The stages of this rank, and how they are run.

    Args:
        ctx: The job.
        model: The pipeline as the user sees it.
        kind: The schedule.
        stages: This rank's.
        shapes: Finds out what flows.
        deal: Which parts each stage has.
        microbatches: Into how many a batch is cut.
        group: The ranks of the pipeline.
        column: Their ranks in the job.
    """

    def __init__(  # noqa: PLR0913 - made in one place
        self, ctx: RankContext, model: nn.Module, kind: Kind, stages: Sequence[Stage], shapes: Shapes, *,
        deal: Deal, microbatches: int, group: dist.ProcessGroup, column: Sequence[int],
    ) -> None:  # fmt: skip
        self.ctx, self.model, self.kind, self.stages, self.shapes = ctx, model, kind, stages, shapes
        self.deal, self.microbatches, self.group, self.column = deal, microbatches, group, tuple(column)
        self.last = kind.place(stages[0].num_stages - 1, len(self.column))
        for stage in stages:
            stage.own = {one.stage_index: one for one in stages}
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

        Args:
            batch: Nested tensors, whose dim 0 are the samples.
            loss: Takes the model and a micro-batch; returns the mean over its samples, or a sum and its count, or a dict of these.
            factor: Takes what it has returned; gives what the batch's loss is multiplied with.

        Returns:
            What the loss function would have returned for the whole batch, the same on all stages; without gradients.

        Collective: every rank.
        """
        chunks = self._cut(batch)
        calls, autocast = self._ask(chunks, loss)
        plans = [self.shapes.find(*call, self.deal, training=True) for call in calls]
        for stage in self.stages:
            stage.has_backward = True
            stage.prepare(plans, calls)
        returned: list[Any] = []

        def compute(output: Any, chunk: Chunk) -> Tensor:
            module: Any = next(one for one in self.stages if one.is_last).submod
            whole = put_tensors(module.returned, output if isinstance(output, tuple) else (output,))
            value = loss(_Stub(self.model, whole, is_asked=False), chunk.batch)
            returned.append(_detach(value))
            if not chunk.num_samples:
                return sum(
                    one.sum() * 0
                    for _, one in flatten(whole)
                    if isinstance(one, Tensor) and one.requires_grad
                )
            own = _read_loss(value, self.ctx.rank)
            scale = factor(value)
            weighed = own * (scale if has_count(value) else scale * chunk.share)
            if self.recorder:
                self.recorder.extend()
            return weighed

        schedule = self._find_schedule(len(chunks))
        schedule._loss_fn = compute
        for stage in self.stages:
            stage.autocast, stage.recorder = autocast, self.recorder
        if self.recorder:
            dist.barrier(
                self.group
            )  # so that all ranks count from the same moment, whatever their clocks show
            self.recorder.begin()
        run_schedule(schedule, chunks)
        schedule._loss_fn = _refuse
        return self._share(_combine(returned, chunks) if self.has_last else None)

    def _find_schedule(self, number: int) -> Any:
        found = self._schedules.get(number)
        if found is None:
            found = self._schedules[number] = build_schedule(self.kind, self.stages, number, _refuse)
        mapping = {
            stage: self.kind.place(stage, len(self.column)) for stage in range(self.stages[0].num_stages)
        }
        for stage in self.stages:
            stage.stage_index_to_group_rank = mapping
        return found

    def _ask(self, chunks: Sequence[Chunk], loss: Callable[[Any, Any], Any]) -> tuple[list[Call], Any]:
        """Find out what the loss function calls the model with."""
        asked = [ask(self.model, chunk.batch, loss) for chunk in chunks]
        return [call for call, _ in asked], asked[-1][1]

    def _cut(self, batch: Any) -> list[Chunk]:
        """Cut a batch into micro-batches: as many on every rank, as even as can be.

        Raises:
            UsageError: It can't be cut.
            CollectiveError: The stages have different batches.
        """
        said, problem = _describe_batch(batch)
        if self._num_runs < 1 and not problem:
            said += "\t" + _digest(batch)
        self._num_runs += 1
        told = self.ctx.control.compare(f"{problem or ''}\t{said}", what="a step of a pipeline (do all stages have the same batch?)")  # fmt: skip
        largest = _count(said)
        if told is not None:
            of_rank = dict(zip(self.ctx.control.ranks, told, strict=True))
            self._check_batches(of_rank)
            largest = max(_count(one.partition("\t")[2]) for one in told)
        elif problem:
            raise UsageError(problem, rank=self.ctx.rank, hint="a batch is nested tensors whose dim 0 are the samples")  # fmt: skip
        self.num_samples = _count(said)
        return split(batch, max(find_least(self.kind, len(self.column)), min(self.microbatches, largest)))

    def _check_batches(self, of_rank: dict[int, str]) -> None:
        failed = {rank: one.partition("\t")[0] for rank, one in of_rank.items() if one.partition("\t")[0]}
        if failed:
            rank, problem = next(iter(failed.items()))
            raise UsageError(problem, rank=rank, hint="every stage is given the batch: nested tensors whose dim 0 are the samples")  # fmt: skip
        first = self.column[0]
        other = next((rank for rank in self.column if of_rank[rank] != of_rank[first]), None)
        if other is not None:
            forms = [of_rank[rank].split("\t") for rank in (first, other)]
            what = f"{forms[0][1]} on rank {first} and {forms[1][1]} on rank {other}" if forms[0][1] != forms[1][1] else f"the same shapes, and other values on rank {first} than on rank {other}"  # fmt: skip
            raise CollectiveError(
                f"the stages of a pipeline have different batches: {what}",
                rank=self.ctx.rank,
                hint="all stages take the same batch: make samplers from ctx.data_size and ctx.data_rank, or use rankwise.DataLoader",
            )

    def _share(self, returned: Any) -> Any:
        """Give all stages what the loss function has returned on the last."""
        device = self.ctx.device
        source = self.column[self.last]
        tree, values = _open(returned)
        if self._form is None:
            box = [[tree, [str(one.dtype).removeprefix("torch.") for one in values]]]
            dist.broadcast_object_list(box, src=source, group=self.group)
            self._form = box[0]
        elif self.has_last and repr(self._form[0]) != repr(tree):
            raise UsageError(
                f"the loss function returned another kind than before: {tree!r}",
                rank=self.ctx.rank,
                hint="return the same kind and names for every batch",
            )
        tree, dtypes = self._form
        flat = torch.stack([one.double() for one in values]).to(device) if self.has_last else torch.empty(len(dtypes), dtype=torch.float64, device=device)  # fmt: skip
        dist.broadcast(flat, src=source, group=self.group)
        return put_tensors(tree, [one.to(getattr(torch, dtype)) for one, dtype in zip(flat.unbind(), dtypes, strict=True)])  # fmt: skip

    # -------------------------------------------------------------- evaluation

    def infer(self, call: Call) -> Any:
        """Compute what the model returns, on all stages; without gradients.

        Collective: every rank of the pipeline.
        """
        device, stages = self.ctx.device, sorted(self.stages, key=lambda one: one.stage_index)
        plan = self.shapes.find(*call, self.deal, training=self.model.training)
        sent: list[tuple[Any, Tensor]] = []
        flowing: dict[int, tuple[Tensor, ...]] = {}
        output: Any = None
        for stage in stages:
            module: Any = stage.submod
            module.take(plan, call)
            received = flowing.pop(stage.stage_index, None)
            if received is None:
                forms = plan.enters(stage.stage_index)
                received = tuple(torch.empty(one.shape, dtype=one.dtype, device=device) for one in forms)
                source = self.column[self.kind.place(stage.stage_index - 1, len(self.column))]
                for one in received:
                    if one.numel():
                        dist.recv(one, src=source, group=self.group)
            output = module(*received)
            if not stage.is_last:
                outputs = output if isinstance(output, tuple) else (output,)
                stage.check_outputs(outputs, plan)
                self._hand_on(stage, outputs, flowing, sent)
        for work, _ in sent:
            work.wait()
        tensors = [torch.empty(one.shape, dtype=one.dtype, device=device) for one in plan.output_forms]
        if self.has_last:
            tensors = list(output) if isinstance(output, tuple) else [output]
        for one in tensors:
            if one.numel():
                dist.broadcast(one.contiguous() if self.has_last else one, src=self.column[self.last], group=self.group)  # fmt: skip
        return put_tensors(plan.output, tensors)

    def _hand_on(
        self,
        stage: Stage,
        outputs: tuple[Tensor, ...],
        flowing: dict[int, tuple[Tensor, ...]],
        sent: list[tuple[Any, Tensor]],
    ) -> None:
        following = stage.stage_index + 1
        target = self.column[self.kind.place(following, len(self.column))]
        if target == self.ctx.rank:
            flowing[following] = outputs
            return
        flat = [one.contiguous() for one in outputs if one.numel()]
        sent += [(dist.isend(one, dst=target, group=self.group), one) for one in flat]


def ask(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Any]) -> tuple[Call, Any]:
    """Find out what a loss function calls the model with, and under which autocast.

    Raises:
        UsageError: It doesn't call it.
    """
    stub = _Stub(model, is_asked=True)
    with suppress(_CalledError):
        loss(stub, batch)
    if stub.call is None:
        raise UsageError(
            "the loss function doesn't call the model that it is given",
            hint="loss(model, batch) calls model(inputs) once, and not a model from elsewhere",
        )
    return stub.call, stub.autocast


def _refuse(*_: Any) -> Tensor:
    raise UsageError("a pipeline's schedule was run outside of a step")


def split(batch: Any, number: int) -> list[Chunk]:
    """Cut a batch along dim 0 into so many micro-batches, the first ones larger by a sample at most.

    Args:
        batch: Nested tensors; those of one element along dim 0, and all that is no tensor, are given to each.
        number: Of micro-batches; some are of no samples if the batch has fewer.
    """
    tree, tensors = take_tensors(batch)
    total = max((one.shape[0] for one in tensors if one.dim()), default=0)
    pieces = [
        one.tensor_split(number) if one.dim() and one.shape[0] == total else [one] * number for one in tensors
    ]
    sizes = [total // number + (place < total % number) for place in range(number)]
    return [
        Chunk(put_tensors(tree, [one[place] for one in pieces]), size / total if total else 0.0, size)
        for place, size in enumerate(sizes)
    ]


def _describe_batch(batch: Any) -> tuple[str, str | None]:
    tensors = [one for _, one in flatten(batch) if isinstance(one, Tensor)]
    sizes = sorted({one.shape[0] for one in tensors if one.dim()} - {1})
    said = f"{max(sizes, default=1 if tensors else 0)} samples: {'; '.join(describe(batch))[:2000]}"
    if not tensors:
        return said, f"a step of a pipeline was given a {type(batch).__name__} without tensors"
    if len(sizes) > 1:
        return said, f"the tensors of a batch have {' and '.join(map(str, sizes))} samples"
    return said, None


def _count(said: str) -> int:
    return int(said.partition(" ")[0])


def _digest(batch: Any) -> str:
    made = hashlib.blake2b(digest_size=8)
    for _, one in flatten(batch):
        if isinstance(one, Tensor):
            flat = one.detach().cpu().contiguous().reshape(-1)
            made.update(view_memory(flat.data_ptr(), flat.numel() * flat.element_size()))
    return made.hexdigest()


# ------------------------------------------------- what loss functions return


def has_count(value: Any) -> bool:
    """Whether a loss function returned a sum and its count."""
    value = value["loss"] if isinstance(value, dict) else value
    return isinstance(value, (tuple, list))


def _read_loss(value: Any, rank: int) -> Tensor:
    value = value.get("loss") if isinstance(value, dict) else value
    loss = value[0] if isinstance(value, (tuple, list)) and len(value) == 2 else value
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UsageError(
            f"the loss function returned {type(loss).__name__} {tuple(loss.shape) if isinstance(loss, Tensor) else ''} without a gradient, or no scalar",
            rank=rank,
            hint='return a scalar tensor (the mean over the batch\'s samples), (sum, count), or a dict of these with the key "loss"',
        )
    return loss


def _detach(value: Any) -> Any:
    leaves = [one.detach() if isinstance(one, Tensor) else torch.tensor(float(one), dtype=torch.float64) for _, one in flatten(value)]  # fmt: skip
    return unflatten(value, leaves)


def _combine(returned: Sequence[Any], chunks: Sequence[Chunk]) -> Any:
    """Return what a loss function would have returned for all micro-batches together: means are weighed, sums and counts added up."""
    kept = [(value, chunk.share) for value, chunk in zip(returned, chunks, strict=True) if chunk.num_samples]
    if not kept:
        kept = [(returned[0], 0.0)]
    first = kept[0][0]
    if isinstance(first, dict):
        return {name: _add([(value[name], share) for value, share in kept]) for name in first}
    return _add(kept)


def _add(parts: Sequence[tuple[Any, float]]) -> Any:
    if isinstance(parts[0][0], (tuple, list)):
        return tuple(torch.stack([value[place] for value, _ in parts]).sum() for place in range(2))
    if len(parts) == 1 and parts[0][1] == 0.0:
        return parts[0][0].new_zeros(())
    return torch.stack([value.reshape(()) * share for value, share in parts]).sum()


def _open(returned: Any) -> tuple[Any, tuple[Tensor, ...]]:
    return (None, ()) if returned is None else take_tensors(returned)
