"""Where the processes stand that a rank has started and waits for: asked by py-spy, as they record nothing and hold nothing of ours."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.evidence.reader import pyspy
from rankwise.evidence.reader.notes import Stack
from rankwise.evidence.reader.scene import STILL_S, Evidence
from rankwise.evidence.reader.thread_choice import MAIN, choose_stack

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from rankwise.evidence.reader.notes import Frame
    from rankwise.evidence.reader.pyspy import SpyDump
    from rankwise.evidence.reader.scene import Child, RankFacts, Scene

_TORCH_DATA = "/torch/utils/data/"
#: torch's functions that wait for a worker's batch.
_WAITS = frozenset({"_try_get_data", "_get_data"})
#: Dead, or stopped: py-spy would have to wake those.
_UNSEEN = frozenset({"Z", "X", "T", "t"})
_MOST, _AT_ONCE = 32, 8


def wait_for_batch(frames: Iterable[Frame]) -> bool:
    """Tell whether these frames wait for a batch of a DataLoader's worker."""
    return any(frame.function in _WAITS and _TORCH_DATA in frame.file for frame in frames)


def with_stacks(scene: Scene) -> Scene:
    """Return a scene in which the processes that ranks wait for have their stacks, as far as py-spy may see them."""
    return put_stacks(scene, take_stacks(list_asked(scene, idle_s=STILL_S)))


def list_asked(scene: Scene, *, idle_s: float) -> list[int]:
    """Return the processes that tell what ranks wait for which have, as have all their processes, used no CPU time for so long; workers of a DataLoader at once."""
    asked = (pid for facts in scene.ranks if facts.state == "running" for pid in _list_of_rank(facts, idle_s))
    return list(itertools.islice(asked, _MOST))


def _list_of_rank(facts: RankFacts, idle_s: float) -> Iterator[int]:
    seen = [child for child in facts.children if child.state not in _UNSEEN]
    is_loading = facts.stack is not None and wait_for_batch(facts.stack.frames)
    is_idle = facts.still_s > idle_s and (facts.stack is None or facts.stack.op is None)
    if is_idle and not is_loading and not _has_threads(facts):
        yield facts.pid
    if is_loading or (is_idle and all(child.still_s > idle_s for child in seen)):
        yield from (child.pid for child in seen)


def take_stacks(pids: Collection[int]) -> dict[int, SpyDump | str]:
    """Ask processes; one that can't be read gives the reason."""
    if not pids:
        return {}
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - heavy, and the launcher starts light

    with ThreadPoolExecutor(min(len(pids), _AT_ONCE)) as pool:
        return dict(zip(pids, pool.map(lambda pid: pyspy.take(pid, pauses=False), pids), strict=True))


def put_stacks(scene: Scene, dumps: Mapping[int, SpyDump | str]) -> Scene:
    """Return a scene with the stacks of these processes; a rank's own is taken where it has not answered itself."""
    if not dumps:
        return scene
    ranks = (
        replace(_with_threads(facts, dumps), children=tuple(_with_stack(one, dumps) for one in facts.children))
        for facts in scene.ranks
    )
    return replace(scene, ranks=tuple(ranks))


def _with_threads(facts: RankFacts, dumps: Mapping[int, SpyDump | str]) -> RankFacts:
    dump = dumps.get(facts.pid)
    if dump is None or isinstance(dump, str) or _has_threads(facts):
        return facts
    evidence = replace(facts.evidence or Evidence(), stacks=_name_threads(dump))
    return replace(facts, evidence=evidence, stack=choose_stack(evidence) or dump.stack)


def _has_threads(facts: RankFacts) -> bool:
    return facts.evidence is not None and bool(facts.evidence.stacks)


def _with_stack(child: Child, dumps: Mapping[int, SpyDump | str]) -> Child:
    dump = dumps.get(child.pid)
    if dump is None or isinstance(dump, str):
        return child
    stack = choose_stack(Evidence(stacks=_name_threads(dump))) or dump.stack
    return replace(child, stack=_without_parent(stack))


def _name_threads(dump: SpyDump) -> dict[str, Stack]:
    first, *others = dump.threads
    named = ((thread.name or f"thread {number}", thread.stack) for number, thread in enumerate(others, 2))
    return {MAIN: first.stack, **dict(named)}


def _without_parent(stack: Stack) -> Stack:
    """Leave out the lines at which a process was forked: below those of multiprocessing they are its parent's."""
    begins = {frame for frame in stack.frames if (frame.function, frame.file[-11:]) == ("_bootstrap", "/process.py")}
    return Stack(frames=tuple(itertools.takewhile(lambda frame: frame not in begins, stack.frames)))
