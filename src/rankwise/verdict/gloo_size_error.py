"""What a rank that Gloo aborted for the size of what came has met: a message of another size, or a state that only some ranks gather."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.evidence.reader.notes import parse_traceback
from rankwise.verdict.finding import JobFinding, Waiting
from rankwise.verdict.rules.state_on_some import is_gathering
from rankwise.verdict.split_mismatch import find_message_mismatch
from rankwise.verdict.wording import name_tensors, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.evidence.reader.notes import Stack
    from rankwise.verdict.case import Case, RankEnd

_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")


def find_size_error(case: Case, left: Sequence[RankEnd]) -> JobFinding | None:
    """Return the finding of it; None if no rank was aborted so, or nothing tells what it met."""
    for end in left:
        sizes = _SIZES.search(end.error)
        if sizes is not None:
            found = _find_message(case, end.rank, int(sizes[1]), int(sizes[2])) or _find_state(case)
            if found is not None:
                return found
    return None


def _find_message(case: Case, rank: int, given_bytes: int, expected_bytes: int) -> JobFinding | None:
    pair = case.scene and find_message_mismatch(case.scene, rank, given_bytes, expected_bytes)
    if pair is None:
        return None
    giver, sent, awaited = pair
    places = dict.fromkeys(shorten(op.site) for op in (sent, awaited))
    return JobFinding(
        kind="mismatch",
        certainty="proof",
        rule="other_splits",
        culprits=tuple(sorted((giver, rank))),
        class_id="C5",
        where=sent.site,
        message=f"rank {giver} sends rank {rank} a message of {name_tensors(sent)} ({given_bytes} bytes) at {shorten(sent.site)}, "
        f"but rank {rank} expects {name_tensors(awaited)} ({expected_bytes} bytes) at {shorten(awaited.site)}",
        fix=f"make both sides of the message the same size, at {' and '.join(places)}: where only the sender knows it, send the size first",
        key=f"message {giver} {rank} {given_bytes} {expected_bytes}",
        doing="in a collective",
    )


def _find_state(case: Case) -> JobFinding | None:
    """Return the finding of ranks that gather a state, beside others that are known to do something else."""
    stacks = {end.rank: _stack_of(end) for end in case.ranks}
    by_rank = {rank: stack for rank, stack in stacks.items() if stack is not None}
    gathering = tuple(sorted(rank for rank, stack in by_rank.items() if is_gathering(stack)))
    if not gathering or len(gathering) == len(case.ranks) or len(by_rank) < len(case.ranks):
        return None
    others = [rank for rank in by_rank if rank not in gathering]
    where, away = by_rank[gathering[0]].where, by_rank[others[0]].where
    return JobFinding(
        kind="mismatch",
        certainty="proof",
        rule="state_on_some",
        culprits=gathering,
        class_id="D28",
        where=where,
        waiting=tuple(Waiting(rank=rank, where=by_rank[rank].where, op=None) for rank in others),
        message=f"{name_ranks(gathering)} gathered the state of a sharded model at {shorten(where)} while {name_ranks(others)} did not: "
        f"{name_ranks(others[:1])} was at {shorten(away)}",
        fix=f"call it on all ranks at {shorten(where)}, and write the file on one rank only",
        key=f"state {name_ranks(gathering)}",
        doing="in a collective",
    )


def _stack_of(end: RankEnd) -> Stack | None:
    if end.crash is not None:
        return end.crash
    return parse_traceback(end.fault.callstack) if end.fault is not None else end.stack
