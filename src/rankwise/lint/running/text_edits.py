"""What `--fix` does: puts the findings' edits into the text, and nothing else changes in the file.

A finding's edits go in together or not at all; of two that touch the same place the first one wins, and the other one comes
in the next round, when the text has been checked again. An edit after which the text can't be read any more is taken back.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.files import write_atomic
from rankwise.lint.inputs.decoding import decode_any, decode_python
from rankwise.lint.inputs.notebook import code_cells, source_of
from rankwise.lint.inputs.reading import decide_kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwise.lint.finding import Edit, Finding

#: Finds what is wrong with a text; places are those in the text (in the cell, of a notebook).
Check = Callable[[str], "Sequence[Finding]"]
#: A mended text may show a further mistake; two fixes that undo each other would go on for ever.
MOST_ROUNDS = 10
_LINE_END = re.compile(r"\r\n|\r|\n")
_QUOTED = re.compile(r"[ \t>]*")


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


def apply(code: str, edits: Iterable[Edit]) -> str:
    """Return a text with the edits in it.

    Of edits that overlap, the first one is made. Line ends that an edit brings become those of the line it goes to; a
    mark of the byte order is no column.

    Args:
        code: The text as it stands in the file.
        edits: In any order.
    """
    starts = _find_starts(code)
    taken: list[tuple[int, int, str]] = []
    for edit in edits:
        found = _locate(code, starts, edit)
        if not any(_collide(found, other) for other in taken):
            taken.append(found)
    return _replace(code, taken)


def fix_text(code: str, check: Check, *, path: str = "train.py") -> tuple[str, int]:
    """Mend a text until nothing is left that can be mended.

    Args:
        code: The text: Python, shell, Markdown, or a notebook's JSON.
        check: Finds what is wrong with a text.
        path: Tells by its ending what the text is.

    Returns:
        The text, and how many findings were mended.
    """
    num_fixed, dropped = 0, set[_Key]()
    for _ in range(MOST_ROUNDS):
        findings = check(code)
        open_ones = [one for one in findings if one.edits and _key(one) not in dropped]
        if not open_ones:
            break
        num_broken = _count_broken(code, findings, path)
        after, done = _put(code, open_ones, path)
        if done and _count_broken(after, check(after), path) > num_broken:
            after, done = code, []
            for one in open_ones:
                trial, did = _put(code, [one], path)
                if did and _count_broken(trial, check(trial), path) <= num_broken:
                    after, done = trial, did
                    break
                dropped.add(_key(one))
        if after == code:
            break
        code, num_fixed = after, num_fixed + len(done)
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


_Key = tuple[str, str, tuple[str, ...]]


def _key(one: Finding) -> _Key:
    return one.rule, one.message, tuple(edit.text for edit in one.edits)


def _count_broken(code: str, findings: Sequence[Finding], path: str) -> int:
    """Return how many places can't be read as what they should be."""
    return sum(one.rule.startswith("RW9") for one in findings) + (path.endswith(".py") and not _parses(code))


def _parses(code: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the user's text is warned for is no matter here
            ast.parse(code.removeprefix("\ufeff"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _put(code: str, findings: Sequence[Finding], path: str) -> tuple[str, list[Finding]]:
    kind = decide_kind(path, b"")
    if kind == "notebook":
        return _put_into_cells(code, findings)
    prefix = _quote_of(code) if kind == "markdown" else None
    return _put_into_text(code, findings, prefix)


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
        key = "source" if "source" in cell else "input"
        after, did = _put_into_text(source_of(cell), [one for one in findings if one.cell == number])
        if did:
            cell[key] = _split(after) if isinstance(cell[key], list) else after
            done += did
    return json.dumps(notebook, indent=indent, ensure_ascii=is_ascii) + end, done


def _put_into_text(
    code: str, findings: Sequence[Finding], prefix_of: Callable[[int], str] | None = None
) -> tuple[str, list[Finding]]:
    """Return the text with the edits of those findings that do not get in each other's way, and these."""
    starts = _find_starts(code)
    taken: list[tuple[int, int, str]] = []
    done: list[Finding] = []
    for one in findings:
        wanted = [_locate(code, starts, edit, prefix_of) for edit in one.edits]
        # Two findings may want the very same: an import that both need.
        new = [each for each in wanted if each not in taken]
        if not any(_collide(each, other) for each in new for other in taken):
            taken += new
            done.append(one)
    return _replace(code, taken), done


def _find_starts(code: str) -> list[int]:
    return [int(code.startswith("\ufeff")), *(found.end() for found in _LINE_END.finditer(code))]


def _locate(
    code: str, starts: list[int], edit: Edit, prefix_of: Callable[[int], str] | None = None
) -> tuple[int, int, str]:
    """Return where an edit begins and ends in the text, and its own text as it is written there."""
    span = edit.span
    start = _offset(code, starts, span.line, span.col)
    end = max(start, _offset(code, starts, span.end_line, span.end_col))
    text = _LINE_END.sub("\n", edit.text)
    if prefix_of is not None and "\n" in text:
        prefix = prefix_of(span.line)
        head, *others = text.split("\n")
        # What follows a break at the edit's end is in the file already, with what stands before it.
        text = "\n".join([head, *(prefix + line if line else line for line in others)])
        if not others[-1] and prefix and span.col > len(prefix):
            text += prefix
    return start, end, text.replace("\n", _end_of_line(code, start))


def _offset(code: str, starts: list[int], line: int, col: int) -> int:
    if line > len(starts):
        return len(code)
    ends = starts[line] if line < len(starts) else len(code)
    return min(starts[line - 1] + col - 1, ends)


def _end_of_line(code: str, at: int) -> str:
    found = _LINE_END.search(code, at) or _LINE_END.search(code)
    return found[0] if found else "\n"


def _collide(one: tuple[int, int, str], other: tuple[int, int, str]) -> bool:
    if one[0] == other[0] and (one[0] == one[1]) == (other[0] == other[1]):
        return True
    return one[0] < other[1] and other[0] < one[1]


def _replace(code: str, taken: list[tuple[int, int, str]]) -> str:
    # From the end, so that what is before stays where it is; of two at one place the insertion comes first in the text.
    for start, end, text in sorted(taken, key=lambda each: each[:2], reverse=True):
        code = code[:start] + text + code[end:]
    return code


def _quote_of(page: str) -> Callable[[int], str]:
    """Return what tells which marks of a list or a quotation stand before a line of a Markdown page."""
    lines = _LINE_END.split(page)

    def prefix_of(line: int) -> str:
        for number in range(min(line, len(lines)) - 1, -1, -1):
            quoted = _QUOTED.match(lines[number])
            if quoted and lines[number][quoted.end() :].startswith(("```", "~~~")):
                return quoted[0]
        return ""

    return prefix_of
