"""A rank waits for batches of DataLoader workers that are all dead or stopped (R3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.evidence.reader.own_processes import wait_for_batch
from rankwise.verdict.finding import JobFinding
from rankwise.verdict.rank_state import list_calls
from rankwise.verdict.wording import shorten, verb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.evidence.reader.scene import Child, RankFacts
    from rankwise.verdict.scene_view import SceneView

RULE = "dead_worker"
#: A batch that a worker left behind when it died is read at once; after this nothing comes.
_STILL_S = 3.0
#: What the kernel calls torch's workers.
_WORKER = "pt_data_worker"


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it."""
    for facts in view.scene.ranks:
        states = {child.state for child in facts.children}
        stopped = [child for child in facts.children if child.state in {"T", "t"} and child.name == _WORKER]
        is_all = bool(states) and not states - {"Z", "X", "T", "t"}
        # Batches come in the workers' turn: one that is stopped keeps back those of the others.
        if not _waits_for_worker(facts) or not (is_all or (stopped and not states & {"R", "D"})):
            continue
        where = facts.stack.where if facts.stack else None
        is_dead = is_all and not states & {"T", "t"}
        waiting = [view.rank_states[rank] for rank, awaited in view.awaited.items() if facts.rank in awaited]
        others = [one.rank for one in waiting]
        text = f"; {name_ranks(others)} {verb(others, 'wait')} for it" if others else ""
        yield JobFinding(
            kind="hang", certainty="proof", rule=RULE, culprits=(facts.rank,), class_id="R3" if is_dead else None,
            where=where, waiting=view.list_waiting(waiting), is_stuck=is_dead, doing="loading data",
            key=f"dead worker of rank {facts.rank}", since_s=view.scene.now_s - facts.still_s,
            message=f"rank {facts.rank} waits at {shorten(where)} for a batch, and "
            f"{_describe_workers(facts, stopped, is_all=is_all, is_dead=is_dead)}{text}",
            fix="find what killed them (usually lack of memory): use fewer workers or smaller batches"
            if is_dead else "resume the stopped workers with `kill -CONT`",
        )  # fmt: skip


def _describe_workers(facts: RankFacts, stopped: Sequence[Child], *, is_all: bool, is_dead: bool) -> str:
    if is_all:
        return f"all its {len(facts.children)} data-loading workers are {'dead' if is_dead else 'stopped or dead'}"
    pids = ", ".join(str(child.pid) for child in stopped)
    return f"{len(stopped)} of its data-loading workers {'is' if len(stopped) == 1 else 'are'} stopped by a signal (SIGSTOP): PID {pids}"


def _waits_for_worker(facts: RankFacts) -> bool:
    if facts.stack is None or facts.state != "running" or facts.still_s < _STILL_S:
        return False
    return wait_for_batch(list_calls(facts.stack))
