"""A stage of torch's pipelines that moves its own tensors: micro-batches of any shapes, several tensors from stage to stage.

torch's schedules say when a stage computes, sends and receives; the differentiation is torch's too. What lies between differs from version
to version (torch 2.8 has no records of tensors, 2.12 has them, 2.14 keeps its outputs elsewhere), and takes the shapes of the first micro-batch
for all. So the data is here, behind the methods that the schedules of all versions call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from rankwise.base.errors import ModelError
from rankwise.parallel.trees import Form, form_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.parallel.pipeline_batches import Call
    from rankwise.parallel.pipeline_module import StageModule
    from rankwise.parallel.pipeline_plan import Plan
    from rankwise.parallel.pipeline_profile import Recorder


@final
@dataclass(slots=True)
class _Chunk:
    """A micro-batch on its way through a stage.

    Attributes:
        received: What the stage before has sent, as leaves of the graph.
        outputs: What the next stage receives.
        output_grads: Of each output; None: it has no gradient.
        input_grads: Of what was received.
        halved: What the weights' half of a backward needs.
    """

    received: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    output_grads: tuple[Tensor | None, ...] = ()
    input_grads: tuple[Tensor | None, ...] = ()
    halved: tuple[dict[str, Any], Any] | None = None


@final
@dataclass(slots=True)
class _Buffers:
    """Buffers into which micro-batches are received, kept from step to step."""

    device: torch.device
    held: dict[int, list[Tensor]] = field(default_factory=dict)

    def find(self, number: int, forms: Sequence[Form]) -> list[Tensor]:
        """Return room for the tensors of a micro-batch."""
        found = self.held.get(number)
        if found is None or [(tuple(one.shape), one.dtype) for one in found] != [
            (one.shape, one.dtype) for one in forms
        ]:
            found = self.held[number] = [torch.empty(one.shape, dtype=one.dtype, device=self.device) for one in forms]
        return found


@final
class Stage(PipelineStage):  # type: ignore[misc]
    """A stage that is given the shapes of each micro-batch before a step."""

    def __init__(
        self, module: StageModule, index: int, num_stages: int, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        # torch is to find out nothing by itself: it would run the modules on values that are none.
        known = torch.empty(1, device="meta")
        super().__init__(module, index, num_stages, device, input_args=known, output_args=known, group=group)
        self._plans: Sequence[Plan] = ()
        self._calls: Sequence[Call] = ()
        self._chunks: list[_Chunk] = []
        self._ahead, self._back = _Buffers(device), _Buffers(device)
        #: All stages of this rank, by number: those beside each other hand their tensors over.
        self.own: dict[int, Stage] = {index: self}
        #: Device and dtype of autocast around the forward; None: there is none.
        self.autocast: tuple[str, torch.dtype] | None = None
        #: Notes what a step takes, while it is profiled.
        self.recorder: Recorder | None = None

    def prepare(self, plans: Sequence[Plan], calls: Sequence[Call]) -> None:
        """Take what the step at hand computes."""
        self._plans, self._calls, self.chunks = plans, calls, len(plans)
        # Newer schedules look for stages that aren't neighbours.
        self.args_recv_info = dict.fromkeys(range(len(plans)), ())
        self.clear_runtime_states()

    def clear_runtime_states(self) -> None:
        """Forget the micro-batches of the step before."""
        self._chunks = [_Chunk() for _ in self._plans]

    def forget(self) -> None:
        """Let go of an evaluation's tensors, and of the room for what was received: what the model has returned may lie there."""
        self._chunks = []
        self._ahead.held.clear()

    # torch asks for these when a schedule begins, or when one has failed; all is known.

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> Any:
        return ()

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> Any:
        return None

    def _clear_unlaunched_fwd_recv(self, *_: Any) -> None:
        return None

    def _clear_unlaunched_bwd_recv(self, *_: Any) -> None:
        return None

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        # Torch 2.9 to 2.12 connect all neighbours first; Gloo has no connection of a rank with itself.
        connecting = super()._get_init_p2p_neighbors_ops()
        return [one for one in connecting if one.peer != dist.get_rank()]

    # ---------------------------------------------------------------- messages; nothing of no samples is sent

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Return what a micro-batch receives."""
        beside = self.own.get(self.stage_index - 1)
        if beside is not None:  # torch 2.8 lets a rank send to itself, which Gloo can't
            self.set_local_fwd_input(beside._chunks[fwd_chunk_id].outputs, fwd_chunk_id)
            return []
        forms = self._plans[fwd_chunk_id].enters(self.stage_index)
        buffers = self._ahead.find(fwd_chunk_id, forms)
        self._chunks[fwd_chunk_id].received = _make_leaves(buffers, forms)
        return self._exchange(dist.irecv, buffers, self.stage_index - 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Return what a micro-batch sends on."""
        outputs = () if self.is_last else self._chunks[fwd_chunk_id].outputs
        return self._exchange(dist.isend, [one.detach() for one in outputs], self.stage_index + 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Return the gradients that it receives."""
        beside = self.own.get(self.stage_index + 1)
        if beside is not None:
            self.set_local_bwd_input(beside.get_local_bwd_output(bwd_chunk_id), bwd_chunk_id)
            return []
        forms = self._plans[bwd_chunk_id].enters(self.stage_index + 1)
        buffers = iter(self._back.find(bwd_chunk_id, [one for one in forms if one.has_grad]))
        chunk = self._chunks[bwd_chunk_id]
        chunk.output_grads = tuple(next(buffers) if one.has_grad else None for one in forms)
        return self._exchange(dist.irecv, chunk.output_grads, self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Return the gradients that it sends back."""
        chunk = self._chunks[bwd_chunk_id]
        ops = self._exchange(dist.isend, () if self.is_first else chunk.input_grads, self.stage_index - 1)
        if self.stage_index - 1 not in self.own:
            chunk.input_grads = ()
        return ops

    def _exchange(self, way: Callable[..., Any], tensors: Sequence[Tensor | None], stage: int) -> list[Any]:
        moved = [one for one in tensors if one is not None and one.numel()]
        if not moved or stage in self.own:
            return []
        peer = dist.get_global_rank(self.group, self.stage_index_to_group_rank[stage])
        return [dist.P2POp(way, one, peer, self.group) for one in moved]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take what the stage before, on this rank, has returned."""
        outputs = prev_stage_outputs if isinstance(prev_stage_outputs, tuple) else (prev_stage_outputs,)
        forms = self._plans[mb_index].enters(self.stage_index)
        self._chunks[mb_index].received = _make_leaves(outputs, forms)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """Return the gradients for the stage before."""
        return self._chunks[mb_index].input_grads

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients of the next stage."""
        self._chunks[mb_index].output_grads = tuple(next_stage_bwd_outputs)

    # ---------------------------------------------------------------- arithmetic

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> Any:
        """Compute a micro-batch; what it returns is looked at before it is sent."""
        module: StageModule = self.submod
        plan, chunk = self._plans[fwd_chunk_id], self._chunks[fwd_chunk_id]
        module.take(plan, self._calls[fwd_chunk_id])
        # Since torch 2.15 a schedule finishes the backward of a sharded stage itself.
        if torch.is_grad_enabled() and hasattr(module, "finalize_backward"):
            module.set_manual_backward_finalization(True)
        start = self.recorder.mark() if self.recorder else None
        output = self.forward_maybe_with_nosync(*chunk.received)
        if self.recorder:
            self.recorder.add(self.stage_index, "forward", fwd_chunk_id, start)
        chunk.outputs = output if isinstance(output, tuple) else (output,)
        self.check_outputs(chunk.outputs, plan)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,  # noqa: FBT001 - torch's signature
        last_backward: bool = False,  # noqa: FBT001
    ) -> None:
        """Compute the gradients of a micro-batch; or those of its inputs, the weights' later."""
        start = self.recorder.mark() if self.recorder else None
        chunk = self._chunks[bwd_chunk_id]
        inputs = [one for one in chunk.received if one.requires_grad]
        # Of a tuple without gradients torch's whole backward takes nothing, and its half takes tuples only.
        given: dict[str, Any] = {
            "stage_output": loss if full_backward or not inputs else (loss,),
            "output_grads": None,
            "input_values": inputs,
        }
        if not self.is_last:
            pairs = [
                (one, grad) for one, grad in zip(chunk.outputs, chunk.output_grads, strict=True) if grad is not None
            ]
            given |= {"stage_output": tuple(one for one, _ in pairs), "output_grads": tuple(grad for _, grad in pairs)}
        chunk.outputs = chunk.output_grads = ()
        found: Sequence[Tensor | None] = ()
        if full_backward:
            found, _ = self.backward_maybe_with_nosync("full", given, last_backward=last_backward)
        elif inputs:
            found, groups = self.backward_maybe_with_nosync("input", given, last_backward=last_backward)
            chunk.halved = given, groups
        else:
            chunk.halved = given, None
        gradients = dict(zip(map(id, inputs), found, strict=False))
        # What a stage passes by without using it has no gradient, and the stage before waits for one.
        chunk.input_grads = tuple(
            _fill(gradients.get(id(one)), one) if one.requires_grad else None for one in chunk.received
        )
        chunk.received = ()
        if self.recorder:
            self.recorder.add(self.stage_index, "backward" if full_backward else "input gradients", bwd_chunk_id, start)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:  # noqa: FBT001 - torch's signature
        """Compute the gradients of the weights."""
        start = self.recorder.mark() if self.recorder else None
        chunk = self._chunks[bwd_chunk_id]
        assert chunk.halved is not None  # noqa: S101 - a schedule begins with the inputs' half
        (given, groups), chunk.halved = chunk.halved, None
        if groups is None:
            self.backward_maybe_with_nosync("full", given, last_backward=last_backward)
        else:
            rest = {"stage_output": given["stage_output"], "param_groups": groups}
            self.backward_maybe_with_nosync("weight", rest, last_backward=last_backward)
        if self.recorder:
            self.recorder.add(self.stage_index, "weight gradients", bwd_chunk_id, start)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Compute, in the precision in which the loss function calls the model."""
        if self.autocast is None:  # nor is there one around the step
            return super().forward_maybe_with_nosync(*args, **kwargs)
        with torch.autocast(*self.autocast):
            return super().forward_maybe_with_nosync(*args, **kwargs)

    def check_outputs(self, outputs: Sequence[Tensor], plan: Plan) -> None:
        """See that what goes to the next stage has the shapes for which that has made room: it would be aborted."""
        if self.is_last:
            return
        expected = plan.enters(self.stage_index + 1)
        if [(one.shape, one.dtype) for one in outputs] != [(one.shape, one.dtype) for one in expected]:
            raise ModelError(
                f"stage {self.stage_index} returned {list(map(form_of, outputs))}, where {list(expected)} was expected",
                hint="what a block returns must follow from the shapes of the model's inputs; with tensor parallelism it must not be sharded",
            )


def _make_leaves(tensors: Sequence[Tensor], forms: Sequence[Form]) -> tuple[Tensor, ...]:
    return tuple(one.detach().requires_grad_(form.has_grad) for one, form in zip(tensors, forms, strict=True))


def _fill(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient.contiguous()
