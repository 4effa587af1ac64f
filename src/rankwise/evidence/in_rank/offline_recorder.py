"""In a rank that nobody looks on from outside: a thread that copies its records into a folder, when it stands still, now and then, and at its end.

Only this thread writes to the folder, so a disk that blocks keeps nobody else waiting. It looks, too, at the other ranks of its
host: what one that was killed or stopped has recorded is copied by whoever notices. This file stands alone, as
``rank_exit.py`` does.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import struct
import sys
import threading
import time
import types
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: The thread looks so often whether the rank has moved.
_TICK_S = 1.0
#: A rank that has been quiet for so long is copied with its stacks; then again when it has been for twice as long, and
#: so on.
_QUIET_S, _LONGEST_S = 3.0, 30.0
#: Less of a core is no sign of life: threads that wake up now and then use it.
_IDLE_SHARE = 0.05
#: Copying takes no more than one part in so many of the rank's time.
_COST_FACTOR = 500.0
_ANSWER_S, _LOOK_EVERY_S = 1.0, 0.02
#: So long may a copy take that has just begun, when the script is over.
_LAST_S = 2.0
#: How long a folder that can't be written is left alone.
_REST_S = 60.0
_HEAD_BYTES = 4096
_QUESTION = struct.Struct("<Q")


def install(keep: dict[str, Any], load: Callable[[str], Any], stacks: int) -> Callable[[str], Any]:
    """Begin to keep what this process will record.

    To be called before the recorder is armed, so that the last copy is made after its last note.

    Args:
        keep: Where from, where to, and whose records they are.
        load: Returns a module of ours by its name.
        stacks: The descriptor that gets a stack when the launcher ends the rank.

    Returns:
        What to load modules by from now on.
    """
    offline_recorder = OfflineRecorder(keep, load)
    # Invisible to the script, and C alone: it works while the main thread waits in a collective, and the rank ends as
    # it would have. A handler that the script has, or sets, is the only one.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGTERM, file=stacks, all_threads=False, chain=True)
    atexit.register(offline_recorder.end)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=offline_recorder.forget)
    return offline_recorder.load


class OfflineRecorder:
    """The copies of this process's records."""

    def __init__(self, keep: dict[str, Any], load: Callable[[str], Any]) -> None:
        self._file, self._head, self._path = str(keep["file"]), keep["head"], str(keep["ring"])
        self._asks, self._every_s, self._size = int(keep["asks"]), float(keep["every_s"]), int(keep["size"])
        self._load, self._pid = load, os.getpid()
        self._lock, self._wake = threading.Lock(), threading.Lock()
        self._wake.acquire()
        self._is_over = self._answers = self._has_complained = False
        self._ring: Any = None
        self._writer: Any = None
        self._list_frames: Any = None
        self._moves = self._saved_moves = b""
        self._moved_s = self._busy_s = self._looked_s = self._saved_s = time.monotonic()
        self._used_s, self._share = time.process_time(), 0.0
        self._stall_s, self._rest_until_s, self._stood_s = _QUIET_S, 0.0, 0.0
        self._rescued: set[str] = set()

    def load(self, name: str) -> Any:
        """Return a module of ours; that which answers questions tells us when it begins to."""
        module = self._load(name)
        if name != "responder":
            return module
        return types.SimpleNamespace(
            StackResponder=lambda *args: self._join(module, module.StackResponder(*args), *args)
        )

    def _join(self, module: Any, side: Any, _asks: int, ring: Any, writer: Any, *_others: Any) -> Any:
        """Begin to look at the records, which are there from now on."""
        self._ring, self._writer, self._list_frames = ring, writer, module.list_frames
        begin = side.begin

        def begin_to_answer() -> None:
            begin()
            self._answers = True

        side.begin = begin_to_answer
        module.start_thread(self._run)
        return side

    def forget(self) -> None:
        """In a forked child, which is no rank: write nothing."""
        self._is_over = True

    def end(self) -> None:
        """At the rank's end: copy once more, and let go of the file in memory."""
        if os.getpid() != self._pid or not self._lock.acquire(timeout=_LAST_S):
            return
        try:
            if not self._is_over:
                self._is_over = True
                self._wake.release()
                if self._save("end"):
                    os.unlink(self._path)
        except OSError:
            return
        finally:
            self._lock.release()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._wake.acquire(timeout=_TICK_S):
            with self._lock:
                if self._is_over:
                    return
                try:
                    self._look(time.monotonic())
                except Exception as error:  # the user's job matters more than our view of it
                    self._complain(error)
                    return

    def _look(self, now: float) -> None:
        moves, used_s = self._writer.read_moves(), time.process_time()
        self._share = (used_s - self._used_s) / max(now - self._looked_s, 1e-3)
        self._used_s, self._looked_s = used_s, now
        if self._share > _IDLE_SHARE:
            self._busy_s = now
        if moves != self._moves:
            self._moves, self._moved_s, self._stall_s = moves, now, _QUIET_S
        if not self._answers and self._share <= _IDLE_SHARE and self._stood_s < self._busy_s:
            self._write_main_stack()  # who looks on while it lives can't ask yet
        if now < self._rest_until_s:
            return
        if now - self._moved_s >= self._stall_s:
            self._stall_s += min(self._stall_s, _LONGEST_S)
            self._try("stall")
        elif moves != self._saved_moves and now - self._saved_s >= self._every_s:
            self._try("rhythm")

    def _try(self, why: str) -> None:
        before_s = time.thread_time()
        if why == "stall":
            self._ask()
        self._save(why)
        cost_s = time.thread_time() - before_s
        self._rest_until_s = max(self._rest_until_s, time.monotonic() + cost_s * _COST_FACTOR)

    # --------------------------------------------------------------- asking

    def _ask(self) -> None:
        """Have the stacks of all threads and the flight recorder written among the records."""
        if not self._answers:
            self._write_main_stack()
            return
        number = self._ring.read_asked(self._read(self._path, self._ring.HEADER_BYTES)) + 1
        try:
            if os.fstat(self._asks).st_ino != self._head["asks_id"]:
                return  # the script has closed it, and opened its own there
            os.set_blocking(self._asks, False)
            os.write(self._asks, _QUESTION.pack(number))
        except OSError:
            return
        end = time.monotonic() + _ANSWER_S
        while time.monotonic() < end:
            if self._ring.read_asked(self._read(self._path, self._ring.HEADER_BYTES)) >= number:
                return
            time.sleep(_LOOK_EVERY_S)

    def _write_main_stack(self) -> None:
        """Before the script has reached init_process_group, nobody answers yet."""
        self._stood_s = time.monotonic()
        main = threading.main_thread()
        frames = self._list_frames(sys._current_frames().get(main.ident or 0))
        body = {"stacks": {main.name: frames}, "handled": {}}
        self._writer.report("stacks", json.dumps(body).encode(), self._stood_s)

    # --------------------------------------------------------------- saving

    def _save(self, why: str) -> bool:
        """Copy the records; return whether that went well."""
        moves = b"" if self._writer is None else self._writer.read_moves()
        body = {
            "why": why,
            "moved_s": self._moved_s,
            "busy_s": self._busy_s,
            "cpu_share": round(self._share, 3),
            "children": _list_children() if why == "stall" else [],
        }
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if why == "end" and error is not None:
            body["error"] = f"{type(error).__name__}: {error}"[:2000]
        try:
            raw = self._read(self._path, self._size) if self._writer is not None else b""
            _write(self._file, {**self._head, **body}, raw)
            if os.path.dirname(self._path) != "/proc/self/fd":
                os.utime(self._path)  # young files are left alone by those who clear up
                self._rescue()
        except OSError as error:
            self._complain(error)
            self._rest_until_s = time.monotonic() + _REST_S
            return False
        self._saved_moves, self._saved_s = moves, time.monotonic()
        return True

    def _rescue(self) -> None:
        """Copy what other ranks of this host have recorded that were killed, or are stopped: they can't."""
        memory, mine = os.path.split(self._path)
        front = ".".join(mine.split(".")[:3]) + "."
        for name in os.listdir(memory):
            if not name.startswith(front) or name == mine or name in self._rescued:
                continue
            pid, path = name.rpartition(".")[2], os.path.join(memory, name)
            letter = _read_state(pid)
            if letter not in {"", "Z", "X", "T"}:
                if _holds(pid, path):
                    continue
                letter = ""  # another program has taken its place, by exec
            try:
                raw = self._read(path, self._size + _HEAD_BYTES)
                head = json.loads(raw[self._size :].rstrip(b"\0"))
            except (OSError, ValueError):
                continue  # it has let go of it by itself
            state = "stopped" if letter == "T" else "ended"
            if state == "ended":
                self._rescued.add(name)
            target = os.path.join(os.path.dirname(self._file), f"rank{head['rank']}.evidence")
            if _find_owner(target) != head["pid"]:
                continue  # killed in an earlier run of the same name; the rank of today has a file of its own
            _write(
                target,
                {**head, "why": "rescue", "state": state, "seen_s": time.monotonic()},
                raw[: self._size],
            )

    def _complain(self, error: Exception) -> None:
        if not self._has_complained:
            self._has_complained = True
            sys.stderr.write(f"rankwise: the evidence of rank {self._head['rank']} can't be kept: {error!r}\n")

    def _read(self, path: str, size: int) -> bytes:
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if path == self._path and [status.st_dev, status.st_ino] != list(self._head["ring_id"]):
                raise OSError("the script has closed the file of the recorder")
            return file.read(size) or b""


def _write(path: str, head: dict[str, Any], raw: bytes) -> None:
    """Write a line that tells whose the records are, and the records, so that a reader sees all of it or what was there before."""
    body = {**head, "saved_s": time.monotonic(), "time_s": time.time()}
    beside = f"{path}.{os.getpid()}.new"
    with open(beside, "wb") as file:
        file.write(json.dumps(body).encode() + b"\n" + (zlib.compress(raw, 1) if raw else b""))
    os.replace(beside, path)


def _find_owner(path: str) -> int:
    """Return the number of the process whose records a file has; 0 if there is none."""
    try:
        with open(path, "rb") as file:
            return int(json.loads(file.readline())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _read_state(pid: str) -> str:
    """Return the kernel's letter for a process; nothing if there is none, or if it is ending: its memory goes before its sockets do."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode() if int(fields[20]) else ""
    except (OSError, IndexError, ValueError):
        return ""


def _holds(pid: str, path: str) -> bool:
    """Tell whether a process has a file yet, mapped or open; of others' processes it is not known."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            if os.fsencode(path) in file.read():
                return True
        links = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return True
    for link in links:
        try:
            if os.readlink(f"/proc/{pid}/fd/{link}") == path:
                return True
        except OSError:
            continue  # closed meanwhile
    return False


def _list_children() -> list[tuple[int, str, str]]:
    """Return number, name and state of what this process has started, as data-loading workers."""
    found = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children", "rb") as file:
                pids = file.read().split()
        except OSError:
            continue
        for pid in pids:
            try:
                with open(f"/proc/{pid.decode()}/stat", "rb") as file:
                    head, _, tail = file.read().rpartition(b")")
            except OSError:
                continue
            found.append((int(pid), head.partition(b"(")[2].decode("utf-8", "replace"), tail.split()[0].decode()))
    return found
