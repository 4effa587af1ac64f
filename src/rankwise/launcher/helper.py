"""Our side of the helper: the process that does what needs torch, so that the parent never imports it."""

from __future__ import annotations

import itertools
import json
import queue
import subprocess
import threading
from typing import TYPE_CHECKING, final

from rankwise.base.errors import LaunchError
from rankwise.base.os_calls import IS_LINUX, die_with_parent
from rankwise.engine import HELPER_PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankwise.base.clock import Clock
    from rankwise.launcher.signals import Signals


_TICK_S = 0.05


class InterruptedByUser(Exception):  # noqa: N818 - it is no error
    """A signal came while we waited for an answer; the loop that takes signals deals with it."""


@final
class Helper:
    """Asks the helper process."""

    def __init__(self, python: str, signals: Signals, clock: Clock) -> None:
        self._signals, self.clock = signals, clock
        self._process = subprocess.Popen(
            [python, "-u", str(HELPER_PROCESS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True, preexec_fn=die_with_parent if IS_LINUX else None,  # noqa: PLW1509 - before any thread of ours
        )  # fmt: skip
        self._requests: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._arrived, self._numbers = threading.Condition(), itertools.count()
        self._awaited: set[int] = set()
        self._answers: dict[int, dict[str, object]] = {}
        self._is_gone = False
        self._news: dict[str, object] = {}
        self._reported: queue.SimpleQueue[str] = queue.SimpleQueue()
        for action in (self._read, self._write):
            threading.Thread(target=action, name="rankwise-helper", daemon=True).start()

    def tell(self, op: str, **facts: object) -> None:
        """Have it do something of which we want to hear no more; never waits.

        Args:
            op: What to do.
            **facts: What belongs to it.
        """
        self._requests.put(json.dumps({"op": op, **facts}) + "\n")

    def ask(
        self,
        op: str,
        *,
        timeout_s: float,
        on_wait: Callable[[float], None] | None = None,
        on_tick: Callable[[], None] | None = None,
        **facts: object,
    ) -> dict[str, object]:
        """Ask and wait for the answer.

        Args:
            op: The question; ``facts`` belong to it.
            timeout_s: When to give up.
            **facts: What belongs to the question.
            on_wait: Called about once a second with the seconds waited so far.
            on_tick: Called many times a second meanwhile; it may ask something else, and what it raises ends the wait.

        Raises:
            LaunchError: It can't answer; the message is its error's text.
            InterruptedByUser: A signal came in meanwhile.
        """
        number = next(self._numbers)
        self._awaited.add(number)
        try:
            self._requests.put(json.dumps({"op": op, "number": number, **facts}) + "\n")
            return self._wait_answer(number, op, timeout_s, on_wait, on_tick)
        finally:
            self._awaited.discard(number)

    def _wait_answer(
        self,
        number: int,
        op: str,
        timeout_s: float,
        on_wait: Callable[[float], None] | None,
        on_tick: Callable[[], None] | None,
    ) -> dict[str, object]:
        start, noticed_s = self.clock.monotonic(), 0.0
        while (waited := self.clock.monotonic() - start) < timeout_s:
            with self._arrived:
                self._arrived.wait_for(lambda: number in self._answers or self._is_gone, timeout=_TICK_S)
                answer = self._answers.pop(number, None)
            if answer is None:
                if self._is_gone:
                    raise self._died(op)
                if self._signals.has_pending:
                    raise InterruptedByUser
                if on_tick is not None:
                    on_tick()
                if on_wait is not None and waited - noticed_s >= 1:
                    noticed_s = waited
                    on_wait(waited)
                continue
            if "error" in answer:
                raise LaunchError(str(answer["error"]))
            return answer
        raise LaunchError(f"no answer to {op!r} within {timeout_s:.0f} s from the helper")

    def news(self, name: str) -> object:
        """Return what the helper last told unasked, under ``name``; None if nothing."""
        return self._news.get(name)

    def take_messages(self) -> Iterator[str]:
        """Return what it has to say to the user, each line once."""
        while not self._reported.empty():
            yield self._reported.get()

    def forget_news(self, *names: str) -> None:
        """Drop what was told before, under some names or all."""
        self._news = {name: value for name, value in self._news.items() if names and name not in names}

    def close(self) -> None:
        """End the process."""
        self._requests.put("")
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue

    def _died(self, op: str) -> LaunchError:
        code = self._process.wait()
        return LaunchError(
            f"the helper process ended ({code}) while it was asked to {op}", hint="its own error is above"
        )

    def _read(self) -> None:
        stream = self._process.stdout
        for line in stream if stream is not None else ():
            message = json.loads(line)
            if "said" in message:
                self._reported.put(message["said"])
            elif "answer" not in message:
                self._news.update(message)
            elif (number := message["number"]) in self._awaited:  # else nobody waits for it any more
                with self._arrived:
                    self._answers[number] = message["answer"]
                    self._arrived.notify_all()
        with self._arrived:
            self._is_gone = True
            self._arrived.notify_all()

    def _write(self) -> None:
        """Hand on requests: who asks must not be held up by a pipe that is full."""
        stream = self._process.stdin
        while stream is not None and (request := self._requests.get()):
            try:
                stream.write(request)
                stream.flush()
            except (BrokenPipeError, ValueError):  # it has ended, or was closed: the reader sees that too
                return
