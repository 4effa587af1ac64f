"""Environments of real launchers, recorded or written down from their sources: tests/doctor/environments."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "doctor" / "environments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One file of the folder: what its ranks' environments say, and how it is to be understood."""

    name: str
    about: str
    ranks: list[dict[str, str]]
    expected: dict[str, Any]


def load(path: Path) -> Recording:
    """Read one file."""
    told = json.loads(path.read_text(encoding="utf-8"))
    ranks = [{**told["env"], **own} for own in told["ranks"]]
    return Recording(name=path.stem, about=told["about"], ranks=ranks, expected=told["expected"])
