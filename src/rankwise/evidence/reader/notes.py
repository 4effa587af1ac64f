"""Read in the parent what a rank's recorder wrote: how it ended, and its stacks."""

from __future__ import annotations

import itertools
import json
import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from rankwise.base.faults import FaultRecord

#: What has no file and is not typed by the user either, as <stdin> is.
_NOBODYS = ("<frozen", "<unknown", "<string>")
#: Our own package, wherever it stands: an editable install is no site-packages.
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "")  # noqa: PTH118, PTH120 - as texts, for startswith
#: Installed packages, and a package of ours that stands elsewhere: a stack may be of another installation, or of
#: another machine.
_FOREIGN = (
    "/site-packages/", "/dist-packages/", "/lib/python3", "/src/rankwise/", "/rankwise/evidence/", "/rankwise/runtime/",
    "/rankwise/launcher/", "/rankwise/warm/",
)  # fmt: skip
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python3")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
# Collectives that DDP issues run inside the backward pass, where no frame of torch.distributed is seen.
_BACKWARD = {"_engine_run_backward"}
#: What a rank waits for in rankwise's library: the same call of others, the end of the first rank's block, or their
#: joining a group.
LibraryWait = Literal["call", "turn", "rendezvous"]
#: Every function of it that waits for what other ranks do, by its file and its name. Not that of a checkpoint which is
#: written in the background: it depends on no rank's main thread, and names who is silent itself.
LIBRARY_WAITS: dict[tuple[str, str], LibraryWait] = {
    ("/rankwise/runtime/control.py", "_wait"): "call",
    ("/rankwise/runtime/main_first.py", "_wait"): "turn",
    ("/rankwise/runtime/joining.py", "_meet"): "rendezvous",
    ("/rankwise/runtime/connecting.py", "connect"): "rendezvous",
    ("/rankwise/runtime/groups.py", "_make"): "rendezvous",
}
#: The parts of the package that a script calls; a user's folder may be called rankwise, too, and hold an environment.
_ROOMS = {"base", "runtime", "parallel", "checkpoint", "data", "train", "tf"}
#: A decorator of its functions.
_EAGER = "/rankwise/runtime/eager.py"
#: Where ``Work.wait`` has its frame while it is recorded; the others are its names in records of earlier versions.
_RECORDER = ("/in_rank/intercept_calls.py", "/evidence/in_rank/collective_recorder.py", "/evidence/recording.py")
#: What such a function may stand in: it waits in a thread of its own, so that the wait has a bound.
_WITHIN = ("/threading.py", "/rankwise/base/deadline.py", "/rankwise/evidence/")
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
        return not self.file.startswith((*_NOBODYS, _OURS)) and not any(part in self.file for part in _FOREIGN)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What a thread of a rank was doing, the main one as a rule; innermost frame first.

    Attributes:
        module: Name of the innermost module of torch that runs, in the outermost one; None if it is that one, or
            unknown. Of a thread that waits for a message of a pipeline: what that carries, as ``write_flow`` has it.
    """

    frames: tuple[Frame, ...] = ()
    module: str | None = None

    @property
    def where(self) -> str | None:
        """``file.py:LINE`` of the innermost line of the user's own code."""
        own = next((frame for frame in self.frames if frame.is_users), None)
        own = own or (self.frames[0] if self.frames else None)
        return None if own is None else str(own)

    @property
    def op(self) -> str | None:
        """The function of torch.distributed or of rankwise that waits for others, or the backward pass, that the user's line is in; else None."""
        if self.library_wait is not None:
            return self.library_call
        inside = [frame for frame in self.below_user if "/torch/" in frame.file]
        if not inside and self.is_in_work:
            return self.library_call or "wait"
        if any(frame.function in _BACKWARD for frame in inside):
            return "backward"
        if not any("/torch/distributed/" in frame.file for frame in inside):
            return None
        named = [frame.function for frame in inside if frame.function not in _DECORATORS]
        if named and named[-1] == "__torch_dispatch__":
            # Of a tensor that a collective is still filling: any use of it waits.
            return "wait_tensor"
        return named[-1] if named else inside[-1].function

    @property
    def is_in_work(self) -> bool:
        """Whether the thread waits for a Work: it is C++'s, and only our recorder around it has a frame."""
        return bool(self.frames) and self.frames[0].file.endswith(_RECORDER) and self.frames[0].function == "wait"

    @property
    def library_wait(self) -> LibraryWait | None:
        """What the thread waits for in rankwise's library; None if it does not wait there."""
        at = next((one for one in self.frames if not any(part in one.file for part in _WITHIN)), None)
        if at is None:
            return None
        waits = (wait for (file, name), wait in LIBRARY_WAITS.items() if at.file.endswith(file) and at.function == name)
        return next(waits, None)

    @property
    def library_call(self) -> str | None:
        """The function of rankwise that the user's line has called: ``rankwise.all_reduce``."""
        inside = [frame for frame in self.below_user if is_librarys(frame)]
        if not inside:
            return None
        room, _, rest = inside[-1].file.rpartition("/rankwise/")[2].partition("/")
        # A stack knows no classes: of a loader's __iter__ its file tells more.
        name = inside[-1].function if not inside[-1].function.startswith("__") else rest.removesuffix(".py")
        return f"rankwise.{room}.{name}" if room in {"checkpoint", "tf"} else f"rankwise.{name}"

    @property
    def is_farewell(self) -> bool:
        """Whether the script itself is over: its last exception is being shown, or the interpreter goes down."""
        return bool(self.frames) and self.frames[-1].function not in _BEGINNINGS

    @property
    def below_user(self) -> list[Frame]:
        """The frames between the innermost line of the user's own and what runs now, innermost first."""
        return list(itertools.takewhile(lambda frame: not frame.is_users, self.frames))


def is_librarys(frame: Frame) -> bool:
    """Tell whether a line is of rankwise's library, and no decorator of its functions."""
    _, found, rest = frame.file.rpartition("/rankwise/")
    is_there = bool(found) and rest.partition("/")[0] in _ROOMS
    return is_there and not frame.file.endswith(_EAGER) and not any(part in f"/{rest}" for part in _INSTALLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a rank found to be wrong with the ranks that it was to meet.

    Attributes:
        text: What is wrong.
        fix: What to do.
        local_ranks: Whom it concerns on this node; empty if that is not known.
    """

    text: str
    fix: str
    local_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Where a rank's standard error stood when its interpreter began to end, and behind its functions of atexit.

    Attributes:
        stderr_bytes: Its sizes then; None if it carries marks there.
    """

    stderr_bytes: tuple[int | None, ...] = ()


@dataclass(slots=True, kw_only=True)
class Notes:
    """All that a rank's notes say; a rank that is a shell runs one Python after another, and the last one's end is the rank's.

    Attributes:
        handled: The exception that the rank was handling when it called sys.exit last, and the exit code that it asked for.
        left: Where it called os._exit.
    """

    fault: FaultRecord | None = None
    handled: tuple[FaultRecord, int] | None = None
    finished_s: float | None = None
    problem: Problem | None = None
    left: Stack | None = None
    sizes: list[tuple[int, int | None]] = field(default_factory=list)
    imported: dict[str, int] = field(default_factory=dict)

    def add(self, note: dict[str, Any]) -> None:
        """Take in one note, if it is a whole one."""
        match note["note"]:
            case "armed":
                self.fault, self.handled, self.finished_s, self.left, self.sizes = None, None, None, None, []
            case "finished":
                self.finished_s = float(note["monotonic_s"])
                self.imported = note.get("imported", {})
            case "exception":
                self.fault = _read_fault(note)
            case "exit":
                self.handled = (_read_fault(note), int(note["code"])) if "message" in note else None
            case "problem":
                ranks = tuple(map(int, note["local_ranks"]))
                self.problem = Problem(text=str(note["text"]), fix=str(note["fix"]), local_ranks=ranks)
            case "left":
                frames = (Frame(file=file, line=line, function=name) for file, line, name in note["frames"])
                self.left = Stack(frames=tuple(frames))
            case "ending":
                self.sizes.append((note["pid"], note["stderr_bytes"]))
            case _:
                pass

    @property
    def left_at(self) -> str | None:
        """``file.py:LINE`` of the user's own at which the rank called os._exit; None if it did not, or a library's thread did."""
        return self.left.where if self.left and any(frame.is_users for frame in self.left.frames) else None

    def find_ending(self, pid: int) -> Ending | None:
        """Return where a rank's own words end; None if its interpreter did not come to its end in good order."""
        sizes = tuple(size for one, size in self.sizes if one == pid)
        is_through = (self.fault, self.finished_s, self.left) != (None, None, None)
        return Ending(stderr_bytes=sizes) if sizes and is_through else None


def _read_fault(note: dict[str, Any]) -> FaultRecord:
    return FaultRecord(
        message=str(note["message"]),
        callstack=str(note["traceback"]),
        timestamp_s=float(note["time_s"]),
        monotonic_s=float(note["monotonic_s"]),
        where=note["where"],
        module=note.get("module") or None,
    )


def read_notes(text: str) -> Notes:
    """Read the lines that a rank's recorder has written."""
    notes = Notes()
    for line in text.splitlines():
        try:
            notes.add(json.loads(line))
        except (ValueError, KeyError, TypeError):
            continue  # a line cut short by the rank's death
    return notes


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
