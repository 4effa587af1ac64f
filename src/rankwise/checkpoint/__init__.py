"""State that outlives the processes: one folder a step, whole or absent, readable at any world size.

    rankwise.checkpoint.save(folder, {"model": model, "optimizer": optimizer, "loader": loader}, step=step)
    step = rankwise.checkpoint.load(folder, {"model": model, "optimizer": optimizer, "loader": loader})

Names are loaded on first use: finding and verifying checkpoints needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOME]  # noqa: PLE0604 - strings all


def __getattr__(name: str) -> object:
    if name in _HOME:
        from importlib import import_module  # noqa: PLC0415 - paid for on first use only

        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'rankwise.checkpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
