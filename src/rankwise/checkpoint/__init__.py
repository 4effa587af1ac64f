"""State that outlives the processes: one folder a step, whole or absent, readable at any world size.

    rankwise.checkpoint.save(folder, {"model": model, "optimizer": optimizer, "loader": loader}, step=step)
    step = rankwise.checkpoint.load(folder, {"model": model, "optimizer": optimizer, "loader": loader})

Names are loaded on first use: finding and verifying checkpoints needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.lazy import find_homes, make_getattr

if TYPE_CHECKING:
    from rankwise.checkpoint.convert import (
        export_safetensors as export_safetensors,
        import_weights as import_weights,
    )
    from rankwise.checkpoint.folder import (
        latest as latest,
        list_checkpoints as list_checkpoints,
        verify as verify,
    )
    from rankwise.checkpoint.loading import load as load, read as read
    from rankwise.checkpoint.parts import PerRank as PerRank
    from rankwise.checkpoint.retention import Keep as Keep
    from rankwise.checkpoint.saving import Saving as Saving, check as check, save as save

_NAMES = {
    "rankwise.checkpoint.convert": "export_safetensors import_weights",
    "rankwise.checkpoint.folder": "latest list_checkpoints verify",
    "rankwise.checkpoint.loading": "load read",
    "rankwise.checkpoint.parts": "PerRank",
    "rankwise.checkpoint.retention": "Keep",
    "rankwise.checkpoint.saving": "Saving check save",
}
_HOME = find_homes(_NAMES)

__all__ = [*_HOME]  # noqa: PLE0604 - strings all


__getattr__ = make_getattr(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
