"""torch's pipeline stage, whose micro-batches may have different shapes (torch 2.8 to 2.15)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.stage import _RecvInfo

from rankwise.base.errors import ModelError
from rankwise.parallel.pipeline_shapes import Form, form_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from rankwise.parallel.pipeline_layout import StageModule
    from rankwise.parallel.pipeline_profile import Recorder
    from rankwise.parallel.pipeline_shapes import Plan


@final
class Stage(PipelineStage):  # type: ignore[misc]
    """A stage that is told the shapes of each micro-batch before a step.

    Args:
        module: What it computes.
        index: Which stage, from 0.
        num_stages: How many there are.
        device: Of this rank.
        group: The ranks of the pipeline.
    """

    def __init__(
        self,
        module: StageModule,
        index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        # torch is to find out nothing by itself: it would run the modules on values that are none.
        known = torch.empty(1, device="meta")
        super().__init__(module, index, num_stages, device, input_args=known, output_args=known, group=group)
        self._plans: Sequence[Plan] = ()
        self._calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] = ()
        self._laid_out: object = None
        #: Device and dtype of autocast around the forward; None: there is none.
        self.autocast: tuple[str, torch.dtype] | None = None
        #: Notes what a step takes, while it is profiled.
        self.recorder: Recorder | None = None

    def prepare(self, plans: Sequence[Plan], calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        """Take what the step at hand computes.

        Args:
            plans: The shapes of each micro-batch.
            calls: The model's arguments for each.
        """
        self._plans, self._calls = plans, calls
        wanted = [(self._received(plan), self._sent(plan)) for plan in plans]
        if wanted != self._laid_out:
            self._laid_out = wanted
            self._lay_out()
        self.clear_runtime_states()

    def _received(self, plan: Plan) -> Form | None:
        return None if self.is_first else plan.inputs[self.submod.turn.first]

    def _sent(self, plan: Plan) -> Form | None:
        return None if self.is_last else plan.inputs[self.submod.turn.end]

    def _lay_out(self) -> None:
        """Make room for what each micro-batch receives."""
        self.chunks = len(self._plans)
        self.act_send_info = {0: [] if self.is_last else [self.stage_index + 1]}
        self.args_recv_info, self.grad_recv_info, self.grad_send_info = {}, {}, None
        for number, plan in enumerate(self._plans):
            received, sent = self._received(plan), self._sent(plan)
            self.args_recv_info[number] = () if received is None else (self._make_room(received, self.stage_index - 1),)  # fmt: skip
            self.grad_recv_info[number] = (
                () if sent is None else (self._make_room(sent, self.stage_index + 1),)
            )
        if hasattr(self, "_stage_meta"):
            self._stage_meta.inputs = tuple(one.tensor_meta for one in self.args_recv_info[0])

    def _make_room(self, form: Form, source: int) -> _RecvInfo:
        buffer = torch.empty(form.shape, dtype=form.dtype, device=self.device)
        like = torch.empty(
            form.shape, dtype=form.dtype, device="meta", requires_grad=form.dtype.is_floating_point
        )
        return _RecvInfo(f"stage {source}", source, buffer, _describe(like))

    # torch asks for these when a schedule begins; all is known.

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> Any:
        return ()

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> Any:
        return None

    def _get_grad_send_meta(self, input_idx: int) -> Any:  # noqa: ARG002 - torch's signature
        return next(iter(self.args_recv_info[0])).tensor_meta

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Return what a micro-batch sends on; nothing of no samples."""
        return [] if self.is_last else _drop_empty(super().get_fwd_send_ops(fwd_chunk_id))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Return what a micro-batch receives."""
        return _drop_empty(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Return the gradients that it sends back."""
        return _drop_empty(super().get_bwd_send_ops(bwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Return the gradients that it receives."""
        return _drop_empty(super().get_bwd_recv_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute a micro-batch; what it returns is looked at before it is sent."""
        module: StageModule = self.submod
        module.turn.plan, module.inputs = self._plans[fwd_chunk_id], self._calls[fwd_chunk_id]
        start = self.recorder.mark() if self.recorder else None
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.recorder:
            self.recorder.add(self.stage_index, "forward", fwd_chunk_id, start)
        self.check_output(output, self._plans[fwd_chunk_id])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> None:  # noqa: FBT001 - torch's signature  # fmt: skip
        """Compute the gradients of a micro-batch; or those of its inputs, the weights' later."""
        start = self.recorder.mark() if self.recorder else None
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if self.recorder:
            self.recorder.add(self.stage_index, "backward" if full_backward else "input gradients", bwd_chunk_id, start)  # fmt: skip

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:  # noqa: FBT001 - torch's signature
        """Compute the gradients of the weights."""
        start = self.recorder.mark() if self.recorder else None
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if self.recorder:
            self.recorder.add(self.stage_index, "weight gradients", bwd_chunk_id, start)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Compute, in the precision in which the loss function calls the model."""
        kind, dtype = self.autocast or ("cpu", torch.bfloat16)
        with torch.autocast(kind, dtype, enabled=self.autocast is not None):
            return super().forward_maybe_with_nosync(*args, **kwargs)

    def check_output(self, output: Any, plan: Plan) -> None:
        """See that what goes to the next stage has the shape for which that has made room: it would be aborted.

        Raises:
            ModelError: It hasn't.
        """
        expected, found = self._sent(plan), None if self.is_last else form_of(output)
        if found != expected:
            raise ModelError(
                f"stage {self.stage_index} returned a tensor {found}, where {expected} was expected",
                hint="what a block returns must follow from the shapes of the model's inputs; with tensor parallelism it must be whole",
            )


def _drop_empty(ops: list[Any]) -> list[Any]:
    return [one for one in ops if one.tensor.numel()]


def _describe(tensor: torch.Tensor) -> Any:
    """Return torch's record of a tensor; older versions have none."""
    try:
        from torch.distributed.pipelining._utils import extract_tensor_meta  # noqa: PLC0415 - torch 2.12 and later
    except ImportError:
        return None
    return extract_tensor_meta(tensor)
