"""The user's lines that are shown beside findings."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.lint.inputs.decoding import decode_any, decode_python
from rankwise.lint.inputs.notebook import code_cells, source_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def lines_reader(given: Mapping[str, str] | None = None) -> Callable[[str, int | None], Sequence[str]]:
    """Return what gives the lines of a file, or of one cell of a notebook; none if it can't be read.

    Args:
        given: Texts that are no files: of standard input, of a command.
    """
    texts = dict(given or {})

    @cache
    def lines_of(path: str, cell: int | None) -> Sequence[str]:
        text = texts[path] if path in texts else _read(path)
        if cell is not None:
            try:
                text = source_of(code_cells(json.loads(text))[cell])
            except (ValueError, KeyError, RecursionError):
                return ()
        return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")

    return lines_of


def _read(path: str) -> str:
    try:
        data = Path(path).read_bytes()
    except OSError:
        return ""
    return (decode_python if path.endswith(".py") else decode_any)(data).text
