"""Which checkpoints of a folder are kept: a pure function of what there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.checkpoint.manifest import Manifest


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What is kept when a new checkpoint is committed; the newest always is, and what any rule keeps, stays.

    Damaged ones are neither counted nor deleted.

    Attributes:
        last: So many of the newest; None: the newest only if there is another rule, else all.
        every: Those whose step is a multiple of this, forever.
        best: So many of the best by ``metric``.
        metric: The name in ``save(..., metrics={...})``.
        mode: Whether a smaller or a larger metric is better.
    """

    last: int | None = None
    every: int | None = None
    best: int = 0
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise UsageError(f"Keep(last={self.last})", hint="the newest is always kept: 1 or more, or None")
        if self.every is not None and self.every < 1:
            raise UsageError(f"Keep(every={self.every})", hint="a number of steps, 1 or more")
        if self.best < 0 or self.mode not in {"min", "max"}:
            raise UsageError(
                f"Keep(best={self.best}, mode={self.mode!r})", hint="best is 0 or more, mode 'min' or 'max'"
            )


def plan_removal(manifests: Sequence[Manifest], keep: Keep | None) -> list[Manifest]:
    """Choose what goes.

    Args:
        manifests: All committed checkpoints, in any order.
        keep: The rules; None: nothing but what was saved again goes.

    Returns:
        What to delete, the oldest first. Of several at one step only the newest stays.
    """
    ordered = sorted(manifests, key=lambda manifest: manifest.serial)
    newest_of = {manifest.step: manifest for manifest in ordered}
    gone = [manifest for manifest in ordered if newest_of[manifest.step] is not manifest]
    if keep is None or not (keep.last or keep.every or keep.best):
        return gone
    left = [manifest for manifest in ordered if newest_of[manifest.step] is manifest]
    stays = {manifest.serial for manifest in left[-(keep.last or 1) :]}
    if keep.every:
        stays |= {manifest.serial for manifest in left if manifest.step % keep.every == 0}
    if keep.best:
        sign = 1 if keep.mode == "min" else -1
        # A NaN compares with nothing, and is never the best.
        judged = [m for m in left if keep.metric in m.metrics and m.metrics[keep.metric] == m.metrics[keep.metric]]
        judged.sort(key=lambda manifest: (sign * manifest.metrics[keep.metric], -manifest.serial))
        stays |= {manifest.serial for manifest in judged[: keep.best]}
    return [m for m in ordered if m in gone or m.serial not in stays]
