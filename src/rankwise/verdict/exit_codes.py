"""What an exit code or a signal tells, with what the host knows of it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from rankwise.base.requeue import REQUEUE

if TYPE_CHECKING:
    from rankwise.verdict.case import Case, RankEnd

_ABORT_AT_EXIT = "terminate called without an active exception"


def name_signal(number: int) -> str:
    """Return ``SIGKILL`` for 9; ``signal 77`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_LOST_WORDS = "its message is not known here: see its stderr"


def explain_exit(code: int, case: Case, end: RankEnd) -> str:
    """Say in a clause what an end means."""
    if code >= 0:
        killed = f"; meanwhile the kernel killed {case.oom_kills} of this job's processes for lack of memory"
        return _explain_code(code, end) + (killed if case.oom_kills else "")
    name = name_signal(-code)
    reasons = {
        "SIGKILL": _explain_kill(case),
        "SIGBUS": _explain_bus(case),
        "SIGSEGV": "a crash in native code: a library of another build, a bad extension, or a stack overflow",
        "SIGABRT": f"native code aborted: {_LOST_WORDS if is_wordless_abort(end) else 'the last lines of its stderr say why'}",
        "SIGTERM": "rankwise did not send it: a scheduler, a person, another program or the script itself did",
        "SIGINT": "interrupted from outside the job",
        "SIGHUP": "its terminal was closed",
        "SIGILL": "an instruction that this CPU lacks: a library built for another CPU",
        "SIGFPE": "a division by zero in native code",
        "SIGPIPE": "it wrote to a pipe whose reader was gone",
        "SIGXCPU": "it exceeded its CPU time limit",
    }
    reason = reasons.get(name, "")
    return f"killed by {name} ({-code})" + (f": {reason}" if reason else "")


def _explain_code(code: int, end: RankEnd) -> str:
    if code == 2 and "error: " in end.last_words and "usage: " in end.last_words:
        return "exit code 2: the script's own argument parser rejected its arguments"
    if code == 0:
        return "exit code 0"
    if code == REQUEUE:
        return f"exit code {code}, but not announced as a requeue: call ctx.leave_for_requeue() for that"
    shells = {126: ": found, but not executable", 127: ": command not found"}
    if code in shells:
        return f"exit code {code}{shells[code]}"
    if 128 < code < 160:
        return f"exit code {code}: a shell's code for a program killed by {name_signal(code - 128)}"
    return f"exit code {code}"


def _explain_kill(case: Case) -> str:
    if case.oom_kills:
        return (
            f"the kernel ran out of memory for this job (oom_kill count went up by {case.oom_kills}): "
            "less memory per rank, fewer loader workers, or a larger limit"
        )
    return "no OOM kill was counted for this job: SIGKILL (-9) probably came from a scheduler, a supervisor or a person, if not from the script"


def _explain_bus(case: Case) -> str:
    if case.shm_free_bytes is not None and case.shm_free_bytes < 64 << 20:
        return (
            f"/dev/shm is full ({case.shm_free_bytes >> 20} MiB free), and data-loading workers pass batches through it"
        )
    return "usually a full /dev/shm, or a truncated memory-mapped file"


def is_wordless_abort(end: RankEnd) -> bool:
    """Tell whether native code ended a rank, and nothing that it wrote is known."""
    return end.code == -6 and end.fault is None and not end.last_words.strip()


def is_abort_at_exit(end: RankEnd) -> bool:
    """Tell whether torch aborted a process that had done its work.

    torch 2.9 to 2.13 with Gloo: a thread drops its last work while the interpreter goes down (pytorch#190489).
    A rank that ended by sys.exit(N) was through as well, and the abort hides its N: nothing in Python keeps it.
    """
    return (
        end.code == -6
        and end.finished_s is not None
        and end.fault is None
        # With faulthandler on its standard error (torch's @record switches it on) its stack stands behind that.
        and end.last_words.partition("Fatal Python error: Aborted")[0].rstrip().endswith(_ABORT_AT_EXIT)
    )
