"""`rankwise rule 'RuntimeError: …'` and `rankwise rule < LOG`: known error texts, and the page that lists them."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from error_texts import REAL
from rankwise.cli import error_text
from rankwise.cli.error_text import find_known, read_log
from rankwise.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"
LOG = """\
step 1
[rank1]: RuntimeError: [pair.cc:537] Read error [127.0.0.1]:32967: Connection reset by peer.
[rank2]: RuntimeError: [Rank 2]: Ranks 0, 3 failed to pass monitoredBarrier in 2000 ms
[rank1]: RuntimeError: [pair.cc:537] Read error [127.0.0.1]:32967: Connection reset by peer.
\x1b[31m[rank3]: RuntimeError: CUDA error: invalid device ordinal\x1b[0m
"""


def load_script() -> Any:
    """Import docs/generate_errors.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("generate_errors", DOCS / "generate_errors.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def give(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Put a log on standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_each_real_text_is_known() -> None:
    """What the reports understand is understood when it is pasted, alone or behind a launcher's prefix."""
    for text, blame, class_id in REAL:
        if blame is None:
            continue
        for pasted in (text, f"[rank3]: {text}\n"):
            (known,) = find_known(pasted)
            assert (known.blame, known.classes) == (blame, (class_id,) if class_id else ()), text
            assert known.fix
            assert known.at_fault


def test_causes_come_before_what_followed_from_them() -> None:
    """In a log, each kind of error is there once, with its first line and who printed it; a lost peer is the last."""
    known = find_known(LOG)
    assert [(one.line, one.rank, one.blame, one.missing) for one in known] == [
        (5, 3, "own", ()),
        (3, 2, "timeout", (0, 3)),
        (2, 1, "peer", ()),
    ]
    assert known[0].at_fault == "the rank that printed it, rank 3"
    assert known[1].at_fault == "ranks 0, 3, which did not arrive"


def test_an_error_of_ours_is_known_without_its_type() -> None:
    """A message copied out of a report is understood as the whole exception is."""
    (known,) = find_known("after 60 s rank 1 of 3 has not arrived; arrived: rank 0")
    assert (known.blame, known.missing, known.classes) == ("timeout", (1,), ("I1",))


def test_what_only_pages_quote_is_known() -> None:
    """Each text under "Other texts" leads to the classes that quote it, with other numbers too, save those of signals."""
    rows = re.findall(r"^\| `(.+?)` \| \[(\w+):", (DOCS / "reference" / "errors.md").read_text("utf-8"), re.MULTILINE)
    assert len(rows) > 40
    for text, class_id in rows:
        (known,) = find_known(text.replace("...", "1 2 3"))
        assert class_id in known.classes, text
    (other,) = find_known("the ranks named different members for group 23")
    assert other.classes == ("C10",)
    assert find_known("got signal: 15") == []


def test_only_the_end_of_a_long_log_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are numbered as in the whole log."""
    monkeypatch.setattr(error_text, "LONGEST_LOG", 40)
    text, left_out = read_log(io.BytesIO(b"step\n" * 100 + b"RuntimeError: Address already in use\n"))
    (known,) = find_known(text)
    assert known.line + left_out == 101


def test_a_pasted_line_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal shows who is at fault, what to do, and the page of the class; words without quotes will do."""
    assert main(["rule", "RuntimeError:", "Address", "already", "in", "use"]) == 0
    shown = capsys.readouterr().out
    assert "  at fault  the rank that printed it\n" in shown
    assert "  do        remove the fixed port" in shown
    assert "\nI9: the port is taken\n" in shown


def test_a_log_is_explained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A log from standard input: a block for each kind of error, in text and in JSON."""
    give(monkeypatch, LOG)
    assert main(["rule"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^line (\d+)", shown, re.MULTILINE) == ["5", "3", "2"]
    assert "R14 (rankwise rule R14)" in shown
    give(monkeypatch, LOG)
    assert main(["rule", "--format", "json"]) == 0
    assert [one["line"] for one in json.loads(capsys.readouterr().out)] == [5, 3, 2]


@pytest.mark.parametrize(
    ("argv", "log", "said"),
    [
        (["rule", "ValueError: boom"], "", "not a known error text"),
        (["rule"], "step 1\nstep 2\n", "no known error text is in this log"),
        (["rule"], "", "standard input is empty"),
    ],
)
def test_what_is_not_known(
    argv: list[str], log: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that means nothing here is an error that says so: exit code 2."""
    give(monkeypatch, log)
    assert main(argv) == 2
    assert said in capsys.readouterr().err


def test_the_page_is_up_to_date() -> None:
    """docs/reference/errors.md is made of the table, and each entry of the table has a real text on it."""
    script = load_script()
    assert script.TARGET.read_text(encoding="utf-8") == script.render(), "run `make docs`"
