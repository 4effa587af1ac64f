"""Which thread of a rank tells what the rank does: the main one, unless that only waits for another of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise.evidence.reader.notes import Frame, Stack
    from rankwise.evidence.reader.scene import Evidence

MAIN = "MainThread"
#: Waits of one thread for the end of another, or for what it will bring; RPC's shutdown while other threads serve
#: calls.
_JOINS = (
    ("/threading.py", {"join", "_wait_for_tstate_lock", "_shutdown"}),
    ("/concurrent/futures/_base.py", {"result", "exception", "wait"}),
    ("/concurrent/futures/thread.py", {"shutdown", "_python_exit"}),
    ("/torch/distributed/rpc/api.py", {"_all_gather"}),
)
_WAITS = "/threading.py"
COLLECTIVES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")
#: Parts of torch.distributed with threads that wait for work as long as it takes.
APART = ("/torch/distributed/rpc/", "/torch/distributed/elastic/", "/torch/distributed/checkpoint/")
#: What lies between a function of torch.distributed and C++: our recording, and torch's own.
_BETWEEN = ("/rankwise/evidence/", "/torch/_ops.py", "/torch/_library/", "/torch/utils/_contextlib.py")


def choose_stack(evidence: Evidence) -> Stack | None:
    """Return the stack that tells what a rank does: the main thread's, as a rule.

    A main thread that waits for another thread of its own tells nothing. Then it is the one that stands in a
    collective, if the records have one that is not over; or the only other one that runs the user's code.
    """
    main = evidence.stacks.get(MAIN)
    if main is None or not _is_joining(main):
        return main
    others = [stack for name, stack in evidence.stacks.items() if name != MAIN and _runs_users(stack)]
    in_collectives = find_collectives(evidence)
    if in_collectives:
        return in_collectives[0]
    return others[0] if len(others) == 1 else main


def find_collectives(evidence: Evidence) -> list[Stack]:
    """Return the stacks of threads beside the main one that wait in a collective which the records have as not over."""
    if not any(op.is_over is False for op in evidence.ops):
        return []
    return [
        stack
        for name, stack in evidence.stacks.items()
        if name != MAIN and _runs_users(stack) and _is_in_collective(stack)
    ]


def has_others_at_work(evidence: Evidence | None) -> bool:
    """Tell whether threads beside the main one run the user's code: one of them may do what other ranks wait for."""
    stacks = evidence.stacks if evidence is not None else {}
    return any(name != MAIN and _runs_users(stack) for name, stack in stacks.items())


def _is_joining(stack: Stack) -> bool:
    for frame in stack.frames:
        if frame.is_users:
            return False
        if any(frame.file.endswith(file) and frame.function in functions for file, functions in _JOINS):
            return True
        if not frame.file.endswith(_WAITS):  # a join is built of other waits of that module
            return False
    return False


def _is_in_collective(stack: Stack) -> bool:
    at = next((frame for frame in stack.frames if not _is_between(frame)), None)
    if at is None or any(part in at.file for part in APART):
        return False
    return any(part in at.file for part in COLLECTIVES)


def _is_between(frame: Frame) -> bool:
    return any(part in frame.file for part in _BETWEEN)


def _runs_users(stack: Stack) -> bool:
    return any(frame.is_users for frame in stack.frames)
