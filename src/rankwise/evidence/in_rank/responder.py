"""A thread in the rank that waits for its parent's questions, and answers with the stacks of all threads and the flight recorder.

It begins when the script calls init_process_group, so one that never does never has it. It looks at the flight recorder by itself
as well, for collectives of which nobody has asked yet, and takes care to cost next to nothing. This file stands alone, as
``rank_exit.py`` does.
"""

from __future__ import annotations

import _thread
import atexit
import json
import os
import select
import signal
import struct
import sys
import threading
import time
from importlib import import_module
from typing import Any

_QUESTION = struct.Struct("<Q")
#: Seconds between two looks at the flight recorder: at least, while nothing happens, and as a multiple of what one has
#: cost.
_FIRST_S, _LOOK_EVERY_S, _IDLE_S, _COST_FACTOR = 2.0, 1.0, 8.0, 500.0
_MOST_THREADS, _MOST_FRAMES = 64, 100
#: So long may an answer take that has just begun, when the script is over.
_LAST_S = 2.0


class StackResponder:
    """The thread and what it writes.

    Args:
        asks: The descriptor from which questions are read.
        ring: The module of that name.
        writer: Writes into the memory file.
        flight: The flight recorder.
        list_handled: Returns the exceptions that threads are handling, by the thread's identity.
        find_module: Returns the name of the module that a frame is in.
    """

    def __init__(self, asks: int, ring: Any, writer: Any, flight: Any, list_handled: Any, find_module: Any) -> None:
        self._asks, self._ring, self._writer, self._flight = asks, ring, writer, flight
        self._list_handled, self._find_module = list_handled, find_module
        self._lock = threading.Lock()
        self._is_over = self._has_begun = False
        self._pid = os.getpid()

    def begin(self) -> None:
        """Begin to answer, and to count the optimizer's steps; once."""
        if self._has_begun or self._is_over:
            return
        self._has_begun = True
        self._count_steps()
        atexit.register(self._end)
        start_thread(self._run)

    def forget(self) -> None:
        """In a forked child, which has no such thread: write nothing."""
        self._is_over = True

    def _count_steps(self) -> None:
        compiler: Any = import_module("torch.compiler")
        optimizer: Any = import_module("torch.optim.optimizer")
        hook = _make_step_hook(self._writer.count_step, time.monotonic, compiler.is_compiling)
        optimizer.register_optimizer_step_post_hook(hook)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._asks, select.POLLIN)
        begin_s, cost_s, rest_s, seen = time.monotonic(), 0.0, _FIRST_S, b""
        while True:
            try:
                ready = poll.poll(int(rest_s * 1000))
                question = os.read(self._asks, 1 << 12) if ready else b""
            except OSError:
                return  # the script has closed it
            if ready and not question:
                return  # the parent is gone
            with self._lock:
                if self._is_over:
                    return
                moves, before_s = self._writer.read_moves(), time.thread_time()
                if question or moves != seen:
                    self._answer(question)
                    last_s = time.thread_time() - before_s
                    cost_s += last_s
                    # Until all this, with one more like the last, is no more than one part in so many of the time.
                    due_s = begin_s + (cost_s + last_s) * _COST_FACTOR
                    rest_s = max(_LOOK_EVERY_S, due_s - time.monotonic())
                else:
                    rest_s = min(_IDLE_S, rest_s * 2)
                seen = moves

    def _answer(self, question: bytes) -> None:
        try:
            if question:
                self._write_stacks()
            self._flight.write()
        except Exception as error:
            # Not torch as we know it: what was asked is answered with what there is.
            self._flight.write_failure(error)
        if len(question) >= _QUESTION.size:
            last = question[len(question) // _QUESTION.size * _QUESTION.size - _QUESTION.size :]
            self._writer.mark(self._ring.ASKED_AT, _QUESTION.unpack_from(last)[0])

    def _write_stacks(self) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        found = self._list_handled()
        stacks: dict[str, list[tuple[str, int, str]]] = {}
        handled: dict[str, dict[str, Any]] = {}
        modules: dict[str, str] = {}
        for ident, frame in list(sys._current_frames().items())[:_MOST_THREADS]:
            if ident != _thread.get_ident():
                name = names.get(ident) or f"thread {ident}"
                name = name if name not in stacks else f"{name} ({ident})"
                stacks[name] = list_frames(frame)
                if module := self._name_module(frame):
                    modules[name] = module
                if ident in found:
                    handled[name] = found[ident]
        body = {"stacks": stacks, "handled": handled, "modules": modules}
        raw = json.dumps(body, separators=(",", ":")).encode()
        if len(raw) > self._ring.get_room("stacks"):
            main = threading.main_thread().name
            handled = {name: body for name, body in handled.items() if name == main}
            body = {"stacks": {main: stacks.get(main, [])[:30]}, "handled": handled, "modules": modules}
            raw = json.dumps(body, separators=(",", ":")).encode()
        if len(raw) <= self._ring.get_room("stacks"):
            self._writer.report("stacks", raw, time.monotonic())

    def _name_module(self, frame: Any) -> str:
        try:
            return str(self._find_module(frame))
        except Exception:  # a module of the user's with ways of its own
            return ""

    def _end(self) -> None:
        """At the rank's end: write the flight recorder once more, and let the thread do nothing that C++ would have to unwind."""
        if os.getpid() != self._pid or not self._lock.acquire(timeout=_LAST_S):
            return
        if not self._is_over:
            self._is_over = True
            self._answer(b"")
        self._lock.release()


def start_thread(run: Any) -> None:
    """Start a thread that the script does not see: a `Thread` it may count, and a signal that this one took would not wake the main one."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        _thread.start_new_thread(run, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def list_frames(frame: Any) -> list[tuple[str, int, str]]:
    """Return file, line and function of each frame, innermost first; never a variable."""
    frames: list[tuple[str, int, str]] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        frames.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return frames


def _make_step_hook(count: Any, get_time: Any, is_compiling: Any) -> Any:
    # No names of this module: torch.compile would have to import it, and takes the first branch.
    def count_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not is_compiling():
            count(get_time())

    return count_step
