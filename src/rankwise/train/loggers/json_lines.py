"""The run's journal: everything that a training tells, as JSON lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rankwise.base.clock import SYSTEM_CLOCK, Clock
from rankwise.train.events import Logger
from rankwise.train.loggers.outlet import warn

if TYPE_CHECKING:
    from rankwise.train.events import Ended, Evaluated, Report, Started


@final
class JsonLines(Logger):
    """Appends a line for each event: ``{"kind": "report", "time": 1767225600.5, "step": 10, ...}``.

    The kinds are started, report, evaluated and ended, and the keys are the fields of the classes of these names. JSON
    has no NaN: it is the string "NaN", and there are "Infinity" and "-Infinity". Nothing is ever taken out: a
    ``started`` with a step means that what was recorded of later steps did not happen. ``rankwise compare`` reads it.

    A line that can't be written (a full disk) is lost, with a warning; the training continues.

    Args:
        path: The file; its folder is made when the training starts.
        clock: Where time comes from.
    """

    def __init__(self, path: str | Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path, self._clock = Path(path), clock
        self._fd: int | None = None
        self._is_torn = self._has_warned = False

    # Nothing to do at a step: this very function says so, and nobody calls it.
    on_step = Logger.on_step

    def on_start(self, started: Started) -> None:
        """Open the file, and write how the training began."""
        self._close()
        self._write("started", started)

    def on_report(self, report: Report) -> None:
        """Write a report."""
        self._write("report", report)

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Write the result of an evaluation."""
        self._write("evaluated", evaluated)

    def on_end(self, ended: Ended) -> None:
        """Write how it ended, and close the file."""
        self._write("ended", ended)
        self._close()

    def __del__(self) -> None:
        # A training that was dropped without an end, in a notebook, keeps no descriptor.
        self._close()

    def _write(self, kind: str, event: Started | Report | Evaluated | Ended) -> None:
        facts = {"kind": kind, "time": round(self._clock.time(), 3)}
        facts.update((field.name, getattr(event, field.name)) for field in fields(event))
        line = to_json(facts).encode() + b"\n"
        try:
            if self._fd is None:
                self._fd = self._open()
            # One call for the whole line, straight to the kernel: a kill can't tear what has been written before.
            raw = b"\n" + line if self._is_torn else line
            self._is_torn = os.write(self._fd, raw) != len(raw)
        except OSError as error:
            self._complain(str(error))
            return
        if self._is_torn:
            self._complain("only a part of a line could be written: the disk is full")

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
        size = os.fstat(fd).st_size
        if size:
            os.lseek(fd, size - 1, os.SEEK_SET)
            self._is_torn = os.read(fd, 1) != b"\n"
        return fd

    def _complain(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(f"lines are missing in the journal {self._path}: {what}")

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def to_json(facts: Mapping[str, Any]) -> str:
    """Return one line of JSON; numbers that it has no word for are strings, and unknown objects are their text."""
    try:
        return json.dumps(facts, default=_to_plain, allow_nan=False)
    except (
        ValueError,
        TypeError,
    ):  # a number that is not finite, or a key that is no string: seldom, so told apart only now
        return json.dumps(_spell(facts), default=_to_plain, allow_nan=False)


def _spell(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _spell(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spell(item) for item in value]
    if isinstance(value, (str, bool, int, float)) or value is None:
        return value
    return _spell(_to_plain(value))


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if callable(item := getattr(value, "item", None)):  # a number of numpy's or torch's
        number = item()
        if isinstance(number, (bool, int, float)):
            return number
    return str(value)
