"""What has become of a job, in Slurm's own words: from its controller, and later from its accounting."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.errors import LaunchError, UsageError
from rankwise.base.requeue import REQUEUE
from rankwise.cluster.cluster import JobState, Phase
from rankwise.cluster.tools import run_tool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.cluster.handles import JobRecord

_WAITING = {
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
}
_RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING"}
#: Of the parts of an array, the phase that counts for all of them is the first that one has.
_ORDER: tuple[Phase, ...] = ("running", "waiting", "failed", "stopped", "cancelled", "succeeded")
_FIELD = re.compile(r"(?:^| )([A-Za-z][A-Za-z/:]*)=(.*?)(?= [A-Za-z][A-Za-z/:]*=|$)")
#: What Slurm's daemons on the nodes say of a job that they end: in its output, and often nowhere else.
_OWN_WORDS = re.compile(
    r"^(?: *\d+: )?(?:slurmstepd|srun)[^:]*: error: .*(?:oom.?kill|out of memory|memory limit|node fail|due to )",
    re.I,
)
#: After such a line a log goes on with the next run.
RUN_ENDS = re.compile(r"^(?: *\d+: )?slurmstepd[^:]*: error: .* DUE TO (?:JOB REQUEUE|NODE FAILURE|PREEMPTION)")
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What Slurm says of a job, or of one index of an array."""

    state: str
    reason: str
    exit: str
    nodes: str
    starts: int

    @property
    def exit_code(self) -> int:
        """As a shell has it; 0 also where Slurm has none, as of a job whose node it has lost."""
        code, _, number = self.exit.partition(":")
        # Some of Slurm's own reasons have numbers there that no signal has.
        return 128 + int(number) if number.isdecimal() and 0 < int(number) < 65 else int(code or 0)

    @property
    def phase(self) -> Phase:
        """Where it is."""
        if self.state in _WAITING:
            return "waiting"
        if self.state in _RUNNING:
            return "running"
        if self.state in {"CANCELLED", "REVOKED"}:
            return "cancelled"
        if self.state == "COMPLETED":
            return "succeeded"
        return "stopped" if self.state in {"FAILED", "PREEMPTED"} and self.exit_code == REQUEUE else "failed"


def find_state(record: JobRecord) -> JobState:
    """Return the state of a job that sbatch has taken."""
    parts = _ask_controller(record.native_id) or _ask_accounting(record.native_id)
    if not parts:
        return JobState(
            phase="unknown",
            reason=f"Slurm's controller has forgotten job {record.native_id}, and its accounting does not know it",
        )
    part = min(parts, key=lambda one: _ORDER.index(one.phase))
    if part.phase == "running":
        return JobState(phase="running", reason=f"{part.state} on {part.nodes}", starts=part.starts)
    if part.phase == "waiting":
        # A job that comes back after a failure of Slurm's waits for a moment: BeginTime alone would hide why.
        before = _ask_earlier_end(record.native_id) if part.starts else ""
        reason = f"{part.state} ({part.reason})" + (f", after {before}" if before else "")
        return JobState(phase="waiting", reason=reason, starts=part.starts)
    exit_code = {"succeeded": 0, "cancelled": None}.get(part.phase, part.exit_code or None)
    return JobState(phase=part.phase, exit_code=exit_code, reason=_explain(part, record), starts=part.starts)


def _ask_controller(native_id: str) -> list[_Part]:
    try:
        output = run_tool(["scontrol", "--oneliner", "show", "job", native_id], doing=f"ask for job {native_id}")
    except LaunchError as error:
        if "Invalid job id" in error.message:
            return []  # it is forgotten some minutes after its end
        raise
    found = []
    for line in output.splitlines():
        facts = dict(_FIELD.findall(line))
        if "JobState" in facts:
            restarts, phase = int(facts.get("Restarts", 0)), facts["JobState"]
            starts = restarts if phase == "PENDING" else restarts + 1
            found.append(
                _Part(
                    state=phase,
                    reason=facts.get("Reason", ""),
                    exit=facts.get("ExitCode", ""),
                    nodes=facts.get("NodeList", ""),
                    starts=starts,
                )
            )
    return found


def _ask_accounting(native_id: str) -> list[_Part]:
    lines = _run_sacct("--allocations", "--jobs", native_id, "--format", "State,Reason,ExitCode,NodeList")
    # "CANCELLED by 1000"
    return [
        _Part(state=state.split()[0], reason=reason, exit=code, nodes=nodes, starts=1)
        for state, reason, code, nodes in (line.split("|") for line in lines)
    ]


def _ask_earlier_end(native_id: str) -> str:
    """Return how the last run of a job that waits has ended; empty if nobody knows."""
    lines = _run_sacct("--allocations", "--duplicates", "--jobs", native_id, "--format", "State,NodeList")
    ends = [line.split("|") for line in lines if line.partition("|")[0] not in _WAITING | _RUNNING]
    if not ends:
        return ""
    state, nodes = ends[-1]
    return f"{state} on {nodes}" + (_ask_nodes(nodes) if state == "NODE_FAIL" else "")


def _run_sacct(*words: str) -> list[str]:
    """Return sacct's lines; none where there is no accounting."""
    with suppress(LaunchError, UsageError):
        return run_tool(["sacct", "--noheader", "--parsable2", *words], doing="ask Slurm's accounting").splitlines()
    return []


def _ask_nodes(nodes: str) -> str:
    """Return why nodes are not in order, as their administrator or Slurm says it."""
    with suppress(LaunchError):
        lines = run_tool(
            ["sinfo", "--noheader", "--Node", "--nodes", nodes, "--format", "%N: %T, %E"], doing="ask for the nodes"
        ).splitlines()
        found = dict.fromkeys(line.strip() for line in lines if not line.strip().endswith("none"))
        return f" ({'; '.join(found)})" if found else ""
    return ""


def _explain(part: _Part, record: JobRecord) -> str:
    """Return why a job has ended; empty for one that has simply come to its end."""
    if part.phase == "succeeded":
        return ""
    reason = "" if part.reason in {"", "None", part.state} else f" ({part.reason})"
    text = f"{part.state}{reason}" + (f" on {part.nodes}" if part.nodes not in {"", "(null)"} else "")
    if part.state == "NODE_FAIL":
        text += _ask_nodes(part.nodes)
    words = [] if part.phase == "cancelled" else find_own_words(Path(record.facts["log"]), part.starts)
    return f"{text}: {'; '.join(words)}" if words else text


def find_own_words(log: Path, starts: int = 1) -> Sequence[str]:
    """Return the lines in which Slurm says why it has ended processes of the last run.

    Args:
        log: Where the job prints; a pattern, if its parts have files of their own.
        starts: How often the job was started: what stands in the log of earlier runs is no cause of its end.
    """
    lines: list[str] = []
    for path in log.parent.glob(log.name):
        with suppress(OSError), path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            found = file.read().decode("utf-8", "replace").splitlines()
            breaks = [number for number, line in enumerate(found) if starts > 1 and RUN_ENDS.search(line)]
            lines += found[breaks[-1] + 1 if breaks else 0 :]
    return list(dict.fromkeys(line for line in lines if _OWN_WORDS.match(line)))[:3]
