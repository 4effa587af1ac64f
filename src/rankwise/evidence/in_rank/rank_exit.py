"""Armed in every rank before the script's first line: notes how it ends, and shows its stacks when asked.

This file runs alone inside the user's process: standard library only, no import of rankwise (the parent may
live in another environment, beside the project's own), nothing left in ``sys.modules``, nothing printed.
The notes are JSON lines in a memory file that the parent reads: ``{"note": "exception" | "finished", …}``.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import stat
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType


#: Threads that are perhaps not Gloo's are waited for no longer.
_UNNAMED_S = 0.25
_TORCHS = {"torch", "torchgen", "sympy", "mpmath"}
#: Called behind all functions of atexit, also those of modules that the warm server has imported.
_ENDS: list[Any] = []
atexit.register(lambda: [end(2) for end in _ENDS])


def arm(
    *,
    notes: int | str,
    stacks: int | str,
    stack_signal: int | None,
    lifeline: int | None,
    identities: tuple[int, ...] = (),
    end_mark: str | None = None,
) -> Any:
    """Start recording in this process.

    Args:
        notes: Descriptor (or path) that receives the notes.
        stacks: Descriptor (or path) that receives stacks, on a crash and on ``stack_signal``.
        stack_signal: The signal that asks for stacks; None where the system has none to spare.
        lifeline: The read end of a pipe that the parent holds open; its end means that the parent is gone.
            None where the kernel itself sees to that.
        identities: Device and inode of both files, where they came as descriptors, and of the standard error that the
            parent reads.
        end_mark: What the parent takes out of standard error again, with a gap for a number: 1 is written where the
            interpreter begins to end, 2 behind the functions of atexit. None if standard error is not the parent's.

    Returns:
        The recorder; None if there is nowhere to write.
    """
    if any(_is_foreign(place, known) for place, known in ((notes, identities[:2]), (stacks, identities[2:4]))):
        return None  # a grandchild of a rank without a recorder: the number is somebody's file by now
    notes_fd = _take(notes)
    recorder = _Recorder(notes_fd, end_mark, (identities[4], identities[5]) if len(identities) > 5 else None)
    _muffle_children(notes_fd)
    # Registered before any of the script's own, so called after all of them.
    atexit.register(recorder.on_exit)
    _ENDS.append(recorder.mark_end)
    _watch_exit(recorder)
    if end_mark is not None:
        import threading

        # Python has just printed the text of sys.exit, and waits for threads next; called behind what others register
        # later.
        if hasattr(threading, "_register_atexit"):
            threading._register_atexit(recorder.mark_end, 1)
    recorder.note("armed")
    stacks_fd = _take(stacks)
    _muffle_children(stacks_fd)
    # A script's PYTHONFAULTHANDLER=1 goes to its stderr, as the user asked.
    if not faulthandler.is_enabled():
        faulthandler.enable(file=stacks_fd, all_threads=True)
    if stack_signal is not None and hasattr(faulthandler, "register"):
        # The thread that takes the signal, and no other: reading the frames of one that runs meanwhile can crash the
        # rank.
        faulthandler.register(stack_signal, file=stacks_fd, all_threads=False, chain=False)
    if lifeline is not None:
        _end_with(lifeline)
    return recorder


class _Recorder:
    """Writes the notes of this process, and of no child that it forks."""

    def __init__(self, fd: int, end_mark: str | None, stderr: tuple[int, int] | None) -> None:
        self._fd, self._identity, self._pid = fd, _identity(fd), os.getpid()
        self._end_mark = end_mark
        self._stderr = stderr
        self._num_modules = len(sys.modules)
        #: Names the module of a model in which an exception was raised, from its traceback; once torch.distributed is
        #: there.
        self.name_module: Any = None

    def mark_end(self, stage: int, *, may_wait: bool = True) -> None:
        """Mark in standard error how far the interpreter's end is; where that would have to wait, only if it may.

        What stands before the first mark tells why. Where nothing does, what functions of atexit have written may:
            loggers that
        hold back. What is printed behind the second one, by what is taken apart, tells of no cause.
        """
        if self._end_mark is None or os.getpid() != self._pid or _identity(2) != self._stderr:
            return  # the script has put something else there
        for stream in (sys.stderr, sys.__stderr__) if may_wait else ():
            with _Quiet():
                if stream is not None:
                    stream.flush()
        with _Quiet():
            status = os.fstat(2)
            is_file = stat.S_ISREG(status.st_mode)
            if not is_file:
                (os.write if may_wait else _write_at_once)(2, self._end_mark.format(stage).encode())
            self.note("ending", stage=stage, pid=self._pid, stderr_bytes=status.st_size if is_file else None)

    def on_exit(self) -> None:
        """Note how the script ended.

        Python keeps the exception that it printed last in ``sys.last_exc`` (``last_value`` before 3.12), whatever
        the script made of ``sys.excepthook``. An audit hook would see it earlier, and slow down every ``id()`` and
        ``open()`` of the script; a hook of our own the script could see.
        """
        if os.getpid() != self._pid:
            return
        self._note_end()
        let_threads_settle()

    def _note_end(self) -> None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is None:
            self.note("finished", imported=self._list_imported())
            return
        # A failing note must never hide the script's own error.
        with _Quiet():
            facts = _describe(error, error.__traceback__)
            with _Quiet():
                facts["module"] = self.name_module(error.__traceback__) if self.name_module else ""
            self.note("exception", **facts)
            _write_error_file(facts)
        if type(error) is KeyboardInterrupt:  # as CPython asks, subclasses apart
            _remember_interrupt()

    def _list_imported(self) -> dict[str, int]:
        """Count by package what this rank has imported since its start: a warm server could have done it for all."""
        found: dict[str, int] = {}
        for name in list(sys.modules)[self._num_modules :]:
            package = name.partition(".")[0]
            found[package] = found.get(package, 0) + 1
        return {package: num for package, num in found.items() if package not in _TORCHS}

    def note(self, kind: str, **facts: Any) -> None:
        """Write a line, unless the script closed the descriptor, and the number may now be somebody's file."""
        if _identity(self._fd) != self._identity:
            return
        with _Quiet():
            import json

            line = json.dumps({"note": kind, "monotonic_s": time.monotonic(), "time_s": time.time(), **facts})
            os.write(self._fd, line.encode("utf-8", "backslashreplace") + b"\n")


class _Quiet:
    """Swallows whatever goes wrong inside: contextlib is not worth its import in every rank."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: object, traceback: object) -> bool:
        return isinstance(error, Exception)


def _muffle_children(fd: int) -> None:
    """Keep what forked children write, as data-loading workers are, out of this rank's notes and stacks: their crash is not the rank's.

    /dev/null takes the place of the file. The script's own faulthandler, if it set one, is left alone.
    """
    identity = _identity(fd)

    def muffle() -> None:
        if _identity(fd) == identity:
            with _Quiet():
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, fd, inheritable=False)
                os.close(nowhere)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=muffle)


def _watch_exit(recorder: _Recorder) -> None:
    """Note each call of os._exit: no function of atexit runs behind it, and children that miss this rank then print words of their own."""
    import threading

    leave, raise_exit = os._exit, sys.exit

    def _exit(status: int) -> None:
        try:
            with _Quiet():
                if os.getpid() == recorder._pid:
                    recorder.note("left", frames=_list_callers())
                    for stage in (1, 2):
                        recorder.mark_end(stage, may_wait=False)  # a watchdog calls it where others are stuck
        finally:
            leave(status)  # whatever a signal handler raises meanwhile

    def exit(status: Any = None, /) -> None:  # noqa: A001 - it is shown by this name
        with _Quiet():
            # Nothing else keeps the exception for which a script leaves until it has ended. In a thread, only that ends.
            error = sys.exc_info()[1]
            if os.getpid() == recorder._pid and threading.get_ident() == threading.main_thread().ident:
                code = status & 0xFF if isinstance(status, int) else int(status is not None)
                recorder.note("exit", code=code, **(_describe(error, error.__traceback__) if error else {}))
        raise_exit(status)

    # A process that is to run them finds them by these names.
    _exit.__module__, _exit.__qualname__ = "os", "_exit"
    exit.__module__, exit.__qualname__ = "sys", "exit"
    os._exit, sys.exit = _exit, exit  # type: ignore[assignment]


def _list_callers(most: int = 64) -> list[tuple[str, int, str]]:
    """Return file, line and function of each frame that has called os._exit, innermost first: whose they are, the parent tells."""
    found: list[tuple[str, int, str]] = []
    frame = sys._getframe(1).f_back
    while frame is not None and len(found) < most:
        found.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return found


def _write_at_once(fd: int, text: bytes) -> None:
    """Write to a pipe or a terminal; raise OSError where that would have to wait.

    Opened anew it has flags of its own: those of ``fd`` others share. No module is needed, whose import may wait as
        well.
    """
    own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        os.write(own, text)
    finally:
        os.close(own)


def _remember_interrupt() -> None:
    """Let Python end by SIGINT, as it does without us.

    It remembers an unhandled KeyboardInterrupt in a flag that every evaluated string clears, and the modules
    that we import to describe an error evaluate some (namedtuple does). The same way sets it again.
    """
    try:
        exec("raise KeyboardInterrupt")
    except KeyboardInterrupt:
        return


def _is_foreign(place: int | str, known: tuple[int, ...]) -> bool:
    return isinstance(place, int) and bool(known) and _identity(place) != tuple(known)


def keep_from_children(places: dict[str, Any]) -> bool:
    """Keep the descriptors of the evidence from programs that the script starts; False if they are somebody else's files by now."""
    fds, known = (places["file"], places["asks"]), places["identities"]
    if any(_is_foreign(fd, tuple(known[2 * number : 2 * number + 2])) for number, fd in enumerate(fds)):
        return False
    for fd in fds:
        os.set_inheritable(fd, False)
    return True


def _take(place: int | str) -> int:
    """Return a descriptor for ``rank_channel`` that the script's own children don't inherit."""
    if isinstance(place, str):
        return os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.set_inheritable(place, False)
    return place


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _describe(error: BaseException, traceback: TracebackType | None) -> dict[str, Any]:
    """Return what the parent wants to know about an exception that nobody caught."""
    import traceback as formatter

    try:
        text = str(error).strip()
    except Exception:
        text = "<its text can't be shown>"
    if not text and type(error) is AssertionError:
        text = formatter.extract_tb(traceback)[-1].line or ""
    name = type(error).__qualname__
    if type(error).__module__ not in ("builtins", "__main__"):
        name = f"{type(error).__module__}.{name}"
    lines = formatter.format_exception(type(error), error, traceback)
    return {
        "type": name,
        "message": f"{name}: {text}"[:20_000] if text else name,
        "traceback": "".join(lines)[-60_000:],
        "where": _find_user_line(error, traceback),
    }


def _find_user_line(error: BaseException, traceback: TracebackType | None) -> str | None:
    """Return ``file.py:LINE`` of the innermost line that is neither Python's nor a package's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno or 0}"
    library, innermost, own = os.path.dirname(os.__file__) + os.sep, None, None
    ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
    while traceback is not None:
        file, line = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        innermost = f"{file}:{line}"
        if (
            not file.startswith((library, ours, "<frozen", "<string>"))
            and "site-packages" not in file
            and "dist-packages" not in file
        ):
            own = innermost
        traceback = traceback.tb_next
    return own or innermost


def _write_error_file(facts: dict[str, Any]) -> None:
    """Write torchelastic's error file, unless the script's own ``@record`` did."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    import json

    extra = {"py_callstack": facts["traceback"], "timestamp": str(int(time.time()))}
    body = {"message": {"message": facts["message"], "extraInfo": extra}}
    with open(f"{path}.tmp", "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(body, file)
    os.replace(f"{path}.tmp", path)


def let_threads_settle(bound_s: float = 2.0) -> None:
    """Wait until the threads of Gloo's process groups have nothing left to do: some milliseconds, and no longer than the bound.

    Such a thread drops each work some time after those who waited for it have gone on, and needs the interpreter's lock
    for the tensors in it. If the group goes just then, two things happen: whoever ends it waits for that thread with
        the
    lock in hand (the Reducer of DistributedDataParallel does), and the process hangs for ever; or the interpreter goes
    down, and the process aborts ("terminate called without an active exception", pytorch#190489). While we sleep here
    such a thread gets the lock and finishes. Work that nobody has waited for may still be on its way; that is not seen.

    Args:
        bound_s: Seconds after which a thread that is busy for other reasons is left alone.
    """
    if "torch.distributed.distributed_c10d" not in sys.modules:
        return
    if not os.path.isdir("/proc/self/task"):
        time.sleep(0.02)
        return
    quiet, start = 0, time.monotonic()
    while quiet < 3:
        time.sleep(0.002)
        named, unnamed = _read_group_threads()
        # Unnamed ones may be anybody's.
        if time.monotonic() - start > (bound_s if named else min(bound_s, _UNNAMED_S)):
            return
        quiet = 0 if b"R" in (named or unnamed) else quiet + 1


def _read_group_threads() -> tuple[list[bytes], list[bytes]]:
    """Return the states of Gloo's threads, and of those that may be: where torch names none (2.8), they have the process's name."""
    import threading

    main, mine = str(os.getpid()), str(threading.get_native_id())
    named: list[bytes] = []
    unnamed: list[bytes] = []
    name_of_all = b""
    try:
        tasks = [main, *os.listdir("/proc/self/task")]
    except OSError:
        return named, unnamed
    for task in tasks:
        try:
            with open(f"/proc/self/task/{task}/stat", "rb") as file:
                head, _, tail = file.read().rpartition(b")")
        except OSError:
            continue
        name = head.partition(b"(")[2]
        name_of_all = name_of_all or name
        if name == b"pt_gloo_runloop":
            named.append(tail.split()[0])
        elif name == name_of_all and task not in {main, mine}:
            unnamed.append(tail.split()[0])
    return named, unnamed


def _end_with(lifeline: int) -> None:
    """End this process when the parent's end of the pipe closes (systems without a parent-death signal)."""
    import threading

    if os.name == "nt":
        import msvcrt

        lifeline = msvcrt.open_osfhandle(lifeline, os.O_RDONLY)  # type: ignore[attr-defined]
    else:
        os.set_inheritable(lifeline, False)

    def wait_for_the_end() -> None:
        while os.read(lifeline, 1):
            pass
        if hasattr(os, "killpg"):
            os.killpg(0, 9)
        os._exit(1)

    threading.Thread(target=wait_for_the_end, name="rankwise-lifeline", daemon=True).start()
