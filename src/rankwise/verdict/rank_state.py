"""Where one rank stands: in a collective, in a wait for others, or somewhere else, and what it does there.

Only a stack tells that a rank waits. That a collective was entered and is not over does not: it may be in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, final

from rankwise.evidence.in_rank.pipeline_stages import read_flow
from rankwise.evidence.reader.notes import is_librarys
from rankwise.evidence.reader.scene import STILL_S, Op
from rankwise.evidence.reader.thread_choice import APART, COLLECTIVES
from rankwise.verdict.group_sequences import KNOWN_NAMES, UNNUMBERED, find_family, list_families

if TYPE_CHECKING:
    from rankwise.evidence.reader.notes import Frame, Stack
    from rankwise.evidence.reader.scene import RankFacts
    from rankwise.verdict.finding import Doing

#: What kind of wait a stack shows.
Wait = Literal["call", "handle", "backward", "rendezvous", "device", "library"]

_BACKWARD = frozenset({"_engine_run_backward"})
_RENDEZVOUS = frozenset({
    "init_process_group", "new_group", "_new_group_with_tag", "new_subgroups", "split_group", "_store_based_barrier",
    "_new_process_group_helper", "_env_rendezvous_handler", "_create_c10d_store",
})  # fmt: skip
_HANDLES = frozenset({"wait", "wait_tensor", "_wait_tensor", "synchronize"})
#: Functions of torch that need a result of the GPU, and so wait for the collectives before it.
_DEVICE_CALLS = ("/torch/cuda/", "/torch/optim/", "/torch/nn/utils/clip_grad.py", "/torch/_tensor.py")
#: Python frames that lie between a function of torch.distributed and C++.
_DISPATCH = ("/torch/_ops.py", "/torch/_library/", "/torch/_higher_order_ops/", "/torch/utils/_contextlib.py")
_COMPILERS = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/_aot_autograd/", "/triton/")
_LOADERS = ("/torch/utils/data/", "/torchdata/", "/rankwise/data/")
_SAVERS = (
    "/torch/serialization.py", "/torch/distributed/checkpoint/", "/rankwise/checkpoint/", "/safetensors/",
)  # fmt: skip
#: Below this share of one core a process does nothing to speak of.
_IDLE_SHARE = 0.1
_BUSY_SHARE = 0.5
#: Stacks that are longer may have been cut, so that their beginning does not tell.
_DEEPEST_EXIT = 24


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """Where one rank stands.

    Attributes:
        wait: What kind of wait its stack shows; None if it waits for no other rank, or that is not known.
        doing: What it does.
        where: ``file.py:LINE`` of the innermost line of the user's own.
        ops: What it may be waiting for, the likeliest first: entered, and not over.
        call: The function of torch that it waits in, by the name that users know; None if it has none.
    """

    rank: int
    wait: Wait | None
    doing: Doing
    where: str | None
    ops: tuple[Op, ...] = ()
    call: str | None = None

    @property
    def op(self) -> Op | None:
        """What it most likely waits for; None if nothing recorded fits."""
        return self.ops[0] if self.ops else None

    @property
    def site(self) -> str | None:
        """The line that the wait was entered from."""
        return (self.op.site if self.op else None) or self.where


def find_state(facts: RankFacts) -> RankState:
    """Return where a rank stands, as far as its facts show it."""
    wait = None if facts.state in {"ended", "stopped", "not started"} else _find_wait(facts)
    where = facts.stack.where if facts.stack and not _is_exit(facts.stack) else None
    if where is None and facts.fault is not None:
        where = facts.fault.where
    ops = _with_module(_find_open(facts, wait), facts.stack) if wait else ()
    call = _find_call(facts.stack, wait) if facts.stack and wait else None
    return RankState(rank=facts.rank, wait=wait, doing=_find_doing(facts, wait), where=where, ops=ops, call=call)


def is_at_exit(stack: Stack) -> bool:
    """Tell whether the script is over, and what it had registered for its exit runs: where a stack was cut is not seen."""
    return stack.is_farewell and len(stack.frames) <= _DEEPEST_EXIT and stack.op is None


def _is_exit(stack: Stack) -> bool:
    """Tell whether what runs at the exit is none of the user's: its line would be torch's."""
    return stack.is_farewell and not any(frame.is_users for frame in stack.frames)


def _find_call(stack: Stack, wait: Wait) -> str | None:
    if wait == "backward":
        return "backward"
    known = [frame.function for frame in list_calls(stack) if frame.function in KNOWN_NAMES | _RENDEZVOUS]
    # The outermost one is what the user called.
    return stack.library_call or (known[-1] if known else None)


def list_calls(stack: Stack) -> list[Frame]:
    """Return the frames between the innermost line of the user's own and what runs now, innermost first, without those of our recording."""
    return [frame for frame in stack.below_user if "/rankwise/evidence/" not in frame.file]


def _find_wait(facts: RankFacts) -> Wait | None:
    stack = facts.stack
    inside = list_calls(stack) if stack is not None else []
    if facts.reads_terminal or stack is None:
        return None
    if not inside or is_librarys(inside[0]) or stack.library_wait is not None:
        return _find_library_wait(stack) or _find_device_wait(facts)
    names = {frame.function for frame in inside}
    at = next((frame for frame in inside if not any(part in frame.file for part in _DISPATCH)), inside[0])
    if inside[0].function in _BACKWARD or at.function in _BACKWARD:
        return "backward" if _has_stopped(facts) else None
    if any(part in at.file for part in _DEVICE_CALLS):
        return _find_device_wait(facts)
    if not any(part in at.file for part in COLLECTIVES) or any(part in at.file for part in APART):
        return None
    return "rendezvous" if names & _RENDEZVOUS else "handle" if at.function in _HANDLES else "call"


def _find_library_wait(stack: Stack) -> Wait | None:
    """Return the wait of a rank in rankwise's library, or in a line of the user's own that waits for a Work."""
    if stack.library_wait is not None:
        return "rendezvous" if stack.library_wait == "rendezvous" else "library"
    return "handle" if stack.is_in_work else None


def _find_device_wait(facts: RankFacts) -> Wait | None:
    """NCCL gives its collectives to the device and goes on: the wait is at the next line that needs a result."""
    evidence = facts.evidence
    if evidence is None or not facts.stack or not facts.stack.frames or facts.reads_terminal:
        return None
    nccl = {name for name, group in evidence.groups.items() if group.backend == "nccl"}
    is_open = any(op.group in nccl and op.is_over is False for op in evidence.ops)
    return "device" if is_open and facts.still_s >= STILL_S else None


def _has_stopped(facts: RankFacts) -> bool:
    """Tell a backward pass that waits for others from one that computes."""
    return facts.still_s >= STILL_S or (facts.cpu_share is not None and facts.cpu_share < _IDLE_SHARE)


def _find_open(facts: RankFacts, wait: Wait) -> tuple[Op, ...]:
    ops = [op for op in facts.ops if op.name not in UNNUMBERED]
    if wait == "rendezvous" or facts.stack is None:
        return ()
    # What is not known to be over counts only as the last thing that the rank did.
    found = [op for op in ops if op.is_over is False or (op.is_over is None and op is ops[-1])]
    if wait == "backward":
        found = [op for op in found if op.source == "native"]
    if wait == "library":
        return tuple(reversed([op for op in found if op.library_call is not None]))[:1] or _find_turn(facts.stack)
    if wait in {"call", "handle"} and read_flow(facts.stack.module) is not None:
        # Of all that a schedule has under way, this one is waited for.
        return tuple(op for op in reversed(found) if op.module == facts.stack.module)[:1]
    if wait == "call":
        found = _fitting(found, facts.stack)
    return tuple(found if wait == "device" else reversed(found))


def _find_turn(stack: Stack) -> tuple[Op, ...]:
    """Return the wait for the first rank's block: it is at the store, and so in no record."""
    call = stack.library_call
    if call is None or stack.library_wait != "turn":
        return ()
    return (Op(group="", seq=0, name=call, site=stack.where, inside=(call,), is_over=False),)


def _fitting(found: list[Op], stack: Stack) -> list[Op]:
    """Return those that the call on the stack can be: an older one may still be in flight."""
    inside = list_calls(stack)
    named = {frame.function for frame in inside}
    if inside and "/torch/nn/parallel/" in inside[0].file:
        return [op for op in found if op.source == "native"]
    # torch has several names for one: all_gather_into_tensor is all_gather_single since 2.13.
    families = list_families(named)
    fitting = [op for op in found if op.name in named or find_family(op) in families]
    return fitting if fitting or named & KNOWN_NAMES else found


def _with_module(ops: tuple[Op, ...], stack: Stack | None) -> tuple[Op, ...]:
    """Return what a rank may be waiting for, the first of it with the module that runs, if it was called from that very line."""
    if stack is None or stack.module is None:
        return ops
    if not ops or ops[0].module is not None or ops[0].site != stack.where:
        return ops
    return (replace(ops[0], module=stack.module), *ops[1:])


def _find_doing(facts: RankFacts, wait: Wait | None) -> Doing:
    sure: tuple[tuple[bool, Doing], ...] = (
        (facts.state == "ended", "ended"),
        (facts.reads_terminal, "debugged"),
        (facts.state == "stopped", "stopped"),
        (wait is not None, "in a collective"),
    )
    for holds, doing in sure:
        if holds:
            return doing
    files = [frame.file for frame in list_calls(facts.stack)] if facts.stack else []
    doings: tuple[tuple[tuple[str, ...], Doing], ...] = (
        (_COMPILERS, "compiling"),
        (_SAVERS, "saving"),
        (_LOADERS, "loading data"),
    )
    for parts, doing in doings:
        if any(part in file for file in files for part in parts):
            return doing
    share = _IDLE_SHARE if facts.cpu_share is None else facts.cpu_share
    if share >= _BUSY_SHARE:
        return "busy"
    return "asleep" if share < _IDLE_SHARE and facts.still_s >= STILL_S else "unknown"
