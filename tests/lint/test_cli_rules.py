"""`rankwise rules` and `rankwise rule`: all rules as a table or JSON, and the page of one."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from rankwise.cli.main import main
from rankwise.cli.pages import list_names
from rankwise.doctor.registry import all_probes
from rankwise.lint import registry
from rankwise.verdict.run_rules import RULES


@pytest.fixture(autouse=True)
def _no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_table_has_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    """Each rule has a line with id, severity, classes, name and summary, below the title of its chapter."""
    assert main(["rules"]) == 0
    shown = capsys.readouterr().out
    for rule in registry.all_rules():
        (line,) = re.findall(rf"^{rule.id} .*$", shown, re.MULTILINE)
        assert rule.severity in line
        assert rule.name in line
        assert line.endswith(rule.summary)
        assert all(one in line for one in rule.classes)
        assert (" fix " in line) == rule.fixable or " fix " in rule.summary
        assert registry.chapter(rule.id) in shown
    assert "\x1b" not in shown


def test_json_has_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    """The list has an object for each rule."""
    assert main(["rules", "--format", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["id"] for one in listed] == [rule.id for rule in registry.all_rules()]
    assert set(listed[0]) == {
        "id",
        "name",
        "classes",
        "severity",
        "fixable",
        "summary",
        "chapter",
        "looks_at",
    }


@pytest.mark.parametrize("word", ["RW801", "rw801", "trailing-comma"])
def test_page_of_a_rule(capsys: pytest.CaptureFixture[str], word: str) -> None:
    """A rule's page is found by id and by name; its examples are shown as they are, its prose without marks."""
    assert main(["rule", word]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("RW801 trailing-comma: error")
    for code in (
        *registry.examples(registry.rule("RW801")).bad,
        *registry.examples(registry.rule("RW801")).good,
    ):
        assert "".join(f"    {line}".rstrip() + "\n" for line in code.splitlines()) in shown
    assert "**" not in shown
    assert "```" not in shown
    assert "# noqa: RW801" in shown
    assert "\x1b" not in shown


def test_every_page_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """No page breaks the terminal's form, and no line of prose is longer than a hundred columns."""
    for rule in registry.all_rules():
        assert main(["rule", rule.id]) == 0
        prose = [line for line in capsys.readouterr().out.splitlines()[1:] if not line.startswith("    ")]
        assert [line for line in prose if len(line) > 100 and " " in line[:100]] == [], rule.id


def test_page_in_colours(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """FORCE_COLOR gives colours to a pipe, and they change no letter; NO_COLOR wins over it."""
    main(["rule", "RW801"])
    plain = capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    main(["rule", "RW801"])
    coloured = capsys.readouterr().out
    assert coloured != plain
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    main(["rule", "RW801"])
    assert capsys.readouterr().out == plain


def test_page_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON of one rule has its page as Markdown."""
    assert main(["rule", "RW801", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["page"] == registry.page(registry.rule("RW801"))


def test_unknown_rule(capsys: pytest.CaptureFixture[str]) -> None:
    """A rule that there is not: exit code 2, and the one that may be meant."""
    assert main(["rule", "trailing-coma"]) == 2
    assert "did you mean RW801 (trailing-comma)?" in capsys.readouterr().err


def test_a_part_of_a_name_is_enough_for_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    """All rules whose names hold the word are offered, with or without its dash."""
    assert main(["rule", "setepoch"]) == 2
    told = capsys.readouterr().err
    assert "(set-epoch-forgotten) or RW" in told
    assert "(set-epoch-without-effect)?" in told


@pytest.mark.parametrize("word", ["RW999", "RW0"])
def test_a_far_rule_is_not_guessed(capsys: pytest.CaptureFixture[str], word: str) -> None:
    """What is near to no rule is not called a slip of one."""
    assert main(["rule", word]) == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("word", ["RW8", "rw80"])
def test_the_beginning_of_an_id_lists_its_rules(capsys: pytest.CaptureFixture[str], word: str) -> None:
    """As --select means all rules that begin so, they are listed, and no others."""
    assert main(["rule", word]) == 0
    shown = re.findall(r"^RW\d+", capsys.readouterr().out, re.MULTILINE)
    assert shown == [rule.id for rule in registry.all_rules() if rule.id.startswith(word.upper())]


@pytest.mark.parametrize("word", list_names())
def test_whatever_a_report_names_has_a_page(capsys: pytest.CaptureFixture[str], word: str) -> None:
    """Rules of the verdict, failure classes and probes are explained by the names that reports and the doctor print, without marks of links."""
    assert main(["rule", word]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(word)
    assert "](" not in shown
    assert main(["rule", word.upper().replace("_", "-"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["page"]


def test_every_rule_and_probe_has_a_name_here() -> None:
    """What the verdict and the doctor can name has a page."""
    rules = {name for rule in RULES for name in getattr(rule, "RULES", None) or (rule.RULE,)}
    assert rules | {probe.id for probe in all_probes()} <= set(list_names())


def test_a_slip_of_a_verdicts_rule_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    """The name that may be meant is printed as reports print it."""
    assert main(["rule", "mispaired_gradient"]) == 2
    assert "did you mean mispaired_gradients?" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error() -> None:
    """`rankwise rule ... | head -1` ends without a word."""
    shown = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m rankwise rules | head -1; echo ${{PIPESTATUS[0]}}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert shown.stderr == ""
    assert shown.stdout.splitlines()[-1] in {"0", "141"}
