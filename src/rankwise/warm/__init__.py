"""Becoming a rank: the hook that stands in every rank before the script's first line.

A rank is started as the plain command that the user gave; the folder ``hook`` is put in front of its
PYTHONPATH, so that Python imports our ``sitecustomize`` in its `site` phase. Nothing is written anywhere.
"""

from __future__ import annotations

from pathlib import Path

HOOK_FOLDER = Path(__file__).parent / "hook"
