"""Batch normalisation over the samples of all ranks, on any backend and device (Ioffe & Szegedy, arXiv:1502.03167).

torch's own SyncBatchNorm refuses the CPU. This one needs nothing but an all-gather and an all-reduce. The ranks'
statistics are merged from count, mean and sum of squared deviations (Chan et al., 1979), never from a sum of squares,
which cancels when the mean is large.

N samples, C channels, W ranks; ``x_NC`` may have any number of dims behind C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rankwise.base.errors import ModelError
from rankwise.runtime.signature import naming

#: How many dims the input of each of torch's layers may have.
_NUM_DIMS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,), nn.SyncBatchNorm: ()}
# What all BatchNorm layers of torch derive from: programs that look for BatchNorm layers look for it.
_BatchNormBase: Any = nn.BatchNorm2d.__base__


@final
@dataclass(frozen=True, slots=True)
class _Group:
    """A process group that a layer keeps; a copied model (an average of weights, say) shares it, as it can't be copied."""

    members: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> _Group:
        return self


@final
class SyncBatchNorm(_BatchNormBase):  # type: ignore[misc]
    """A BatchNorm layer whose batch is that of all ranks.

    Parameters, buffers and state dict are those of ``torch.nn.BatchNorm2d``, and so is what it computes: in training,
    what one process would with the samples of all ranks in one batch. Ranks may hold different numbers of samples, or
    none. Half precision is computed in float32. Evaluation is local. Gradients of gradients, as for a gradient penalty,
    are not supported in training, as in torch's own layer: torch raises RuntimeError (``once_differentiable``).

    Args:
        num_features: Channels, C.
        process_group: The ranks to share with; None: all.
        **options: ``eps``, ``momentum``, ``affine``, ``track_running_stats``, ``device``, ``dtype``, as in torch.

    Collective: in training, every rank of the group must run this layer equally often and in the same order, in
    forward and in backward. A rank that runs a model in training mode alone waits for the others until the group's
    timeout: call ``model.eval()`` before you evaluate on one rank.
    """

    def __init__(self, num_features: int, *, process_group: dist.ProcessGroup | None = None, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.group = None if process_group is None else _Group(process_group)
        self.num_dims: tuple[int, ...] = ()

    def forward(self, x_NC: Tensor) -> Tensor:
        """Normalise each channel, and update the running statistics in training.

        Args:
            x_NC: Shape (N, C) or (N, C, ...); N may differ between ranks and be 0.

        Returns:
            As ``x_NC``.

        Raises:
            ValueError: Wrong number of dims or channels; or all ranks together hold only one value per channel.

        Collective: in training mode, all ranks of the group.
        """
        self._check_shape(x_NC)
        if not self.training:
            uses_batch = self.running_mean is None and self.running_var is None
            return self._normalize_alone(x_NC, 0.0, uses_batch=uses_batch)
        factor = self._count_batch()
        group = self._find_group()
        if group is None:
            return self._normalize_alone(x_NC, factor, uses_batch=True)
        wide = torch.float32 if x_NC.dtype in {torch.float16, torch.bfloat16} else x_NC.dtype
        total, mean_C, var_C = _merge_statistics(x_NC.detach().to(wide), group)
        if self.track_running_stats and self.running_mean is not None:
            with torch.no_grad():
                self.running_mean.mul_(1 - factor).add_(mean_C.to(self.running_mean.dtype) * factor)
                unbiased_C = var_C * (total / (total - 1))
                self.running_var.mul_(1 - factor).add_(unbiased_C.to(self.running_var.dtype) * factor)
        invstd_C = torch.rsqrt(var_C + self.eps)
        y_NC: Tensor = _Normalize.apply(x_NC, self.weight, self.bias, mean_C, invstd_C, total, group)
        return y_NC

    def _check_shape(self, x_NC: Tensor) -> None:
        if x_NC.dim() < 2 or (self.num_dims and x_NC.dim() not in self.num_dims):
            wanted = " or ".join(f"{num}D" for num in self.num_dims) or "at least 2D"
            raise ValueError(f"expected {wanted} input (got {x_NC.dim()}D input)")
        if x_NC.size(1) != self.num_features:
            shape = tuple(x_NC.shape)
            raise ValueError(f"expected {self.num_features} channels (got an input of shape {shape})")

    def _find_group(self) -> dist.ProcessGroup | None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD if self.group is None else self.group.members
        return group if group.size() > 1 else None

    def _count_batch(self) -> float:
        """Count this batch; return how much it weighs in the running statistics."""
        if not self.track_running_stats or self.num_batches_tracked is None:
            return 0.0 if self.momentum is None else float(self.momentum)
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else float(self.momentum)

    def _normalize_alone(self, x_NC: Tensor, factor: float, *, uses_batch: bool) -> Tensor:
        keeps = not self.training or self.track_running_stats
        mean_C, var_C = (self.running_mean, self.running_var) if keeps else (None, None)
        y_NC: Tensor = functional.batch_norm(x_NC, mean_C, var_C, self.weight, self.bias, uses_batch, factor, self.eps)
        return y_NC


def _merge_statistics(x_NC: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and biased variance of each channel over the samples of all ranks; one all-gather."""
    num_channels = x_NC.size(1)
    dims = [dim for dim in range(x_NC.dim()) if dim != 1]
    count = x_NC.numel() // num_channels
    ours = x_NC.new_zeros(2 * num_channels + 1)
    if count:
        var_C, mean_C = torch.var_mean(x_NC, dims, correction=0)
        ours[:num_channels], ours[num_channels:-1], ours[-1] = mean_C, var_C * count, count
    rows = torch.empty(group.size(), ours.numel(), dtype=ours.dtype, device=ours.device)
    with naming(dist.get_rank(), "the forward of SyncBatchNorm"):
        dist.all_gather(list(rows.unbind(0)), ours, group=group)
    mean_WC, squares_WC, count_W1 = rows[:, :num_channels], rows[:, num_channels:-1], rows[:, -1:]
    total = count_W1.sum()
    # Read by the host (a pause on a GPU) only where it may fail: if all ranks together hold one value, so does each.
    if count <= 1 and total <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {tuple(x_NC.shape)}"
            f" and {int(total)} value(s) per channel on all {group.size()} ranks together"
        )
    mean_C = (mean_WC * count_W1).sum(0) / total
    squares_C = squares_WC.sum(0) + ((mean_WC - mean_C).square() * count_W1).sum(0)
    return total, mean_C, squares_C / total


def _spread(per_C: Tensor, like_NC: Tensor) -> Tensor:
    """Give a value per channel the shape that goes with the samples."""
    return per_C.view(1, -1, *[1] * (like_NC.dim() - 2))


class _Normalize(torch.autograd.Function):  # type: ignore[misc]
    """The normalisation, given the statistics; its gradient knows that these come from the samples of all ranks."""

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, *rest: Any) -> Tensor:
        mean_C, invstd_C, total, group = rest
        ctx.save_for_backward(x_NC, weight_C, mean_C, invstd_C, total)
        ctx.group = group
        scale_C = invstd_C if weight_C is None else invstd_C * weight_C.to(invstd_C.dtype)
        y_NC = (x_NC.to(mean_C.dtype) - _spread(mean_C, x_NC)) * _spread(scale_C, x_NC)
        if bias_C is not None:
            y_NC += _spread(bias_C.to(mean_C.dtype), x_NC)
        return y_NC.to(x_NC.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, dy_NC: Tensor) -> tuple[Tensor | None, ...]:
        x_NC, weight_C, mean_C, invstd_C, total = ctx.saved_tensors
        dy_NC = dy_NC.to(mean_C.dtype)
        normal_NC = (x_NC.to(mean_C.dtype) - _spread(mean_C, x_NC)) * _spread(invstd_C, x_NC)
        dims = [dim for dim in range(x_NC.dim()) if dim != 1]
        # Weight and bias get the part of our own samples: DDP adds the ranks' parts up, as for any parameter.
        dbias_C, dweight_C = dy_NC.sum(dims), (dy_NC * normal_NC).sum(dims)
        dx_NC = None
        if ctx.needs_input_grad[0]:
            sums_2C = torch.cat([dbias_C, dweight_C])
            with naming(dist.get_rank(), "the backward of SyncBatchNorm"):
                dist.all_reduce(sums_2C, group=ctx.group)
            mean_dy_C, mean_dy_normal_C = (sums_2C / total).chunk(2)
            dx_NC = dy_NC - _spread(mean_dy_C, x_NC) - normal_NC * _spread(mean_dy_normal_C, x_NC)
            dx_NC *= _spread(invstd_C if weight_C is None else invstd_C * weight_C.to(invstd_C.dtype), x_NC)
            dx_NC = dx_NC.to(x_NC.dtype)
        dweight = dweight_C.to(weight_C.dtype) if ctx.needs_input_grad[1] else None
        dbias = dbias_C if ctx.needs_input_grad[2] else None
        return dx_NC, dweight, dbias, None, None, None, None


def convert_sync_batchnorm(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Let every BatchNorm layer of a model see the samples of all ranks.

    Parameters, buffers, hooks and the names in the state dict stay as they are, so an optimizer that was built
    before keeps working, and checkpoints load either way. The layers are changed in place.

    Args:
        model: Holds BatchNorm layers, torch's SyncBatchNorm layers or none at all.
        group: The ranks to share with; None: all.

    Returns:
        The model. Where it is on an NVIDIA GPU and the group uses NCCL, layers are torch's own SyncBatchNorm, which is
        tuned for these; and a model that is a BatchNorm layer itself is a new one.

    Raises:
        ModelError: A layer is of a foreign class derived from BatchNorm: what it adds would be lost.
    """
    complaint = find_foreign(model)
    if complaint:
        raise ModelError(complaint)
    if _prefers_native(model, group):
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
        return converted
    for layer in model.modules():
        if not isinstance(layer, _BatchNormBase):
            continue
        if type(layer) is not SyncBatchNorm:
            layer.num_dims = _NUM_DIMS[type(layer)]
            # As torch's own lazy layers become what they are: nobody who holds the layer notices.
            layer.__class__ = SyncBatchNorm
        layer.group = None if group is None or group is dist.group.WORLD else _Group(group)
        layer.__dict__.pop("process_group", None)
    return model


def _prefers_native(model: nn.Module, group: dist.ProcessGroup | None) -> bool:
    tensor = next(model.parameters(), None)
    if tensor is None or tensor.device.type != "cuda" or not dist.is_initialized():
        return False
    return "nccl" in dist.get_backend_config(group)


def find_foreign(model: nn.Module) -> str | None:
    """Say which BatchNorm layers are of classes that somebody derived, if any: converting would drop what they add."""
    known = {*_NUM_DIMS, SyncBatchNorm}
    layers = [(name, type(one)) for name, one in model.named_modules() if isinstance(one, _BatchNormBase)]
    foreign = [f"{name!r} ({kind.__name__})" for name, kind in layers if kind not in known]
    if not foreign:
        return None
    return (
        f"{len(foreign)} BatchNorm layer(s) are of a class derived from torch's, and syncing would drop what it adds:"
        f" {', '.join(foreign[:3])}; take a plain BatchNorm, with a layer of its own for the rest"
    )
