"""Comments that silence findings, and those that do not."""

from __future__ import annotations

import pytest

from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.finding import Span
from rankwise.lint.running.suppress import find_suppressions


def _hides(code: str, line: int, rule: str = "RW101", *, end: int | None = None, language: str = "python") -> bool:
    unit = CodeUnit(path="a", language="shell" if language == "shell" else "python", code=code)
    return find_suppressions(unit).hides(rule, Span(line, 1, end or line, 2))


@pytest.mark.parametrize(
    "comment",
    ["# noqa", "#noqa", "# NOQA", "# noqa: RW101", "# noqa:rw101", "# noqa: E501, RW101", "# noqa: E501 RW101",
     "# noqa: RW1", "# type: ignore # noqa: RW101 - all ranks come here", "# noqa: because", "# noqa : RW101"],
)  # fmt: skip
def test_these_silence(comment: str) -> None:
    """Every common way to write it works."""
    assert _hides(f"x = 1\nbarrier()  {comment}\n", 2)


@pytest.mark.parametrize(
    "comment",
    ["# noqa: E501", "# noqa: RW102", "# nothing: noqa", "# flake8: noqa", "# ruff: noqa", "# noqax"],
)
def test_these_do_not(comment: str) -> None:
    """Other tools' codes and words do not silence ours."""
    assert not _hides(f"barrier()  {comment}\n", 1)


def test_a_string_is_no_comment() -> None:
    """Text that only looks like a comment silences nothing."""
    assert not _hides("barrier('# noqa')\n", 1)
    assert not _hides('x = """\n# noqa\n"""\n', 2)


def test_a_comment_holds_for_its_whole_statement() -> None:
    """The comment may stand at any line of a statement; a block's header is a statement of its own."""
    code = "barrier(\n    a,  # noqa: RW101\n    b,\n)\nother()\nif x:  # noqa\n    barrier()\n"
    assert [line for line in range(1, 8) if _hides(code, line)] == [1, 2, 3, 4, 6]
    assert _hides("if x:\n    barrier()  # noqa\n", 1, end=2)
    assert not _hides("# noqa\nbarrier()\n", 2)


def test_a_file_may_be_silenced() -> None:
    """`# rankwise: noqa` holds everywhere, with ids for these only; within a line's comment it is no line's."""
    assert _hides("x = 1\n# rankwise: noqa\n", 1)
    assert _hides("# rankwise: noqa: RW101\nx = 1\n", 2)
    assert not _hides("# rankwise: noqa: RW102\nx = 1\n", 2)


def test_shell_comments_silence_their_command() -> None:
    """A # begins a comment at a word's front only, outside of quotes; a command may go over lines."""
    assert _hides("torchrun \\\n  a.py # noqa: RW701\n", 1, "RW701", language="shell")
    assert not _hides("torchrun a#noqa\n", 1, language="shell")
    assert not _hides("echo '# noqa'\n", 1, language="shell")
    assert not _hides('echo "a \\" # noqa"\n', 1, language="shell")


def test_text_that_is_no_python_can_be_silenced() -> None:
    """The one finding on a broken text obeys its comment."""
    assert _hides("print 'a'  # noqa: RW901\n(", 1, "RW901")
