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
from rankwise.parallel.dtensors import to_local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from rankwise.data.steps import Step
    from rankwise.runtime.context import RankContext
    from rankwise.train.tracking import Track

_HINT = (
    'return a scalar tensor (the mean over the batch\'s samples), (sum, count), or a dict of these with the key "loss"'
)


@final
class LossWeighting:
    """Weighs the losses of one step after the other.

    Args:
        ctx: The job.
    """

    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        self._form: tuple[bool, list[str]] | None = None
        self.forget()

    def forget(self) -> None:
        """Forget a step that was left by an error."""
        self._counts: list[Any] = []
        self._num_micro = 0
        self._sum: Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def has_counts(self) -> bool:
        """Whether the losses of the current step came with counts."""
        return bool(self._counts)

    def weigh(
        self, returned: Any, step: Step, num_samples: int, track: Track, *, stand_in: Callable[[], Tensor]
    ) -> Tensor:
        """Return what backward is called on, and tell the track.

        Args:
            returned: What the loss function has returned.
            step: The step.
            num_samples: Samples of this micro-batch.
            track: What is told of it.
            stand_in: Gives a zero with zero gradients, for the mean of no samples.

        Raises:
            UsageError: It is nothing that can be weighed, or another kind than before.
            CollectiveError: The ranks' loss functions return different kinds.
        """
        loss, _ = self._read("loss", self._name(returned)["loss"])
        if not loss.requires_grad:
            raise UsageError(
                f"the loss function returned a tensor without a gradient: {loss}",
                rank=self._ctx.rank,
                hint="compute it from the model's outputs, on every rank and for every batch, and not under no_grad or with .item()",
            )
        return self.note(returned, step, num_samples, track, stand_in=stand_in)

    def find_factor(self, returned: Any, step: Step, num_samples: int) -> float:
        """Return what such a loss is multiplied with before it is differentiated."""
        _, count = self._read("loss", self._name(returned)["loss"])
        return step.scale if count is not None else num_samples * step.scale

    def note(
        self,
        returned: Any,
        step: Step,
        num_samples: int,
        track: Track,
        *,
        stand_in: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Tell the track of a loss, which may have been differentiated elsewhere; return it, weighed.

        Arguments and errors as above.
        """
        named = self._name(returned)
        self._num_micro += 1
        loss, count = self._read("loss", named["loss"])
        self._check_form(count is None, named)
        if len(named) > 1:
            for name, value in named.items():
                if name != "loss":
                    self._note_metric(track, name, value, num_samples)
        if count is None:
            factor = num_samples * step.scale
            # The mean of no samples is NaN, and so would be the gradient of whatever it is multiplied with.
            if factor == 0:
                weighed = torch.zeros_like(loss) if stand_in is None else stand_in()
            else:
                weighed = loss if factor == 1 else loss * factor
            track.add(weighed)
            return weighed
        self._counts.append(count)
        track.add(loss, count)
        if self._num_micro == len(step):
            self._send_counts(loss.device)
        return loss * step.scale

    def _name(self, returned: Any) -> dict[str, Any]:
        named = returned if isinstance(returned, dict) else {"loss": returned}
        if "loss" not in named:
            raise UsageError(f"the loss function returned a dict with {sorted(named)}", rank=self._ctx.rank, hint=_HINT)
        return named

    def _read(self, name: str, value: Any) -> tuple[Tensor, Any]:
        total, count = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, None)
        if not isinstance(total, torch.Tensor) or total.numel() != 1:
            shape = f" of shape {tuple(total.shape)}" if isinstance(total, torch.Tensor) else ""
            raise UsageError(
                f"the loss function returned a {type(total).__name__}{shape} as {name!r}",
                rank=self._ctx.rank,
                hint=_HINT,
            )
        if count is not None and not _is_number(count):
            raise UsageError(
                f"the loss function returned a pair whose second part is a {_show(count)}, and not a count",
                rank=self._ctx.rank,
                hint="return the loss alone, or (sum, count); don't return outputs",
            )
        return total, count

    def _check_form(self, is_mean: bool, named: dict[str, Any]) -> None:  # noqa: FBT001 - a fact, and no switch
        """See that all ranks return the same kind, once, and that it stays: what is added up over them depends on it."""
        form = (is_mean, sorted(named))
        if form == self._form:
            return
        if self._form is None:
            for name, value in named.items():
                pair = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value,)
                if not all(_is_number(one) for one in pair):
                    raise UsageError(
                        f"the loss function returned a {_show(value)} as {name!r}, and not a number",
                        rank=self._ctx.rank,
                        hint=_HINT + "; of a model that returns a dict of its own, return outputs.loss",
                    )
            self._ctx.agree(_show_form(form), "what the loss function returns")
            self._form = form
        else:
            raise UsageError(
                f"the loss function returned {_show_form(form)}, and before {_show_form(self._form)}",
                rank=self._ctx.rank,
                hint="return the same kind and names for every batch, on every rank; (0 * outputs.sum(), 0) where nothing counts",
            )

    def _note_metric(self, track: Track, name: str, value: Any, num_samples: int) -> None:
        if isinstance(value, (tuple, list)) and len(value) == 2:
            track.add_metric(name, *value)
        elif num_samples:
            track.add_metric(name, value * num_samples, num_samples)
        else:  # the mean of no samples
            track.add_metric(name, 0.0, 0)

    def _send_counts(self, device: torch.device) -> None:
        if all(isinstance(count, torch.Tensor) for count in self._counts):
            total = torch.stack([count.detach().reshape(()) for count in self._counts]).sum().to(device, torch.float64)
        else:
            number = sum(float(count) for count in self._counts)
            # Not from a tensor on the host: a GPU would be waited for.
            total = torch.full((), number, dtype=torch.float64, device=device)
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
        # Ranks that share a batch have each counted it.
        copies = self._ctx.world_size // self._ctx.data_size
        factor = step.global_samples * copies / self._sum.clamp(min=torch.finfo(torch.float64).tiny)
        factor = torch.where(self._sum > 0, factor, torch.zeros_like(factor))
        self._sum = None
        for of_dtype in _group_by_dtype(to_local(gradients)).values():
            torch._foreach_mul_(of_dtype, factor.to(of_dtype[0].dtype))


def _show_form(form: tuple[bool, list[str]]) -> str:
    return f"{'a mean' if form[0] else '(sum, count)'}; names {form[1]}"


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))


def _show(value: Any) -> str:
    return f"{type(value).__name__}" + (f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "")


def _group_by_dtype(gradients: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(gradient.dtype, []).append(gradient)
    return groups
