"""Our side of the helper: the process that does what needs torch, so that the parent never imports it."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from typing import TYPE_CHECKING, final

from rankwise.base.errors import LaunchError
from rankwise.base.osdoor import IS_LINUX, die_with_parent
from rankwise.engine import HELPER_PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.base.clock import Clock
    from rankwise.launcher.signals import Signals


class InterruptedByUser(Exception):  # noqa: N818 - it is no error
    """A signal came while we waited for an answer; the loop that takes signals deals with it."""


@final
class Helper:
    """Asks the helper process; one question at a time."""

    def __init__(self, python: str, signals: Signals, clock: Clock) -> None:
        self._signals, self._clock = signals, clock
        self._process = subprocess.Popen(
            [python, "-u", str(HELPER_PROCESS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True, preexec_fn=die_with_parent if IS_LINUX else None,  # noqa: PLW1509 - before any thread of ours
        )  # fmt: skip
        self._answers: queue.SimpleQueue[dict[str, object] | None] = queue.SimpleQueue()
        self._news: dict[str, object] = {}
        threading.Thread(target=self._read, name="rankwise-helper", daemon=True).start()

    def ask(
        self, op: str, *, timeout_s: float, on_wait: Callable[[float], None] | None = None, **facts: object
    ) -> dict[str, object]:
        """Ask and wait for the answer.

        Args:
            op: The question; ``facts`` belong to it.
            timeout_s: When to give up.
            **facts: What belongs to the question.
            on_wait: Called about once a second with the seconds waited so far.

        Raises:
            LaunchError: It can't answer; the message is its error's text.
            InterruptedByUser: A signal came in meanwhile.
        """
        if self._process.stdin is None:
            raise LaunchError("the helper has no input")
        start = self._clock.monotonic()
        try:
            self._process.stdin.write(json.dumps({"op": op, **facts}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died(op) from None
        told = 0.0
        while (waited := self._clock.monotonic() - start) < timeout_s:
            try:
                answer = self._answers.get(timeout=0.05)
            except queue.Empty:
                if self._signals.has_pending:
                    raise InterruptedByUser from None
                if on_wait is not None and waited - told >= 1:
                    told = waited
                    on_wait(waited)
                continue
            if answer is None:
                raise self._died(op)
            if "error" in answer:
                raise LaunchError(str(answer["error"]))
            return answer
        raise LaunchError(f"no answer to {op!r} within {timeout_s:.0f} s from the helper")

    def news(self, name: str) -> object:
        """Return what the helper last told unasked, under ``name``; None if nothing."""
        return self._news.get(name)

    def forget_news(self) -> None:
        """Drop what was told before."""
        self._news = {}

    def close(self) -> None:
        """End the process."""
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
        return LaunchError(f"the helper process ended ({code}) while it was asked to {op}",
                           hint="its own error stands above")  # fmt: skip

    def _read(self) -> None:
        stream = self._process.stdout
        for line in stream if stream is not None else ():
            message = json.loads(line)
            if "answer" in message:
                self._answers.put(message["answer"])
            else:
                self._news.update(message)
        self._answers.put(None)
