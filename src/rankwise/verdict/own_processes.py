"""What a rank's own threads and processes do for which it waits: which of them does not come, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from rankwise.evidence.reader.scene import STILL_S, RankFacts
from rankwise.evidence.reader.thread_choice import MAIN
from rankwise.verdict.local_wait import LocalWait, find_local_wait
from rankwise.verdict.wording import join_clauses, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rankwise.evidence.reader.notes import Stack
    from rankwise.evidence.reader.scene import Scene

#: multiprocessing's processes that wait for as long as the rank lives.
_HELPERS = ("/multiprocessing/resource_tracker.py", "/multiprocessing/forkserver.py")
_DEAD, _STOPPED = frozenset({"Z", "X"}), frozenset({"T", "t"})
_NOBODY_LEFT = (
    "what was to end this wait has ended itself: look for its error in the rank's output, and give the call a timeout"
)
_RENDEZVOUS = frozenset({"init_process_group", "init_rpc"})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """What one thread or process does, in words that go on after "process 4711 is"; and the function of torch.distributed that it waits in, if any."""

    who: str
    doing: str
    op: str | None = None
    advice: str = ""


def with_own(local_wait: LocalWait, facts: RankFacts, scene: Scene) -> LocalWait:
    """Return a wait with what the rank's own threads and processes do, if one of these may end it."""
    if not local_wait.is_own:
        return local_wait
    if _is_alone(facts):
        return replace(local_wait, own="it has no other thread and no process", advice=_NOBODY_LEFT)
    found = [*_list_threads(facts, scene.sources), *_list_processes(facts, scene.sources)]
    # Those that wait for the others come last.
    places = sorted(found, key=lambda place: place.op is not None)
    return replace(
        local_wait, own=join_clauses(_group_by_doing(places)), advice=_advise(places, scene) or local_wait.advice
    )


def _group_by_doing(places: Sequence[_Place]) -> list[str]:
    """Return what they do; processes that do the same, as a loader's workers, in one clause."""
    by_doing: dict[str, list[str]] = {}
    for place in places:
        by_doing.setdefault(place.doing, []).append(place.who)
    return [
        f"{who[0]} is {doing}" if len(who) == 1 else f"{join_clauses(who, most=2, mark=', ')} are {doing}"
        for doing, who in by_doing.items()
    ]


def _is_alone(facts: RankFacts) -> bool:
    threads = facts.evidence.stacks if facts.evidence is not None else {}
    return set(threads) == {MAIN} and not facts.children


def find_still(facts: RankFacts) -> float:
    """Return for how long neither a rank nor any of its processes has done anything."""
    living = (child for child in facts.children if child.state not in _DEAD | _STOPPED)
    return min([facts.still_s, *(child.still_s for child in living)])


def _list_threads(facts: RankFacts, sources: Mapping[str, str]) -> Iterator[_Place]:
    for name, stack in facts.evidence.stacks.items() if facts.evidence is not None else ():
        if name != MAIN and any(frame.is_users for frame in stack.frames):
            yield _find_place(f"thread {name}", stack, sources)


def _list_processes(facts: RankFacts, sources: Mapping[str, str]) -> Iterator[_Place]:
    for child in facts.children:
        who, frames = f"process {child.pid}", child.stack.frames if child.stack is not None else ()
        if child.state in _DEAD | _STOPPED:
            yield _Place(who=who, doing="dead" if child.state in _DEAD else "stopped by a signal (SIGSTOP)")
        elif child.stack is not None and not (frames and frames[0].file.endswith(_HELPERS)):
            yield _find_place(who, child.stack, sources)
        elif child.stack is None and "python" in child.name:  # of other programs less is known
            yield _Place(who=who, doing="idle" if child.still_s >= STILL_S else "at work")


def _find_place(who: str, stack: Stack, sources: Mapping[str, str]) -> _Place:
    own = next((frame for frame in stack.frames if frame.is_users), None)
    if own is None:  # a worker of a pool stands in the library's own loop
        return _Place(who=who, doing="waiting for something to do")
    at = shorten(str(own))
    if stack.op is not None:
        return _Place(who=who, doing=f"in {stack.op} from {at}", op=stack.op)
    wait = find_local_wait(RankFacts(rank=-1, stack=stack), sources)
    return _Place(who=who, doing=f"{wait.doing} at {at}" if wait else f"at {at}", advice=wait.advice if wait else "")


def _advise(places: Sequence[_Place], scene: Scene) -> str:
    """Return what to do about the first of these that does not come."""
    waiting = [place for place in places if place.op is not None]
    away = [place for place in places if place.op is None]
    if waiting and away:
        return f"find out why {away[0].who} does not reach {waiting[0].doing.removeprefix('in ')}, where {waiting[0].who} is"
    if waiting and scene.has_agent_store and {place.op for place in waiting} <= _RENDEZVOUS:
        return (
            "a script that starts its own ranks, by mp.spawn or the like, is started by `python`: below a launcher rank 0 of them serves no "
            "store; or let `rankwise run --nproc-per-node N` start them, without mp.spawn"
        )
    if waiting:
        return "compare these lines: each of them waits for what another one has to do"
    by_doing = {place.doing: place.who for place in reversed(away)}
    if "dead" in by_doing:
        return f"find out what ended {by_doing['dead']}: what the rank waits for does not come; look at `exitcode` while you wait"
    if "idle" in by_doing:
        return "to see at which lines they are, install py-spy, and let it read other processes (as root, or with --cap-add SYS_PTRACE)"
    return next((place.advice for place in places if place.advice), "")
