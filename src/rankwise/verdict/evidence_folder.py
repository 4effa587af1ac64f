"""The folder that holds what a verdict was judged from: written beside the logs, read on another day by ``rankwise report``."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import UsageError
from rankwise.base.files import read_regular, write_atomic
from rankwise.evidence.reader import scene_file
from rankwise.verdict import case_file
from rankwise.verdict.case import Case, end_of

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.evidence.reader.scene import Scene

_SCENE, _CASE = "scene.json", "case.json"
_WHICH = "pass the folder that the report names, with scene.json in it, or the folder of logs above it"
#: Of a thousand ranks it has some 50 MB.
_MOST_BYTES = 1 << 30


def save(folder: Path, *, scene: Scene, case: Case | None = None) -> None:
    """Write what is known: all ranks at one moment, and once the attempt is over how each ended.

    Raises:
        OSError: It can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / _SCENE, scene_file.to_json(scene))
    if case is not None:
        _write(folder / _CASE, case_file.to_json(case))


def is_saved(folder: Path) -> bool:
    """Tell whether there is anything in it."""
    return (folder / _SCENE).exists()


def find(folder: Path) -> Path:
    """Return the evidence folder itself, the last attempt's, given a folder of logs, of an attempt, or of evidence.

    Raises:
        UsageError: There is none in it, or no such folder.
    """
    if not folder.exists():
        raise UsageError(f"there is no file or folder {folder}", hint=_WHICH)
    attempts = sorted(folder.glob("attempt_*/evidence"), key=lambda path: int(path.parent.name.split("_")[1]))
    for path in (
        folder,
        folder / "evidence",
        *reversed(attempts),
        *sorted(folder.glob("*/attempt_*/evidence")),
    ):
        if is_saved(path):
            return path
    raise UsageError(f"{folder} holds no evidence of a job", hint=_WHICH)


def load(folder: Path) -> Case:
    """Return the case that was saved; of a job that was still running, with ranks that have not ended.

    Raises:
        UsageError: What is there can't be read.
    """
    try:
        scene = scene_file.from_json(_read(folder / _SCENE))
        if not (folder / _CASE).exists():
            ranks = tuple(end_of(facts, scene.now_s) for facts in scene.ranks)
            return Case(ranks=ranks, world_size=scene.world_size, scene=scene, hung=True)
        return replace(case_file.from_json(_read(folder / _CASE)), scene=scene)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the evidence in {folder} can't be read: {error}", hint="was it written by another version?"
        ) from error


def _write(path: Path, body: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(body, separators=(",", ":")) + "\n")


def _read(path: Path) -> dict[str, Any]:
    body = json.loads(read_regular(path, _MOST_BYTES))
    if not isinstance(body, dict):
        raise ValueError(f"{path.name} holds no object")  # noqa: TRY004 - of a file, not of a call
    return body
