"""Pages of documentation, written in Markdown, as lines for a terminal."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

from rankwise.base import terminal
from rankwise.lint.reporters.text_form import paint

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST_LINE = 100
_BOLD = re.compile(r"\*\*(.+?)\*\*", re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page_width() -> int:
    """Return how many columns a page takes."""
    # With a pager behind a pipe, our standard error is still the terminal.
    return min(terminal.width(1) or terminal.width(2) or _LONGEST_LINE, _LONGEST_LINE)


def write_page(page: str, *, width: int, color: bool) -> Iterator[str]:
    """Yield the lines of a page: paragraphs are wrapped, code is indented, and each is followed by an empty line."""
    text = page.strip()
    at = 0
    for fence in _FENCE.finditer(text):
        yield from _write_prose(text[at : fence.start()], width=width, color=color)
        yield from (f"    {line}".rstrip() for line in fence[1].splitlines())
        yield ""
        at = fence.end()
    yield from _write_prose(text[at:], width=width, color=color)


def _write_prose(text: str, *, width: int, color: bool) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        for item in re.split(r"\n(?=- )", paragraph):
            marked = _BOLD.sub("\x01\\1\x02", " ".join(item.split()))
            indent = "  " if item.startswith("- ") else ""
            for line in textwrap.wrap(
                marked, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            ):
                yield _paint_marks(line, color=color)
        if paragraph:
            yield ""


def _paint_marks(line: str, *, color: bool) -> str:
    """Put colours in the place of marks: they are set after the wrapping, as they take no column."""
    if not color:
        return line.replace("\x01", "").replace("\x02", "")
    shown = line.replace("\x01", "\x1b[1m").replace("\x02", "\x1b[0m")
    return _CODE.sub(lambda found: paint(found[0], "cyan", color=color), shown)
