"""Read in the parent what a rank's recorder wrote: how it ended, and its stacks."""

from __future__ import annotations

import itertools
import json
import os
import re
from dataclasses import dataclass

from rankwise.base.faults import FaultRecord

#: What has no file and is not typed by the user either, as <stdin> is.
_NOBODYS = ("<frozen", "<unknown", "<string>")
#: Our own package, wherever it stands: an editable install is no site-packages.
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")  # noqa: PTH118, PTH120 - as texts, for startswith
#: Installed packages, and a package of ours that stands elsewhere: a stack may be of another installation, or of another machine.
_FOREIGN = (
    "/site-packages/", "/dist-packages/", "/lib/python3", "/src/rankwise/", "/rankwise/evidence/", "/rankwise/runtime/",
    "/rankwise/launcher/", "/rankwise/warm/",
)  # fmt: skip
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
# Collectives that DDP issues run inside the backward pass, where no frame of torch.distributed is seen.
_BACKWARD = {"_engine_run_backward"}
#: Where the script begins, and each of its threads.
_BEGINNINGS = {"<module>", "_run_module_as_main", "_bootstrap"}
_DECORATORS = {"wrapper", "inner", "decorate_context", "_fn"}
_TRACED = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)$', re.MULTILINE)
_HEAD = re.compile(r"^(Current thread|Thread) 0x")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether the line is neither Python's own nor an installed package's."""
        return not self.file.startswith((*_NOBODYS, _OURS)) and not any(
            part in self.file for part in _FOREIGN
        )

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What a thread of a rank was doing, the main one as a rule; innermost frame first."""

    frames: tuple[Frame, ...] = ()

    @property
    def where(self) -> str | None:
        """``file.py:LINE`` of the innermost line of the user's own code."""
        own = next((frame for frame in self.frames if frame.is_users), None)
        own = own or (self.frames[0] if self.frames else None)
        return None if own is None else str(own)

    @property
    def op(self) -> str | None:
        """The function of torch.distributed, or the backward pass, that the user's line is in; else None."""
        inside = [frame for frame in self._below_user() if "/torch/" in frame.file]
        if not any("/torch/distributed/" in frame.file or frame.function in _BACKWARD for frame in inside):
            return None
        named = [frame.function for frame in inside if frame.function not in _DECORATORS]
        return named[-1] if named else inside[-1].function

    @property
    def is_farewell(self) -> bool:
        """Whether the script itself is over: its last exception is being shown, or the interpreter goes down."""
        return bool(self.frames) and self.frames[-1].function not in _BEGINNINGS

    def _below_user(self) -> list[Frame]:
        return list(itertools.takewhile(lambda frame: not frame.is_users, self.frames))


def parse_notes(text: str) -> tuple[FaultRecord | None, float | None]:
    """Return the exception that ended the rank, and when its script was through (monotonic seconds)."""
    fault, finished_s = None, None
    for line in text.splitlines():
        try:
            note = json.loads(line)
            if note["note"] == "armed":
                # A rank that is a shell runs one Python after another: only the last one's end is the rank's.
                fault, finished_s = None, None
            elif note["note"] == "finished":
                finished_s = float(note["monotonic_s"])
            elif note["note"] == "exception":
                fault = FaultRecord(
                    message=str(note["message"]),
                    callstack=str(note["traceback"]),
                    timestamp_s=float(note["time_s"]),
                    monotonic_s=float(note["monotonic_s"]),
                    where=note["where"],
                )
        except (ValueError, KeyError, TypeError):
            continue  # a line cut short by the rank's death
    return fault, finished_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Where a rank's standard error stood when its interpreter began to end, and behind its functions of atexit.

    Attributes:
        stderr_bytes: Its sizes then; None if it carries marks there.
    """

    stderr_bytes: tuple[int | None, ...] = ()


def parse_ending(text: str, pid: int) -> Ending | None:
    """Return where a rank's own words end; None if its interpreter did not come to its end in good order.

    Args:
        text: The notes.
        pid: The rank's; a shell that is the rank says more behind the end of its Python.
    """
    sizes, is_through = list[int | None](), False
    for line in text.splitlines():
        try:
            note = json.loads(line)
            if note["note"] == "armed":
                sizes, is_through = [], False
            elif note["note"] == "ending" and note["pid"] == pid:
                sizes.append(note["stderr_bytes"])
            elif note["note"] in {"finished", "exception"}:
                is_through = True
        except (ValueError, KeyError, TypeError):
            continue  # a line cut short by the rank's death
    return Ending(stderr_bytes=tuple(sizes)) if sizes and is_through else None


def parse_imported(text: str) -> dict[str, int]:
    """Return how many modules of each package, torch apart, a rank had imported between its start and its end."""
    for line in reversed(text.splitlines()):
        if '"imported": {' in line:
            try:
                found: dict[str, int] = json.loads(line)["imported"]
            except (ValueError, KeyError):
                continue  # cut short by the rank's death
            return found
    return {}


def parse_stack(text: str) -> Stack | None:
    """Read faulthandler's text; the main thread comes last in it. None if it holds no frame."""
    frames: list[Frame] = []
    for line in text.splitlines():
        if _HEAD.match(line):
            frames = []
        elif found := _FRAME.match(line):
            frames.append(Frame(file=found["file"], line=int(found["line"]), function=found["function"]))
    return Stack(frames=tuple(frames)) if frames else None


def parse_traceback(text: str) -> Stack | None:
    """Read a traceback as Python prints it; the innermost frame comes last in it. None if it holds no frame."""
    found = _TRACED.finditer(text)
    frames = [Frame(file=one["file"], line=int(one["line"]), function=one["function"]) for one in found]
    return Stack(frames=tuple(reversed(frames))) if frames else None


def split_crash(text: str) -> tuple[str, str]:
    """Split a stack file into what was asked for and what a crash wrote of itself."""
    asked, mark, crash = text.partition("Fatal Python error: ")
    return asked, mark + crash
