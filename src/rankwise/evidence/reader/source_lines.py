"""Read the lines of the user's own files that stand in a scene, so that a verdict can tell a rank test from a finally."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.base.files import read_regular

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.evidence.reader.scene import Scene

_MOST_FILES = 32
_MOST_BYTES = 1 << 20


def with_sources(scene: Scene) -> Scene:
    """Return the scene with the text of the user's files, as far as they can be read here."""
    found: dict[str, str] = {}
    for path in dict.fromkeys(_list_files(scene)):
        if len(found) == _MOST_FILES:
            break
        try:
            found[path] = read_regular(path, _MOST_BYTES).decode("utf-8", "replace")
        except OSError:
            continue  # not a file, too large for one, or of another machine
    return replace(scene, sources=found)


def _list_files(scene: Scene) -> Iterator[str]:
    for facts in scene.ranks:
        threads = facts.evidence.stacks.values() if facts.evidence is not None else ()
        for stack in (facts.stack, *threads, *(child.stack for child in facts.children)):
            for frame in stack.frames if stack else ():
                if frame.is_users and frame.file.endswith(".py"):
                    yield frame.file
        for op in facts.ops[-32:]:
            path = (op.site or "").rpartition(":")[0]
            if path.endswith(".py"):
                yield path
