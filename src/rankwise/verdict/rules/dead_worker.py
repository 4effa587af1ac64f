"""A rank waits for batches of DataLoader workers that are all dead or stopped (R3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.case import name_ranks
from rankwise.verdict.sight import Sight
from rankwise.verdict.standing import list_calls
from rankwise.verdict.words import shorten, verb

if TYPE_CHECKING:
    from rankwise.evidence.facts import RankFacts
    from rankwise.verdict.view import View

RULE = "dead_worker"
#: torch's functions that wait for a worker's batch.
_WAITS = frozenset({"_try_get_data", "_get_data"})
#: A batch that a worker left behind when it died is read at once; after this nothing comes.
_STILL_S = 3.0


def find(view: View) -> tuple[Sight, ...]:
    """Return the sights of it."""
    sights = []
    for facts in view.scene.ranks:
        states = {child.state for child in facts.children}
        if not _waits_for_worker(facts) or not states or states - {"Z", "X", "T", "t"}:
            continue
        where = facts.stack.where if facts.stack else None
        is_dead = not states & {"T", "t"}
        waiting = [view.standings[rank] for rank, awaited in view.awaited.items() if facts.rank in awaited]
        others = [one.rank for one in waiting]
        told = f"; {name_ranks(others)} {verb(others, 'wait')} for it" if others else ""
        sights.append(
            Sight(
                kind="hang", certainty="proof", rule=RULE, culprits=(facts.rank,), class_id="R3" if is_dead else None,
                where=where, waiting=view.list_waiting(waiting), is_stuck=is_dead, doing="loading data",
                key=f"dead worker of rank {facts.rank}", since_s=view.scene.now_s - facts.still_s,
                message=f"rank {facts.rank} waits at {shorten(where)} for a batch, and all its {len(facts.children)} data-loading workers are "
                f"{'dead' if is_dead else 'stopped or dead'}{told}",
                fix="find what killed them (mostly a lack of memory): fewer workers or smaller batches"
                if is_dead else "let the stopped workers go on with `kill -CONT`",
            )
        )  # fmt: skip
    return tuple(sights)


def _waits_for_worker(facts: RankFacts) -> bool:
    if facts.stack is None or facts.state != "running" or facts.still_s < _STILL_S:
        return False
    return any(
        frame.function in _WAITS and "/torch/utils/data/" in frame.file for frame in list_calls(facts.stack)
    )
