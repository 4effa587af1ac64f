"""The jobs that this user has submitted from here: a small file for each, so that later commands find them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base import environ
from rankwise.base.errors import LaunchError, UsageError
from rankwise.base.files import write_atomic
from rankwise.cluster.job_fields import suggest

if TYPE_CHECKING:
    from collections.abc import Mapping

_FILE = "record.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """What is kept of a job that was submitted.

    Attributes:
        id: Ours.
        on: The kind of cluster.
        name: The job's.
        folder: Where its files are on this machine; ``submit`` may put more there.
        submitted_s: When, in seconds since the epoch.
        native_id: The scheduler's id; empty until it has one.
        client: The process that the job is to end with, where no scheduler holds it; 0: it goes on without one.
        facts: What its cluster's module needs to find it again.
    """

    id: str
    on: str
    name: str
    folder: Path
    submitted_s: float = 0.0
    native_id: str = ""
    client: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)


def jobs_folder() -> Path:
    """Return where the records are: below $XDG_STATE_HOME, or ~/.local/state."""
    state = environ.get("XDG_STATE_HOME")
    try:
        return (Path(state) if state.startswith("/") else Path.home() / ".local" / "state") / "rankwise" / "jobs"
    except RuntimeError as error:  # in a container, under a number that has no name
        raise UsageError(
            f"there is no place for records of jobs: {error}", hint="set XDG_STATE_HOME to a folder of yours"
        ) from None


def make_id(name: str) -> str:
    """Return an id for a new job: lower-case letters, digits and dashes, as a host name may have them."""
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-") or "job"
    if not stem[0].isalpha():
        stem = f"job-{stem}"
    return f"{stem}-{secrets.token_hex(3)}"


def open_folder(job_id: str) -> Path:
    """Make the folder of a new job, for nobody else to read.

    Raises:
        LaunchError: It can't be made.
    """
    folder = jobs_folder() / job_id
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise LaunchError(
            f"{folder} can't be made: {error.strerror}", hint="set XDG_STATE_HOME to a folder of yours"
        ) from error
    return folder


def keep(record: JobRecord) -> None:
    """Write a record into its folder.

    Raises:
        LaunchError: It can't be written.
    """
    values = {**dataclasses.asdict(record), "folder": os.fspath(record.folder)}
    try:
        write_atomic(record.folder / _FILE, json.dumps(values, indent=1) + "\n", mode=0o600)
    except OSError as error:
        raise LaunchError(
            f"{record.folder / _FILE} can't be written: {error.strerror}",
            hint="set XDG_STATE_HOME to a folder of yours",
        ) from error


def list_records() -> list[JobRecord]:
    """Return the jobs that were submitted from here, the oldest first."""
    found = [_read(path) for path in jobs_folder().glob(f"*/{_FILE}")]
    return sorted((one for one in found if one), key=lambda one: (one.submitted_s, one.id))


def find_record(text: str) -> JobRecord:
    """Return the job of an id, of its beginning, of the scheduler's id or, if only one has it, of a name.

    Raises:
        UsageError: There is none, or more than one.
    """
    records = list_records()
    by_id = {one.id: one for one in records}
    if text in by_id:
        return by_id[text]
    found = [one for one in records if text and (text in {one.native_id, one.name} or one.id.startswith(text))]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{text!r} may be any of {', '.join(one.id for one in found[-5:])}", hint="give the whole id")
    hint = suggest(text, by_id) if records else "`rankwise jobs` lists those that were submitted from this machine"
    raise UsageError(f"there is no job {text!r}", hint=hint)


def _read(path: Path) -> JobRecord | None:
    """Return a record; None if it is unreadable: that of another version hides no others."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        known = {one.name for one in dataclasses.fields(JobRecord)}
        return JobRecord(**{**{n: v for n, v in values.items() if n in known}, "folder": path.parent})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
