"""Where the DataLoader workers stand that a rank waits for: asked by py-spy, as they record nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.evidence.reader import pyspy
from rankwise.evidence.reader.notes import Stack

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwise.evidence.reader.notes import Frame
    from rankwise.evidence.reader.scene import Scene

_TORCH_DATA = "/torch/utils/data/"
#: torch's functions that wait for a worker's batch.
_WAITS = frozenset({"_try_get_data", "_get_data"})
#: Dead, or stopped: py-spy would have to wake those.
_UNSEEN = frozenset({"Z", "X", "T", "t"})
_MOST = 8


def wait_for_batch(frames: Iterable[Frame]) -> bool:
    """Tell whether these frames wait for a batch of a DataLoader's worker."""
    return any(frame.function in _WAITS and _TORCH_DATA in frame.file for frame in frames)


def with_places(scene: Scene) -> Scene:
    """Return a scene in which the workers that ranks wait for have their places, as far as py-spy may see them."""
    asked = [
        child.pid
        for facts in scene.ranks
        if facts.stack is not None and wait_for_batch(facts.stack.frames)
        for child in facts.children
        if child.state not in _UNSEEN
    ][:_MOST]
    if not asked:
        return scene
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - heavy, and the launcher starts light

    with ThreadPoolExecutor(len(asked)) as pool:
        places = dict(zip(asked, pool.map(_find_place, asked), strict=True))
    ranks = (
        replace(facts, children=tuple(replace(one, where=places.get(one.pid, "")) for one in facts.children))
        for facts in scene.ranks
    )
    return replace(scene, ranks=tuple(ranks))


def _find_place(pid: int) -> str:
    dump = pyspy.take(pid)
    return "" if isinstance(dump, str) else find_place(dump.stack)


def find_place(stack: Stack) -> str:
    """Return ``file.py:LINE`` where a worker reads a sample; empty if it waits for something to do, or is no worker."""
    for number, frame in enumerate(stack.frames):
        # Below it stand the lines of the rank that has forked it.
        if frame.function == "fetch" and _TORCH_DATA in frame.file:
            return Stack(frames=stack.frames[:number]).where or ""
    return ""
