"""DDP for small models: gradients are views of one flat buffer, which is averaged by one all-reduce after backward.

Buckets (Li et al., arXiv:2006.15704, section 3.2) let the exchange begin while backward runs. A model whose gradients fit
into one bucket has nothing to gain from that, and pays for the hooks on each of its parameters.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel

from rankwise.base.errors import CollectiveError, UsageError
from rankwise.parallel.checked import Watch, check_before_forward
from rankwise.runtime.nested import flatten
from rankwise.runtime.signature import naming_on

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

#: Each gradient begins at such a multiple of bytes, as tensors of their own do: kernels read 64 bytes at once.
_ALIGNMENT_BYTES = 64
_BROADCAST_BYTES = 250 << 20  # torch's
#: What a forward may return beside tensors, without hiding one.
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(slots=True)
class _Turn:
    """Where a step stands; apart from the module, whose every assignment is looked at by torch.

    Attributes:
        syncs: Whether the backward of the last forward averages, and the next forward shares the buffers: torch's rule.
        awaits_backward: Whether a forward has been whose backward has not.
        versions: Of the buffers when the first of these forwards began: a backward changes them.
        is_queued: Whether the averaging is to come at the end of the running backward.
        hooks_parameters: Whether each parameter tells of its gradient.
    """

    syncs: bool = True
    awaits_backward: bool = False
    versions: tuple[int, ...] = ()
    is_queued: bool = False
    hooks_parameters: bool = False


@final
class FlatDDP(DistributedDataParallel):  # type: ignore[misc]
    """A DistributedDataParallel to whoever asks, without torch's reducer; made by ``apply_ddp(model, reduce="flat")``.

    A parameter without a part in the loss has a gradient of zeros, and stops nobody.

    Args:
        module: The model, on its device and equal on all ranks.
        group: The ranks.
        rank: Our rank, for errors.
        broadcast_buffers: Whether the ranks take rank 0's buffers before a forward in training.
    """

    watch: Watch | None = None

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup, *, rank: int, broadcast_buffers: bool
    ) -> None:
        nn.Module.__init__(self)  # not torch's own: there would be a reducer with a hook on each parameter
        self.module, self.process_group, self._rank = module, group, rank
        self._trained = [one for one in module.parameters() if one.requires_grad]
        self.device = self._trained[0].device
        self.device_type, self.dim, self.static_graph, self.find_unused_parameters = (
            self.device.type,
            0,
            False,
            False,
        )
        self.device_ids = None if self.device.type == "cpu" else [self.device.index]
        self.output_device = None if self.device_ids is None else self.device
        self.gradient_as_bucket_view = True
        self.parameters_to_ignore: set[str] = set()
        self.mixed_precision, self.logger = None, None
        self.require_backward_grad_sync = True
        self.forward_sync_buffers = broadcast_buffers
        self._lay_out()
        self._turn = _Turn()

    def _lay_out(self) -> None:
        """Make a buffer for each dtype, and a view of it for each parameter, with the parameter's strides."""
        places: list[tuple[torch.dtype, int]] = []
        sizes: dict[torch.dtype, int] = {}
        for one in self._trained:
            begin, unit = sizes.get(one.dtype, 0), max(1, _ALIGNMENT_BYTES // one.element_size())
            places.append((one.dtype, begin))
            sizes[one.dtype] = begin + -(-one.numel() // unit) * unit
        self._flats = {
            dtype: torch.zeros(size, dtype=dtype, device=self.device) for dtype, size in sizes.items()
        }
        self._views = [
            _view(self._flats[dtype], begin, one)
            for (dtype, begin), one in zip(places, self._trained, strict=True)
        ]

    # ------------------------------------------------------------------------------ a step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model.

        Args:
            *inputs: As for the model.
            **kwargs: As for the model.

        Returns:
            What the model returns.

        Raises:
            ModelError: Parameters were changed since the model was wrapped.
            CollectiveError: The last gradients were not averaged; or a peer has left.

        Collective: in training mode all ranks, if the model has buffers; the backward in any case.
        """
        if self.watch is not None:
            check_before_forward(self, self.watch)
        if self.device_ids is not None:
            (inputs, *_), (kwargs, *_) = _to_kwargs(inputs, kwargs, self.device, False)  # noqa: FBT003 - no stream of its own
        with naming_on(self._rank, "the forward of the wrapped model"):
            if self.training and self._turn.syncs and self.forward_sync_buffers:
                self._share_buffers()
            if not torch.is_grad_enabled():
                return self.module(*inputs, **kwargs)
            if self._turn.awaits_backward:
                self._check_averaged()
            self._attach()
            self._turn.versions = self._list_versions()
            outputs = self.module(*inputs, **kwargs)
        self._turn.syncs = self.require_backward_grad_sync
        if self.require_backward_grad_sync:
            self._watch_backward(outputs)
        return outputs

    def _attach(self) -> None:
        """Let the gradients be views: backward adds to what is there."""
        missing = [
            (one, view) for one, view in zip(self._trained, self._views, strict=True) if one.grad is None
        ]
        if len(missing) == len(self._views):
            self._zero()
        for one, view in missing:
            if len(missing) < len(self._views):
                view.zero_()
            one.grad = view

    def _watch_backward(self, outputs: Any) -> None:
        """Have the gradients averaged at the end of the backward that passes through these outputs."""
        leaves = [leaf for _, leaf in flatten(outputs)]
        if self._turn.hooks_parameters:
            return
        if any(not isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in leaves):
            # Tensors may be hidden in it: from now on each parameter tells.
            for one in self._trained:
                one.register_post_accumulate_grad_hook(self._queue)
            self._turn.hooks_parameters = True
            return
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        for tensor in tensors:
            tensor.register_hook(self._queue)
        self._turn.awaits_backward = bool(tensors)

    def _queue(self, _: Tensor) -> None:
        # As DDP: the last forward has decided whether its backward averages.
        if not self._turn.is_queued and (self._turn.syncs or not self._turn.hooks_parameters):
            self._turn.is_queued = True
            Variable._execution_engine.queue_callback(self._reduce)

    def _reduce(self) -> None:
        turn = self._turn
        turn.is_queued = turn.awaits_backward = False
        for one, view in zip(self._trained, self._views, strict=True):
            if one.grad is not view:  # replaced, or made anew by create_graph=True
                view.zero_() if one.grad is None else view.copy_(one.grad.detach())
                one.grad = view
        size = dist.get_world_size(self.process_group)
        with naming_on(self._rank, "the backward of the wrapped model"):
            for flat in self._flats.values() if size > 1 else ():
                # Divided first, as DDP does: fp16 must not overflow in the sum.
                flat.div_(size)
                dist.all_reduce(flat, group=self.process_group)

    def _check_averaged(self) -> None:
        """Refuse to go on if a backward has left gradients here without passing through the outputs."""
        self._turn.awaits_backward = False
        if self._turn.versions == self._list_versions() and all(
            one.grad is view for one, view in zip(self._trained, self._views, strict=True)
        ):
            return  # several forwards before one backward
        if any(one.grad is not None for one in self._trained) and any(
            bool(flat.any()) for flat in self._flats.values()
        ):
            raise CollectiveError(
                "the last backward did not pass through what the model's forward had returned, so that its gradients were not averaged over the ranks",
                rank=self._rank,
                hint="compute the loss from the outputs of the wrapped model; or use apply_ddp without reduce='flat', which watches every parameter",
            )

    def _list_versions(self) -> tuple[int, ...]:
        return tuple(flat._version for flat in self._flats.values())

    def _share_buffers(self) -> None:
        share_values(self.module.buffers(), self.process_group)

    def zero_grads(self) -> bool:
        """Set all gradients to zero where they are, by one write; return False if they are elsewhere."""
        is_ours = all(one.grad is view for one, view in zip(self._trained, self._views, strict=True))
        if is_ours:
            self._zero()
        return is_ours

    def _zero(self) -> None:
        for flat in self._flats.values():
            flat.zero_()

    def forget(self) -> None:
        """Forget a step that was left by an error."""
        self._turn = _Turn(hooks_parameters=self._turn.hooks_parameters)

    # ------------------------------------------------------------------------- torch's own

    def train(self, mode: bool = True) -> FlatDDP:  # noqa: FBT001 - torch's signature
        """Set training mode, as in torch; the next forward looks at the parameters."""
        if self.watch is not None:
            self.watch.forwards_left = 0
        nn.Module.train(self, mode)
        return self

    def register_comm_hook(self, state: object, hook: Any) -> None:  # noqa: ARG002 - torch's signature
        """Refuse: a hook gets buckets, and here are none.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "register_comm_hook: a model of apply_ddp(reduce='flat') has no buckets that a hook could send",
            rank=self._rank,
            hint="leave reduce='flat' out",
        )

    def join(self, *_: object, **__: object) -> Any:
        """Refuse: uneven inputs are the loader's affair here.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "join(): a model of apply_ddp(reduce='flat') can't go on without a rank",
            rank=self._rank,
            hint="rankwise.DataLoader gives all ranks equally many batches; or leave reduce='flat' out",
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: for an average of the weights, say. The buffers are made anew."""
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in {"process_group", "_flats", "_views", "_trained"}
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Take it; the copy's gradients are averaged over all ranks of the job."""
        self.__dict__.update(state)
        self.process_group = None
        with suppress(RuntimeError, ValueError):
            self.process_group = dist.distributed_c10d._get_default_group()
        self._trained = [one for one in self.module.parameters() if one.requires_grad]
        self.watch, self._turn = None, _Turn()
        self._lay_out()


def _view(flat: Tensor, begin: int, like: Tensor) -> Tensor:
    part = flat[begin : begin + like.numel()]
    # channels_last, say: autograd wants a gradient's strides to be its parameter's.
    is_dense = (
        like.is_contiguous()
        or sum((size - 1) * stride for size, stride in zip(like.size(), like.stride(), strict=True))
        == like.numel() - 1
    )
    return part.as_strided(like.size(), like.stride()) if is_dense and like.numel() else part.view(like.shape)


def find_sparse(model: nn.Module) -> str | None:
    """Say which layers have gradients that can be no views of a buffer; None if there are none."""
    names = [name for name, layer in model.named_modules() if getattr(layer, "sparse", False) is True]
    if not names:
        return None
    return f"reduce='flat' needs dense gradients, and {', '.join(map(repr, names[:3]))} has sparse=True: leave one of the two out"


def share_values(values: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the values of its first.

    Collective: every rank of the group.
    """
    tensors = [one.detach() for one in values]
    if tensors and dist.get_world_size(group) > 1:
        dist._broadcast_coalesced(group, tensors, _BROADCAST_BYTES, 0)
