"""Weighs losses so that W ranks with any number of micro-batches have the gradient of one process with all samples.

A loss function returns a mean, whose weight is the number of samples and known before, or a sum with a count of its own (tokens that
are not masked), which only all ranks together know. The gradients of a sum are computed as if each sample counted one, and
corrected when the counts have been added up, while backward was running.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from rankwise.data.steps import Step
    from rankwise.runtime.context import RankContext
    from rankwise.train.tracking import Track

_HINT = 'return a scalar tensor (the mean over the batch\'s samples), (sum, count), or a dict of these with the key "loss"'


@final
class Weighing:
    """Weighs the losses of one step after the other.

    Args:
        ctx: The job.
    """

    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        self._counts: list[Any] = []
        self._num_micro = 0
        self._sum: Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def has_counts(self) -> bool:
        """Whether the losses of the current step came with counts."""
        return bool(self._counts)

    def weigh(self, returned: Any, step: Step, num_samples: int, track: Track) -> Tensor:
        """Return what backward is called on, and tell the track.

        Args:
            returned: What the loss function has returned.
            step: The step.
            num_samples: Samples of this micro-batch.
            track: What is told of it.

        Raises:
            UsageError: It is nothing that can be weighed.
        """
        named = returned if isinstance(returned, dict) else {"loss": returned}
        if "loss" not in named:
            raise UsageError(
                f"the loss function returned a dict with {sorted(named)}", rank=self._ctx.rank, hint=_HINT
            )
        self._num_micro += 1
        loss, count = self._read("loss", named["loss"])
        if not loss.requires_grad:
            raise UsageError(
                f"the loss function returned a tensor without a gradient: {loss}",
                rank=self._ctx.rank,
                hint="compute it from the model's outputs, on every rank and for every batch, and not under no_grad or with .item()",
            )
        for name, value in named.items():
            if name != "loss":
                self._note_metric(track, name, value, num_samples)
        if count is None:
            if self._counts:
                raise self._complain_mixed()
            factor = num_samples * step.scale
            weighed = loss if factor == 1 else loss * factor
            # The mean of no samples is NaN; its gradient is zero.
            track.add(weighed if num_samples else torch.zeros_like(weighed))
            return weighed
        if len(self._counts) + 1 != self._num_micro:
            raise self._complain_mixed()
        self._counts.append(count)
        track.add(loss, count)
        if self._num_micro == len(step):
            self._send_counts(loss.device)
        return loss * step.scale

    def _read(self, name: str, value: Any) -> tuple[Tensor, Any]:
        total, count = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, None)
        if not isinstance(total, torch.Tensor) or total.numel() != 1:
            shape = f" of shape {tuple(total.shape)}" if isinstance(total, torch.Tensor) else ""
            raise UsageError(
                f"the loss function returned a {type(total).__name__}{shape} as {name!r}",
                rank=self._ctx.rank,
                hint=_HINT,
            )
        return total, count

    def _note_metric(self, track: Track, name: str, value: Any, num_samples: int) -> None:
        if isinstance(value, (tuple, list)) and len(value) == 2:
            track.add_metric(name, *value)
        elif num_samples:
            track.add_metric(name, value * num_samples, num_samples)
        else:  # the mean of no samples
            track.add_metric(name, 0.0, 0)

    def _send_counts(self, device: torch.device) -> None:
        counts = [
            count.detach().reshape(()).double() if isinstance(count, torch.Tensor) else float(count)
            for count in self._counts
        ]
        if all(isinstance(count, torch.Tensor) for count in counts):
            total = torch.stack(counts).sum().to(device)
        else:
            total = torch.tensor([float(count) for count in counts], dtype=torch.float64).sum().to(device)
        self._sum = total
        if self._ctx.world_size > 1:
            # It travels while backward runs; on every rank before the gradients do.
            self._work = dist.all_reduce(total, group=self._ctx.group, async_op=True)

    def correct(self, gradients: Iterable[Tensor], step: Step) -> None:
        """Correct the averaged gradients of a step whose losses came with counts, in place.

        Args:
            gradients: All that the optimizer will use.
            step: The step.

        Collective: every rank, after the step's last backward.
        """
        self._num_micro = 0
        if not self._counts:
            return
        self._counts.clear()
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._sum is None:  # fewer micro-batches than the step has
            return
        # Nothing to count on any rank: sums over nothing have no gradient either.
        factor = step.global_samples / self._sum.clamp(min=torch.finfo(torch.float64).tiny)
        factor = torch.where(self._sum > 0, factor, torch.zeros_like(factor))
        self._sum = None
        for of_dtype in _group_by_dtype(gradients).values():
            torch._foreach_mul_(of_dtype, factor.to(of_dtype[0].dtype))

    def _complain_mixed(self) -> UsageError:
        return UsageError(
            "the loss function returned a mean for one micro-batch and (sum, count) for another of the same step",
            rank=self._ctx.rank,
            hint="return the same kind for every batch",
        )


def _group_by_dtype(gradients: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(gradient.dtype, []).append(gradient)
    return groups
