"""What `--fix` does to a file: the edits, and nothing else."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING

import pytest

from lint.found import edit, finding
from rankwise.lint.inputs.notebook import code_cells, source_of
from rankwise.lint.running import text_edits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rankwise.lint.finding import Edit, Finding


def replacing(old: str, new: str, *, cell: int | None = None) -> Callable[[str], list[Finding]]:
    """Return a check that wants each ``old`` to be ``new``."""

    def check(text: str) -> list[Finding]:
        source = text if cell is None else source_of(code_cells(json.loads(text))[cell])
        return [
            finding(
                line=number, message=f"{old} in {line}", edits=(edit(number, at + 1, at + 1 + len(old), new),), cell=cell
            )
            for number, line in enumerate(source.replace("\r\n", "\n").split("\n"), 1)
            if (at := line.find(old)) >= 0
        ]  # fmt: skip

    return check


@pytest.mark.parametrize(
    ("code", "edits", "after"),
    [
        ("x = 1,\ny = 2\n", [edit(1, 6, 7, "")], "x = 1\ny = 2\n"),
        ("a\nb\nc\n", [edit(2, 1, 1, "", end_line=3)], "a\nc\n"),
        ("a\n", [edit(1, 1, 1, "x\n"), edit(1, 2, 2, "!")], "x\na!\n"),
        ("abcdef\n", [edit(1, 2, 5, "X"), edit(1, 4, 6, "Y")], "aXef\n"),
        ("abcdef\n", [edit(1, 4, 6, "Y"), edit(1, 2, 5, "X")], "abcYf\n"),
        ("ab\n", [edit(1, 2, 2, "1"), edit(1, 2, 2, "2")], "a1b\n"),
        ("ab\n", [edit(1, 2, 3, "X"), edit(1, 2, 2, "1")], "a1X\n"),
        ("a\r\nb\r\n", [edit(2, 1, 2, "x")], "a\r\nx\r\n"),
        ("\ufeffab\n", [edit(1, 1, 2, "X")], "\ufeffXb\n"),
        ("a\nb", [edit(2, 2, 2, "\nc")], "a\nb\nc"),
        ("a\x0cb\nc\n", [edit(2, 1, 2, "X")], "a\x0cb\nX\n"),
        ("损 = 1,\n", [edit(1, 6, 7, "")], "损 = 1\n"),
        ("a\n", [edit(9, 1, 1, "b\n")], "a\nb\n"),
        ("a\n", [edit(1, 40, 50, "!")], "a\n!"),
    ],
)
def test_edits_go_where_they_belong(code: str, edits: list[Edit], after: str) -> None:
    """Places are lines and characters; the first of two that overlap wins; line ends and the byte order mark stay."""
    rounds = [[finding(edits=(one,)) for one in edits]]
    assert text_edits.fix_text(code, lambda _text: rounds.pop() if rounds else [], path="a.txt")[0] == after


def test_all_edits_of_a_finding_or_none() -> None:
    """A finding of which one edit is in another's way waits for the next round with all of its edits."""
    first = finding(message="1", edits=(edit(1, 1, 2, "X"),))
    both = finding(message="2", edits=(edit(1, 1, 3, "Y"), edit(2, 1, 2, "Z")))
    rounds = [[first, both], []]
    seen: list[str] = []

    def check(text: str) -> list[Finding]:
        seen.append(text)
        return rounds.pop(0) if rounds else []

    assert text_edits.fix_text("ab\nc\n", check, path="a.txt") == ("Xb\nc\n", 1)


def test_two_findings_may_want_the_same() -> None:
    """An import that two findings add stands there once, and both are mended."""
    insert = edit(1, 1, 1, "import os\n")
    done = [[finding(message=name, edits=(insert, edit(line, 1, 2, name))) for line, name in ((1, "A"), (2, "B"))]]
    after, num = text_edits.fix_text("a\nb\n", lambda _text: done.pop() if done else [])
    assert (after, num) == ("import os\nA\nB\n", 2)


def test_rounds_until_nothing_is_left() -> None:
    """What the first round has laid bare is mended in the second, each finding counts once."""
    assert text_edits.fix_text("aaa = 1\n", replacing("aa", "a")) == ("a = 1\n", 2)


def test_rules_that_undo_each_other_end() -> None:
    """Two fixes that want the opposite end after ten rounds."""

    def check(text: str) -> list[Finding]:
        return replacing("a", "b")(text) or replacing("b", "a")(text)

    code, num = text_edits.fix_text("a = 1\n", check)
    assert (code, num) == ("a = 1\n", text_edits.MOST_ROUNDS)


def test_a_fix_that_breaks_the_text_is_dropped() -> None:
    """A round of edits after which Python can't read the text is left out."""

    def check(text: str) -> list[Finding]:
        return replacing("bad", "(")(text) + replacing("old", "new")(text)

    assert text_edits.fix_text("bad = old\nx = old\n", check) == ("bad = old\nx = old\n", 0)
    assert text_edits.fix_text("x = old\n", check) == ("x = new\n", 1)


def test_a_fix_that_makes_text_unreadable_is_dropped() -> None:
    """In a page or a script of another language the check itself says that a text can't be read."""

    def check(text: str) -> list[Finding]:
        broken = [finding("RW901")] if "(" in text else []
        return broken + replacing("bad", "(")(text)

    assert text_edits.fix_text("bad\n", check, path="job.sh") == ("bad\n", 0)


def notebook(indent: int | None, *, as_list: bool = True) -> str:
    lines = ["import torch\n", 's = "损 \\n"\n', "x = 1,"]
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["x = 1,"]},
        {"metadata": {"b": 1, "a": 1e5}, "cell_type": "code", "outputs": [], "source": lines if as_list else "".join(lines)},
    ]  # fmt: skip
    text = json.dumps(
        {"nbformat": 4, "cells": cells, "metadata": {"z": [], "a": {}}}, indent=indent, ensure_ascii=False
    )
    return text + "\n"


@pytest.mark.parametrize("indent", [None, 1, 4])
@pytest.mark.parametrize("as_list", [True, False])
def test_notebooks_change_in_the_source_alone(indent: int | None, as_list: bool) -> None:
    """Only the letters of the edit differ: indents, the order of keys, numbers and the last line break stay."""
    before = notebook(indent, as_list=as_list)
    after, num = text_edits.fix_text(before, replacing("1,", "1", cell=2), path="a.ipynb")
    assert num == 1
    at = before.rindex("x = 1,")
    assert after == before[:at] + "x = 1" + before[at + len("x = 1,") :]


def test_a_notebook_that_could_not_be_written_back_is_left_alone() -> None:
    """One that no JSON writer would lay out so is not changed: nothing but the letters of the edit may differ."""
    before = notebook(1).replace('"nbformat": 4', '"nbformat":4')
    assert text_edits.fix_text(before, replacing("1,", "1", cell=2), path="a.ipynb") == (before, 0)


def test_lines_added_to_a_cell_are_items_of_its_list() -> None:
    """A new line stands in a line of its own in the JSON, as Jupyter would write it."""
    before = notebook(1)
    after, _ = text_edits.fix_text(before, replacing("x = 1,", "y = 0\nx = 1", cell=2), path="a.ipynb")
    assert ',\n    "y = 0\\n",\n    "x = 1"\n   ]' in after
    assert json.loads(after)["cells"][1]["source"][2:] == ["y = 0\n", "x = 1"]


def test_escapes_stay_where_a_notebook_has_them() -> None:
    """A notebook written in ASCII stays so."""
    before = json.dumps({"cells": [{"cell_type": "code", "source": ["a = '损'\n", "b = '坏'"]}]})
    after, _ = text_edits.fix_text(before, replacing("b", "c", cell=1), path="a.ipynb")
    assert after == before.replace("b = ", "c = ")


@pytest.mark.parametrize(
    "data",
    [
        b"x = 1,\r\ny = 2\r\n",
        b"\xef\xbb\xbfx = 1,\n",
        "# -*- coding: latin-1 -*-\nx = 1,  # é".encode("latin-1"),
        b"x = 1,",
    ],
)
def test_files_keep_their_form(tmp_path: Path, data: bytes) -> None:
    """Encoding, byte order mark, line ends, a missing last line break and the rights of a file stay as they are."""
    path = tmp_path / "train.py"
    path.write_bytes(data)
    path.chmod(0o750)
    mended = text_edits.mend(str(path), data, lambda _name, raw: replacing("1,", "1")(raw.decode("latin-1")))
    assert mended
    if data.startswith(b"\xef"):
        # In latin-1 the mark is three letters, which the check above counts: the place is another one.
        mended = text_edits.mend(str(path), data, lambda _name, raw: replacing("1,", "1")(raw.decode("utf-8-sig")))
        assert mended
    text_edits.write(mended)
    assert path.read_bytes() == data.replace(b"1,", b"1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]


def test_links_stay_links(tmp_path: Path) -> None:
    """What a link leads to is written, and the link stays."""
    (tmp_path / "real.py").write_text("x = 1,\n")
    (tmp_path / "link.py").symlink_to("real.py")
    mended = text_edits.mend(str(tmp_path / "link.py"), b"x = 1,\n", lambda _name, raw: replacing("1,", "1")(raw.decode()))  # fmt: skip
    assert mended
    text_edits.write(mended)
    assert (tmp_path / "link.py").is_symlink()
    assert (tmp_path / "real.py").read_text() == "x = 1\n"


def test_bytes_that_are_no_text_are_left_alone() -> None:
    """A file that could not be written back as it was is not mended."""
    assert text_edits.mend("train.py", b"x = '\xff'\n", lambda _name, _raw: []) is None


def test_diff() -> None:
    """The diff is one that `patch` takes, also at an end without a line break."""
    shown = text_edits.diff(text_edits.Mended(path="a.py", before="a\nb = 1,", after="a\nb = 1"))
    assert shown == (
        "--- a.py\n+++ a.py\n@@ -1,2 +1,2 @@\n a\n-b = 1,\n\\ No newline at end of file\n"
        "+b = 1\n\\ No newline at end of file\n"
    )
    assert text_edits.diff(text_edits.Mended(path="a.py", before="a\x0cb\n", after="a\x0cb\n")) == ""
