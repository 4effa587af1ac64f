"""Gradients that travel as bfloat16, or only their largest entries; what is left out is added to the next one.

Error feedback: Seide et al., "1-Bit Stochastic Gradient Descent", INTERSPEECH 2014; top-k: Lin et al., arXiv:1712.01887.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.parallel.servers.layout import ShardLayout


@final
class Compression:
    """Makes a gradient smaller on the worker, and whole again on the server.

    Args:
        form: ``"bf16"``, or ``"topk:0.01"`` for the hundredth of the entries that is largest, for each dtype of a shard.
    """

    def __init__(self, form: str) -> None:
        self._fraction: float | None = None
        kind, _, given = form.partition(":")
        try:
            self._fraction = float(given) if kind == "topk" else None
        except ValueError:
            self._fraction = math.nan
        is_known = (kind == "topk" and 0 < (self._fraction or 0) <= 1) or form == "bf16"
        if not is_known:
            raise UsageError(
                f"compression={form!r} is not known",
                hint='"bf16", or "topk:0.01" for the largest hundredth; None: whole gradients',
            )
        self._left: dict[int, list[Tensor]] = {}

    def encode(self, gradient: Tensor, layout: ShardLayout) -> tuple[Tensor, dict[str, Any]]:
        """Return what is sent of a shard's gradient, and what the server must know; what is left out is kept for the next."""
        parts = layout.view_segments(gradient)
        left = self._left.setdefault(layout.number, [torch.zeros_like(part) for part in parts])
        pieces: list[Tensor] = []
        for part, rest in zip(parts, left, strict=True):
            rest.add_(part)
            if self._fraction is None:
                small = rest.to(torch.bfloat16)
                rest.sub_(small)
                pieces.append(small.view(torch.uint8))
                continue
            count = max(1, round(self._fraction * rest.numel()))
            places = rest.abs().topk(count, sorted=False).indices
            values = rest[places]
            rest[places] = 0
            pieces += [places.view(torch.uint8), values.view(torch.uint8)]
        return torch.cat(pieces), {
            "form": "bf16" if self._fraction is None else "topk",
            "sizes": [one.numel() for one in pieces],
        }

    def decode(self, body: Tensor, note: Mapping[str, Any], layout: ShardLayout, out: Tensor) -> Tensor:
        """Put what was sent into a shard's buffer, and return that."""
        # Copies, so that each begins where its dtype may.
        pieces = iter([one.clone() for one in body.split(note["sizes"])])
        for part in layout.view_segments(out):
            if note["form"] == "bf16":
                part.copy_(next(pieces).view(torch.bfloat16))
            else:
                places, values = next(pieces).view(torch.int64), next(pieces).view(part.dtype)
                part.zero_()[places] = values
        return out
