"""What is shown of findings: text with the source line, one line each, JSON, GitHub's commands."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from lint.found import SOURCE, examples, finding, lines_of
from rankwise.base.errors import UsageError
from rankwise.lint.finding import Span
from rankwise.lint.reporters import FORMATS, render
from rankwise.lint.reporters.text import mark

if TYPE_CHECKING:
    from collections.abc import Callable

_ESCAPES = re.compile(r"\x1b\[[\d;]*m")


def test_text(golden: Callable[[str, str], None]) -> None:
    """Each finding shows its line with marks below the right letters, its notes with theirs, and what to do."""
    golden("check_text", render(examples(), "text", lines_of=lines_of))


def test_concise(golden: Callable[[str, str], None]) -> None:
    """One line for each finding, and the counts."""
    golden("check_concise", render(examples(), "concise", lines_of=lines_of))


def test_github(golden: Callable[[str, str], None]) -> None:
    """One command for each finding; per cents, breaks, colons and commas are escaped, hints are notices."""
    golden("check_github", render(examples(), "github", lines_of=lines_of))


@pytest.mark.parametrize("form", ["text", "concise"])
def test_colours_change_no_letter(form: str) -> None:
    """With colours the same is said; without them there is no escape sequence."""
    plain = render(examples(), form, lines_of=lines_of)
    coloured = render(examples(), form, lines_of=lines_of, color=True)
    assert coloured != plain
    assert "\x1b" not in plain
    assert _ESCAPES.sub("", coloured) == plain


def test_source_can_not_speak_to_the_terminal() -> None:
    """Escape sequences in a source line, a message or a path are shown, not sent."""
    bad = finding(message="\x1b[2J", fix="\x9b1m", path="a\x1b[1m.py", span=Span(1, 1, 1, 4))
    shown = render([bad], "text", lines_of=lambda _path, _cell: ["x = '\x1b]0;title\x07'"])
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown)
    assert "␛" in shown


def test_nothing_found_is_said() -> None:
    """No finding: a line for people, an empty list for programs, no command for GitHub."""
    assert render([], "text", lines_of=lines_of) == "no findings\n"
    assert json.loads(render([], "json", lines_of=lines_of)) == []
    assert render([], "github", lines_of=lines_of) == ""


def test_lines_that_are_gone_are_left_out() -> None:
    """A finding behind the end of its file, or in a file that can't be read, still says what it has to say."""
    shown = render([finding(line=400)], "text", lines_of=lines_of)
    assert "train.py:400:1: error RW801: `x` becomes a tuple" in shown
    assert "-> take the comma away" in shown
    assert "^" not in shown


def test_json_has_the_promised_keys() -> None:
    """Each object has path, place, rule, class, severity, message, fix, cell, whether it can be mended, and the other places."""
    first, second, *_, last = json.loads(render(examples(), "json", lines_of=lines_of))
    assert first == {
        "path": "train.py", "line": 4, "col": 36, "end_line": 4, "end_col": 50, "rule": "RW199", "class": "C1", "severity": "error",
        "message": "only rank 0 reaches `dist.barrier()`", "fix": "move it out of `if dist.get_rank() == 0`", "cell": None, "fixable": False,
        "also": [{"message": "the others go on to this line", "path": "train.py", "line": 5, "col": 1, "end_line": 8, "end_col": 2}],
    }  # fmt: skip
    assert second["fixable"] is True
    assert last["cell"] == 3


def test_unknown_format_is_refused() -> None:
    """A format that there is not is an error that names those that there are."""
    with pytest.raises(UsageError, match="xml") as error:
        render([], "xml", lines_of=lines_of)
    assert all(name in str(error.value) for name in FORMATS)


@pytest.mark.parametrize(
    ("text", "start", "end", "columns", "shown", "marked"),
    [
        ("abc def", 4, 7, 40, "abc def", "    ^^^"),
        ("\tx = 1,", 6, 7, 40, "    x = 1,", " " * 9 + "^"),
        ("a\tb", 2, 3, 40, "a   b", "    ^"),
        ('print("损失", x)', 12, 13, 40, 'print("损失", x)', " " * 14 + "^"),
        ("损失", 0, 2, 40, "损失", "^^^^"),
        ("e\u0301x", 2, 3, 40, "e\u0301x", " ^"),
        ("abc", 3, 3, 40, "abc", "   ^"),
        ("x" * 100, 0, 3, 30, "x" * 28 + "…", "^^^"),
        ("a" * 60 + "BB", 60, 62, 30, "…" + "a" * 26 + "BB", " " * 27 + "^^"),
    ],
)
def test_marks_stand_below_their_letters(
    text: str, start: int, end: int, columns: int, shown: str, marked: str
) -> None:
    """Tabs, wide letters, accents and cut lines shift the marks as they shift the letters."""
    line, left, right = mark(text, start, end, columns=columns)
    assert (line, " " * left + "^" * (right - left)) == (shown, marked)


def test_shown_lines_fit_the_terminal() -> None:
    """No source line is wider than the terminal, wherever in it the place is."""
    text = "损" * 200 + "x" * 200
    for start in (0, 100, 210, 399):
        line, _, right = mark(text, start, start + 1, columns=40)
        assert sum(2 if char == "损" else 1 for char in line) <= 40
        assert right <= 40


def test_example_source_has_what_the_findings_say() -> None:
    """The findings of these tests stand where they say."""
    assert SOURCE.split("\n")[3][35:49] == "dist.barrier()"
