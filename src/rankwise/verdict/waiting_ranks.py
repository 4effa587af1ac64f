"""Where the ranks that are not to blame stood when the first one left: by their stacks, or by where they noticed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.evidence.in_rank.pipeline_stages import read_flow
from rankwise.evidence.reader.notes import parse_traceback
from rankwise.verdict.error_origin import find_blame
from rankwise.verdict.finding import Waiting
from rankwise.verdict.rank_state import is_at_exit
from rankwise.verdict.wording import name_briefly

if TYPE_CHECKING:
    from collections.abc import Collection

    from rankwise.base.faults import FaultRecord
    from rankwise.evidence.reader.notes import Stack
    from rankwise.verdict.case import Case, RankEnd


def list_waiting(case: Case, blamed: Collection[int]) -> tuple[Waiting, ...]:
    """Return who waited, and where."""
    waiting = []
    for end in case.ranks:
        if end.rank in blamed:
            continue
        stack = _waiting_stack(end)
        if stack is not None:
            waiting.append(Waiting(rank=end.rank, where=stack.where, op=_name_op(case, end.rank, stack)))
    return tuple(waiting)


def _name_op(case: Case, rank: int, stack: Stack) -> str | None:
    """Return what a rank waited in: with the module for which FSDP made it, or that ran, where that is known."""
    ops, inside = case.list_ops(rank), {frame.function for frame in stack.frames}
    # What C++ issued is over, by its own word, once it has failed, though the rank may still stand in it.
    last = next(
        (
            op
            for op in reversed(ops)
            if op.is_over is False
            or op.has_raised
            or op.source == "native"
            or (op.inside and op.module == stack.module and inside.issuperset(op.inside))
        ),
        None,
    )
    if stack.op == "wait_tensor" and last is not None:
        return name_briefly(last)
    if stack.op is None or last is None or last.site != stack.where:
        return stack.op
    if read_flow(stack.module) is not None:
        last = next((op for op in reversed(ops) if op.module == stack.module), last)
    module = last.module or stack.module
    return stack.op if module is None else name_briefly(replace(last, module=module))


def _waiting_stack(end: RankEnd) -> Stack | None:
    """Return where a rank stood when the first one left: its stack, or where it noticed."""
    if end.stopped_s is not None and end.left_s is None:
        # What it did after we had told it to stop says nothing of what it did before. A rank that was through
        # even then was on its way out, and waited for nobody.
        was_through = end.finished_s is not None and end.finished_s < end.stopped_s
        return None if was_through else _before_farewell(end)
    if end.fault is None:
        return end.stack if end.finished_s is None else None
    return _stack_of(end.fault) if find_blame(end) in {"peer", "timeout"} else None


def _before_farewell(end: RankEnd) -> Stack | None:
    """Return where a rank stood; of one whose script is over, and that is at its atexit functions, where its error came from."""
    if end.stack is None or not is_at_exit(end.stack):
        return end.stack
    return _stack_of(end.fault) if end.fault is not None else None


def _stack_of(fault: FaultRecord) -> Stack | None:
    """Return where an exception was raised, with the module that it came through."""
    stack = parse_traceback(fault.callstack)
    return None if stack is None else replace(stack, module=fault.module)
