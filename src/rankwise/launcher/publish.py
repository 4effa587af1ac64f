"""Tell the world how it went: the terminal, the report file, and torchelastic's error file of our own."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.environ import get
from rankwise.base.faults import FaultRecord
from rankwise.base.files import write_atomic
from rankwise.base.roles import name_roles
from rankwise.verdict import evidence_folder
from rankwise.verdict.report import render, shorten_tail

if TYPE_CHECKING:
    from rankwise.launcher.console import Console
    from rankwise.launcher.job import Job
    from rankwise.verdict.case import Case, Verdict


def publish(job: Job, verdict: Verdict, *, attempt: int, reason: str = "", is_final: bool = True) -> None:
    """Report an attempt's end.

    Args:
        job: Whose it is.
        verdict: What happened.
        attempt: Which attempt it was, from 0.
        reason: Why there is, or is not, another attempt.
        is_final: Whether the job ends with it: then the files are written too.
    """
    console, roles = job.console, job.spec.roles
    verdict = replace(
        verdict, message=name_roles(verdict.message, roles), notes=tuple(name_roles(one, roles) for one in verdict.notes)
    )  # fmt: skip
    job.events.write(
        "attempt.ended",
        attempt=attempt,
        kind=verdict.kind,
        culprits=verdict.culprits,
        message=verdict.message,
    )
    # The files first: a terminal that takes nothing must not cost them.
    evidence = find_evidence(job, attempt)
    if is_final and job.spec.report is not None:
        write_report(job.spec.report, verdict, attempt=attempt, console=console, reason=reason, evidence=evidence)
    if is_final and verdict.kind not in {"ok", "requeue"}:
        _write_own_error_file(verdict, console)
    if verdict.kind == "requeue":
        console.say("\n".join(f"rankwise: {line}" for line in (verdict.message, *verdict.notes)))
    elif verdict.kind != "ok":
        allowed = None if is_final else job.spec.max_restarts + 1
        text = render(
            without_shown(verdict, console),
            attempt=attempt,
            allowed=allowed,
            colour=console.has_colour(),
            width=console.width(),
        )
        text = name_roles(text, roles)
        # Of a rank that failed by itself the log tells all.
        is_reported = evidence is not None and (verdict.kind in {"hang", "mismatch"} or verdict.rule is not None)
        console.say(
            text + (f"\n  {'evidence':<9}{evidence}" if is_reported else ""),
            apart=job.spec.logs.shares_stdout,
        )
    elif verdict.notes:
        console.say("\n".join(f"rankwise: {note}" for note in verdict.notes))
    if reason:
        console.say(f"rankwise: {reason}")


def without_shown(verdict: Verdict, console: Console) -> Verdict:
    """Return a verdict without the traceback and the last lines that the console shows just above: once is enough."""
    return replace(
        verdict,
        traceback="" if console.has_shown(verdict.traceback) else verdict.traceback,
        last_words="" if console.has_shown(shorten_tail(verdict)) else verdict.last_words,
    )


def is_silent(verdict: Verdict) -> bool:
    """Tell whether all ranks have ended well by themselves, and only some of their collectives were paired wrongly."""
    ended_well = bool(verdict.exits) and all(code == 0 for code in verdict.exits.values())
    return verdict.kind == "mismatch" and ended_well and verdict.stopped_by is None


def save_evidence(job: Job, case: Case, verdict: Verdict) -> None:
    """Write what an attempt was judged from into its folder, if somebody may want to judge it again.

    A full disk is no reason to lose the verdict.
    """
    has_files = job.serial is None and not job.spec.logs.is_off
    if case.scene is None or verdict.kind in {"ok", "requeue"} or not has_files:
        return
    try:
        evidence_folder.save(_evidence_of(job, case.attempt), scene=case.scene, case=case)
    except OSError as error:
        job.console.say(f"rankwise: the evidence can't be written to {job.folder}: {error.strerror}")


def find_evidence(job: Job, attempt: int) -> Path | None:
    """Return the folder with an attempt's evidence; None if there is none."""
    folder = _evidence_of(job, attempt)
    return folder if evidence_folder.is_saved(folder) else None


def _evidence_of(job: Job, attempt: int) -> Path:
    return job.folder / f"attempt_{attempt}" / "evidence"


def write_report(
    path: Path,
    verdict: Verdict,
    *,
    attempt: int,
    console: Console,
    reason: str = "",
    evidence: Path | None = None,
) -> None:
    """Write the report as JSON; a folder that does not exist is no reason to lose the exit code."""
    body = {
        **verdict.to_json(),
        "evidence": None if evidence is None else str(evidence),
        "attempts": attempt + 1,
        "host": socket.gethostname(),
        "end": reason,
    }
    try:
        write_atomic(path, json.dumps(body, indent=1) + "\n")
    except OSError as error:
        console.say(f"rankwise: the report can't be written to {path}: {error.strerror}")


def _write_own_error_file(verdict: Verdict, console: Console) -> None:
    """Write the error file that a scheduler above us asked for, in torchelastic's schema."""
    path = get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    record = FaultRecord(message=verdict.message, callstack=verdict.traceback, timestamp_s=SYSTEM_CLOCK.time())
    try:
        write_atomic(Path(path), record.to_json(error_code=verdict.exit_code))
    except OSError as error:
        console.say(f"rankwise: the error file can't be written to {path}: {error.strerror}")
