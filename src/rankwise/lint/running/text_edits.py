"""What `--fix` does: puts the findings' edits into the text, and nothing else changes in the file.

A finding's edits go in together or not at all; of two that touch the same place the first one wins, and the other one comes
in the next round, when the text has been checked again. A round after which the text can't be read any more is taken back.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.files import write_atomic
from rankwise.lint.inputs.decoding import decode_any, decode_python
from rankwise.lint.inputs.notebook import code_cells, source_of
from rankwise.lint.inputs.reading import decide_kind
from rankwise.lint.inputs.unparsed import find_unparsed
from rankwise.lint.running.files import find_roots, summarize
from rankwise.lint.running.one_file import Checker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.running.settings import Settings

#: Finds what is wrong with a text; places are those in the text (in the cell, of a notebook).
Check = Callable[[str], "Sequence[Finding]"]
#: A mended text may show a further mistake; two fixes that undo each other would go on for ever.
MOST_ROUNDS = 10
_LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """A file before and after.

    Attributes:
        path: The file as the user named it.
        before: Its text.
        after: The text to write.
        encoding: What to write it with.
    """

    path: str
    before: str
    after: str
    encoding: str = "utf-8"


def mend_files(findings: Iterable[Finding], settings: Settings) -> Iterator[Mended]:
    """Give the files that have something to mend; nothing is written.

    Args:
        findings: Those that are shown; of what is not shown nothing is mended.
        settings: What is shown.
    """
    checker = Checker(roots=find_roots(settings.folder))

    def check(path: str, data: bytes) -> Sequence[Finding]:
        return summarize([checker.check_data(path, data)], settings, []).findings

    for path in dict.fromkeys(one.path for one in findings if one.edits):
        try:
            data = Path(path).read_bytes()
        except OSError:
            continue  # a command has no file
        mended = mend(path, data, check)
        if mended is not None and mended.after != mended.before:
            yield mended


def fix_text(code: str, check: Check, *, path: str = "train.py") -> tuple[str, int]:
    """Mend a text until nothing is left that can be mended.

    Args:
        code: The text: Python, shell, Markdown, or a notebook's JSON.
        check: Finds what is wrong with a text.
        path: Tells by its ending what the text is.

    Returns:
        The text, and how many findings were mended.
    """
    num_fixed, findings = 0, check(code)
    for _ in range(MOST_ROUNDS):
        put = _put_into_cells if decide_kind(path, b"") == "notebook" else _put_into_text
        after, done = put(code, [one for one in findings if one.edits])
        if after == code:
            break
        now = check(after)
        if _count_broken(after, now, path) > _count_broken(code, findings, path):
            break
        code, findings, num_fixed = after, now, num_fixed + len(done)
    return code, num_fixed


def mend(path: str, data: bytes, check: Callable[[str, bytes], Sequence[Finding]]) -> Mended | None:
    """Return a file's text before and after; nothing is written.

    Args:
        path: The file as the user named it.
        data: What stands in it.
        check: Finds what is wrong with such a file, given its name and content.

    Returns:
        None if the file's bytes are no text that could be written back as it was.
    """
    decoded = decode_any(data) if decide_kind(path, data[:4096]) != "python" else decode_python(data)
    encoding = decoded.encoding
    if decoded.problem or decoded.text.encode(encoding) != data:
        return None

    def check_text(text: str) -> Sequence[Finding]:
        return check(path, text.encode(encoding, "replace"))

    after, _ = fix_text(decoded.text, check_text, path=path)
    try:
        after.encode(encoding)
    except UnicodeEncodeError:
        return None
    return Mended(path=path, before=decoded.text, after=after, encoding=encoding)


def write(mended: Mended) -> None:
    """Write the file: whole or not at all, with the rights that it had; a link stays a link.

    Raises:
        OSError: The file or its folder is not writable.
    """
    target = Path(mended.path).resolve()
    mode = target.stat().st_mode & 0o7777
    write_atomic(target, mended.after.encode(mended.encoding), mode=mode)


def diff(mended: Mended) -> str:
    """Return what would be changed, as a unified diff that `patch -p0` takes."""
    lines = difflib.unified_diff(_split(mended.before), _split(mended.after), fromfile=mended.path, tofile=mended.path)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _split(text: str) -> list[str]:
    # splitlines() would also break at form feeds, which are a part of a line.
    return [line for line in re.split(r"(?<=\n)", text) if line]


def _count_broken(code: str, findings: Sequence[Finding], path: str) -> int:
    """Return how many places can't be read as what they should be."""
    is_broken = path.endswith(".py") and find_unparsed(code.removeprefix("\ufeff")) is not None
    return sum(one.rule.startswith("RW9") for one in findings) + is_broken


def _put_into_cells(code: str, findings: Sequence[Finding]) -> tuple[str, list[Finding]]:
    """Return the notebook with the edits; one that can't be written back as it was stays as it is."""
    notebook = json.loads(code)
    done: list[Finding] = []
    end = "\n" if code.endswith("\n") else ""
    for indent, is_ascii in itertools.product((1, 2, 4, None), (False, True)):
        if json.dumps(notebook, indent=indent, ensure_ascii=is_ascii) + end == code:
            break
    else:
        return code, []
    for number, cell in code_cells(notebook).items():
        after, did = _put_into_text(source_of(cell), [one for one in findings if one.cell == number])
        if did:
            cell["source"] = _split(after) if isinstance(cell["source"], list) else after
            done += did
    return json.dumps(notebook, indent=indent, ensure_ascii=is_ascii) + end, done


def _put_into_text(code: str, findings: Sequence[Finding]) -> tuple[str, list[Finding]]:
    """Return the text with the edits of those findings that do not get in each other's way, and these."""
    # A mark of the byte order is no column.
    starts = [int(code.startswith("\ufeff")), *(found.end() for found in _LINE_END.finditer(code))]
    taken: list[tuple[int, int, str]] = []
    done: list[Finding] = []
    for one in findings:
        spans = [(edit.span, edit.text) for edit in one.edits]
        wanted = [
            (
                start := _offset(code, starts, at.line, at.col),
                max(start, _offset(code, starts, at.end_line, at.end_col)),
                text,
            )
            for at, text in spans
        ]
        # Two findings may want the very same.
        new = [each for each in wanted if each not in taken]
        if not any(_collide(each, other) for each in new for other in taken):
            taken += new
            done.append(one)
    # From the end, so that what is before stays where it is; of two at one place the insertion comes first in the text.
    for start, end, text in sorted(taken, key=lambda each: each[:2], reverse=True):
        code = code[:start] + text + code[end:]
    return code, done


def _offset(code: str, starts: list[int], line: int, col: int) -> int:
    if line > len(starts):
        return len(code)
    ends = starts[line] if line < len(starts) else len(code)
    return min(starts[line - 1] + col - 1, ends)


def _collide(one: tuple[int, int, str], other: tuple[int, int, str]) -> bool:
    if one[0] == other[0] and (one[0] == one[1]) == (other[0] == other[1]):
        return True
    return one[0] < other[1] and other[0] < one[1]
