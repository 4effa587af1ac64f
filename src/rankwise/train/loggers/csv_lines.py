"""A row for each optimizer step, for spreadsheets and pandas."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, final

from rankwise.base.files import write_atomic
from rankwise.train.events import Logger
from rankwise.train.loggers.outlet import warn

if TYPE_CHECKING:
    from rankwise.train.events import Ended, Report, Started

_HEADER = b"step,epoch,samples,loss,lr,grad_norm\n"


@final
class CsvLines(Logger):
    """Appends ``step,epoch,samples,loss,lr,grad_norm``, one row a step; what is unknown is empty.

    The samples are known at the last step of each report.
    A new training writes the file anew; one that goes on cuts off the rows of steps that did not happen after all. Numbers
    have all their digits; what is not finite is ``nan``, ``inf`` or ``-inf``.

    What can't be written (a full disk) is lost, with a warning; the training goes on.

    Args:
        path: The file; its folder is made when the training starts.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._fd: int | None = None
        self._size_bytes = 0
        self._has_warned = False

    # Nothing to do at a step: this very function says so, and nobody calls it.
    on_step = Logger.on_step
    on_evaluation = Logger.on_evaluation

    def on_start(self, started: Started) -> None:
        """Open the file, and take out what did not happen."""
        self._close()
        try:
            self._open(started.step)
        except OSError as error:
            self._complain(error)

    def on_report(self, report: Report) -> None:
        """Write the steps since the last report."""
        if self._fd is not None:
            try:
                self._append(self._fd, "".join(_to_rows(report)).encode())
            except OSError as error:
                self._complain(error)

    def on_end(self, ended: Ended) -> None:  # noqa: ARG002 - the protocol's form
        """Close the file."""
        self._close()

    def _open(self, step: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        size = _find_end(self._path, step) if step else None
        if size is None:
            if step and self._path.exists():
                # Rows that were written by somebody else are not ours to cut.
                self._path.replace(self._path.with_name(f"{self._path.name}.old"))
            write_atomic(self._path, _HEADER)
            size = len(_HEADER)
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))
        # One call that either happened or did not: no reader ever sees a row twice, and large files are not written anew.
        os.ftruncate(fd, size)
        self._fd, self._size_bytes = fd, size

    def _append(self, fd: int, rows: bytes) -> None:
        if os.write(fd, rows) != len(rows):
            # Half a row would be read as a wrong number.
            os.ftruncate(fd, self._size_bytes)
            raise OSError("only a part of the rows could be written: the disk is full")
        self._size_bytes += len(rows)

    def _complain(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(f"rows are missing in {self._path}: {error}")

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _to_rows(report: Report) -> list[str]:
    count = len(report.losses)
    first = report.step - count + 1
    epochs, lrs, norms = (_pad(values, count) for values in (report.epochs, report.lrs, report.grad_norms))
    samples = [""] * (count - 1) + [str(report.samples)]
    return [
        f"{first + at},{epochs[at]},{samples[at]},{loss!r},{lrs[at]},{norms[at]}\n"
        for at, loss in enumerate(report.losses)
    ]


def _pad(values: tuple[float, ...] | tuple[int, ...], count: int) -> list[str]:
    texts = [repr(value) for value in values]
    return texts if len(texts) == count else [""] * count


def _find_end(path: Path, step: int) -> int | None:
    """Return where the rows up to ``step`` end, or None if the file is absent or not of this form."""
    try:
        with path.open("rb") as file:
            if file.readline() != _HEADER:
                return None
            end = len(_HEADER)
            for row in file:
                number = row.partition(b",")[0]
                # A row without its end was cut off by a kill.
                if not row.endswith(b"\n") or not number.isdigit() or int(number) > step:
                    break
                end += len(row)
    except FileNotFoundError:
        return None
    return end
