"""A CSV file that a training adds rows to: whole rows only, and none of a step that did not happen after all."""

from __future__ import annotations

import csv
import itertools
import os
from typing import TYPE_CHECKING, Any, final

from rankwise.base.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

#: Bytes; what has a longer first line is nobody's table.
_LONGEST_HEADER = 1 << 16


@final
class CsvTable:
    """One file; what can't be written (a full disk) is lost.

    Args:
        path: The file; its folder is made when it is opened.
        columns: Those that are always there; the first is the step, and rows come with growing steps.
        complain: Called with what went wrong.
        grows: Whether rows may have more columns, named by users; then there is no file before the first row.
    """

    def __init__(
        self, path: Path, columns: tuple[str, ...], complain: Callable[[str], None], *, grows: bool = False
    ) -> None:
        self._path, self._fixed, self._complain, self._grows = path, columns, complain, grows
        self._columns = columns
        self._fd: int | None = None
        self._size_bytes = 0
        self._is_on = False

    def open(self, step: int) -> None:
        """Begin to write, and take out the rows of steps after ``step``; at step 0, all."""
        self.close()
        try:
            if self._path.exists() or not self._grows:
                self._open(step)
            self._is_on = True
        except OSError as error:
            self._complain(f"rows are missing in {self._path}: {error}")

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows, all or none of them; a name that is new gets a column, which is empty in the rows before."""
        if self._is_on:
            try:
                self._add([*rows])
            except OSError as error:
                self._complain(f"rows are missing in {self._path}: {error}")

    def close(self) -> None:
        """Close the file."""
        self._is_on = False
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        # A training that was dropped without an end, in a notebook, keeps no descriptor.
        self.close()

    def _open(self, step: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        size = self._find_end(step)
        if size is None and self._path.exists():
            self._put_aside()
        if size is None or not step:
            self._columns = self._fixed
            header = _to_line(self._columns)
            write_atomic(self._path, header)
            size = len(header)
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))
        # One call that either happened or did not: no reader ever sees a row twice, and large files are not written
        # anew.
        os.ftruncate(fd, size)
        self._fd, self._size_bytes = fd, size

    def _put_aside(self) -> None:
        """Rename a file that somebody else wrote: its rows are not ours to cut."""
        if not self._path.stat().st_size:
            return
        names = (f"{self._path.name}.old{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
        kept = next(path for path in map(self._path.with_name, names) if not path.exists())
        self._path.rename(kept)
        self._complain(f"{self._path} has other columns than this training writes: it is now called {kept.name}")

    def _add(self, rows: list[Mapping[str, Any]]) -> None:
        if self._fd is None:
            self._open(0)
        if self._grows and (new := [name for row in rows for name in row if name not in self._columns]):
            self._widen([*dict.fromkeys(new)])
        data = b"".join(_to_line(map(row.get, self._columns)) for row in rows)
        assert self._fd is not None  # noqa: S101 - it was opened above
        if os.write(self._fd, data) != len(data):
            # Half a row would be read as a wrong number.
            os.ftruncate(self._fd, self._size_bytes)
            raise OSError("only a part of the rows could be written: the disk is full")
        self._size_bytes += len(data)

    def _widen(self, names: list[str]) -> None:
        columns = (*self._columns, *names)
        _, *rows = self._path.read_bytes()[: self._size_bytes].splitlines(keepends=True)
        empty = b"," * len(names) + b"\n"
        whole = _to_line(columns) + b"".join(row.removesuffix(b"\n") + empty for row in rows)
        write_atomic(self._path, whole)
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._size_bytes, self._columns = fd, len(whole), columns

    def _find_end(self, step: int) -> int | None:
        """Return where the rows up to ``step`` end, and take up the columns; None if the file is absent or not of this form."""
        try:
            with self._path.open("rb") as file:
                header = file.readline(_LONGEST_HEADER)
                columns = tuple(next(csv.reader([header.decode(errors="replace")]), ()))
                known = columns[: len(self._fixed)] if self._grows else columns
                if known != self._fixed or header != _to_line(columns):
                    return None
                end = len(header)
                for row in file:
                    number = row.partition(b",")[0]
                    # A row without its end was cut off by a kill.
                    if not row.endswith(b"\n") or not number.isdigit() or int(number) > step:
                        break
                    end += len(row)
        except (FileNotFoundError, csv.Error):
            return None
        self._columns = columns
        return end


def _to_line(values: Iterable[Any]) -> bytes:
    return (",".join(map(_to_text, values)) + "\n").encode()


def _to_text(value: Any) -> str:
    """Return a number with all its digits; what is unknown is empty."""
    if value is None:
        return ""
    if type(value) is float or type(value) is int:
        return repr(value)
    # A row is a line, whatever a user's words have in them.
    text = " ".join(str(value).splitlines())
    return '"' + text.replace('"', '""') + '"' if "," in text or '"' in text else text
