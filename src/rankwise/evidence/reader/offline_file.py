"""One file that a rank has left in a folder, with what stands beside it: its records, its notes, and how it ended."""

from __future__ import annotations

import json
import os
import stat
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from rankwise.base.errors import UsageError
from rankwise.base.faults import FaultRecord
from rankwise.base.files import read_regular, write_atomic
from rankwise.evidence.in_rank import ring
from rankwise.evidence.reader import offline_layout
from rankwise.evidence.reader.merge_records import Merger
from rankwise.evidence.reader.notes import Notes, read_notes, split_crash
from rankwise.evidence.reader.size_limits import inflate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.evidence.reader.offline_live import LiveLook
    from rankwise.evidence.reader.scene import Evidence

#: How a rank is, or ended: by itself in three ways; by SIGTERM; without a word, as by SIGKILL, os._exit or exec: alone,
#: or as all others did; or nobody knows.
How = Literal["lives", "finished", "raised", "crashed", "terminated", "vanished", "unrecorded", "unknown"]
#: A rank that copies itself at least every so often (and its own rhythm), and has not, can't.
SILENT_S = 75.0
_ENDING = ".evidence"
#: Of one rank: its records, or its notes, which grow with every exception that it prints.
_MOST_BYTES = 1 << 28
_CRASHES = {"Aborted": -6, "Segmentation fault": -11, "Bus error": -7, "Floating": -8, "Illegal": -4}


@final
@dataclass(slots=True, kw_only=True)
class OfflineFile:
    """What one rank has left.

    Attributes:
        path: The file.
        head: What it tells of itself, on its first line.
        copy: Its records, packed.
        evidence: Its records, read; None if it has made none.
        is_exact: Whether they reach to its end, or to this moment.
        how: How it is, or ended.
        asked: Its stack when it was told to end; ``crash``: when it crashed.
        live: What was seen of it, if it lives here.
    """

    path: Path
    head: dict[str, Any]
    copy: bytes
    evidence: Evidence | None = None
    is_exact: bool = False
    how: How = "unknown"
    notes: Notes = field(default_factory=Notes)
    asked: str = ""
    crash: str = ""
    live: LiveLook | None = None

    @property
    def rank(self) -> int:
        """Its number."""
        return int(self.head["rank"])

    @property
    def offset_s(self) -> float:
        """What makes a time of the host's monotonic clock one of the epoch."""
        return float(self.head["time_s"]) - float(self.head["saved_s"])

    @property
    def moved_s(self) -> float:
        """When it made a record or a step last, or used the CPU, as far as is known."""
        value = [float(self.head.get("moved_s", self.head["began_s"])), float(self.head.get("busy_s", 0.0))]
        if self.evidence is not None:
            value += [op.entered_s for op in self.evidence.ops[-8:] if op.entered_s is not None]
            value += [self.evidence.step_s or 0.0]
        return max(value)


def list_files(folder: Path) -> list[Path]:
    """Return the files of ranks in a folder of an attempt, of a run, or of many runs."""
    return sorted(
        path for pattern in ("", "attempt_*/", "*/attempt_*/") for path in folder.glob(f"{pattern}rank*{_ENDING}")
    )


def read_head(path: Path) -> OfflineFile | None:
    """Return a file, its first line read; None if it is none of ours."""
    try:
        line, _, copy = read_regular(path, _MOST_BYTES).partition(b"\n")
        head = json.loads(line)
    except (OSError, ValueError):
        return None  # written by nobody of ours
    if not isinstance(head, dict) or head.get("version") != offline_layout.VERSION:
        return None
    return OfflineFile(path=path, head=head, copy=copy)


def fill(file: OfflineFile) -> None:
    """Read the records and the notes of a rank."""
    raw = file.live.raw if file.live is not None else _take_memory(file)
    file.is_exact = raw is not None or file.head.get("why") in {"end", "rescue"}
    if raw is None and file.copy:
        try:
            raw = inflate(file.copy, ring.SIZE_BYTES)
        except ValueError as error:
            raise UsageError(f"{file.path} can't be read: {error}") from error
    file.evidence = Merger().read(raw or b"")
    front = str(file.path)[: -len(_ENDING)]
    file.notes = read_notes(_read_text(Path(f"{front}.notes.jsonl")))
    if file.notes.fault is None and file.notes.finished_s is None and (raised := file.head.get("error")):
        file.notes.fault = FaultRecord(message=str(raised), monotonic_s=float(file.head["saved_s"]))
    file.asked, file.crash = split_crash(_read_text(Path(f"{front}.stacks.txt")))


def _take_memory(file: OfflineFile) -> bytes | None:
    """Return the records of a rank that has ended on this host, from the file in memory that has outlived it; None if there is none.

    They are put into the folder, which then has all there is, and can be carried elsewhere.
    """
    head = file.head
    path = Path(str(head["ring"]))
    # Who made the folder may have written any path into it: this one is read into the folder, and removed.
    if head["kernel"] != offline_layout.name_kernel() or not offline_layout.is_own_ring(path):
        return None
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as memory:  # noqa: PTH123 - no links
            status = os.fstat(memory.fileno())
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
            if not is_ours or [status.st_dev, status.st_ino] != head["ring_id"]:
                return None
            raw = memory.read(ring.SIZE_BYTES)
    except OSError:
        return None
    with suppress(OSError):  # another user's folder, or a disk that is full: then it stays where it is
        body = {**head, "why": "rescue", "state": "ended"}
        write_atomic(file.path, json.dumps(body).encode() + b"\n" + zlib.compress(raw, 1))
        path.unlink()
    return raw


def _read_text(path: Path) -> str:
    try:
        return read_regular(path, _MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


# ----------------------------------------------------------- how they ended


def set_ends(files: Mapping[int, OfflineFile]) -> None:
    """Write down for each rank how it is, or ended."""
    for file in files.values():
        file.how = _find_how(file)
    _find_first_gone(files)
    silent = [file for file in files.values() if file.how == "vanished"]
    others = [file for file in files.values() if file.how not in {"vanished", "finished"}]
    if len(silent) > 1 and not others:
        # All at once, as by a scheduler: what counts is how they were before. None of them is to blame for its own end.
        for file in silent:
            file.how = "unrecorded"
    for file in silent:
        # It had left the others in order, and ends as many scripts do: by os._exit.
        if file.evidence is not None and file.evidence.has_left and file.how == "vanished":
            file.how = "finished"


def _find_first_gone(files: Mapping[int, OfflineFile]) -> None:
    """Tell of a host that can't be asked any more who was gone before its launcher ended the others, and nobody was left to see it.

    All others of the host must have been told to end; of one that is alone with its silence a launcher of its own may
    have ended.
    """
    hosts: dict[tuple[str, str], list[OfflineFile]] = {}
    for file in files.values():
        hosts.setdefault((str(file.head["host"]), str(file.head["kernel"])), []).append(file)
    for there in hosts.values():
        silent = [file for file in there if file.how == "unknown" and file.head.get("state") != "stopped"]
        lines = [file for file in there if file.how == "terminated" and file.asked.strip()]
        if len(silent) == 1 and len(lines) == len(there) - 1 > 0:
            silent[0].how = "vanished"


def _find_how(file: OfflineFile) -> How:
    if file.live is not None:
        return "lives"
    if file.notes.fault is not None:
        # Ctrl-C comes from outside, and reaches all of them.
        return "terminated" if file.notes.fault.message.startswith("KeyboardInterrupt") else "raised"
    # A script that closes all descriptors has no last note; that it came to its end the last copy tells.
    if file.notes.finished_s is not None or file.head.get("why") == "end":
        return "finished"
    if file.crash:
        return "crashed"
    if file.asked.strip():
        return "terminated"  # nothing else asks
    is_here = file.head["kernel"] == offline_layout.name_kernel()
    return "vanished" if is_here or file.head.get("state") == "ended" else "unknown"


def find_end(file: OfflineFile) -> float:
    """Return when it was last heard of: at its end, or when it was copied last."""
    if file.live is not None:
        return file.live.at_s
    saved_s, fault = float(file.head["saved_s"]), file.notes.fault
    if file.how in {"raised", "terminated"} and fault is not None and fault.monotonic_s is not None:
        return fault.monotonic_s
    if file.how == "finished" and file.notes.finished_s is not None:
        return file.notes.finished_s
    if file.how == "vanished":
        return file.moved_s
    heard_s = max(float(file.head.get("seen_s", saved_s)), saved_s, file.moved_s)
    if file.how != "terminated" or not file.asked.strip():
        return heard_s
    # A folder that was copied has younger files: believed only if it fits the rhythm of the copies.
    reported_s = Path(str(file.path)[: -len(_ENDING)] + ".stacks.txt").stat().st_mtime - file.offset_s
    return reported_s if saved_s <= reported_s <= saved_s + float(file.head["every_s"]) + SILENT_S else heard_s


def find_code(file: OfflineFile) -> int:
    """Return the exit code that goes with how it ended, as far as its notes tell."""
    if file.how == "crashed":
        return next((code for name, code in _CRASHES.items() if name in file.crash.partition("\n")[0]), -6)
    return {"finished": 0, "raised": 1}.get(file.how, -9)
