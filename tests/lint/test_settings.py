"""What a project's pyproject.toml and the flags make of the rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.base.errors import UsageError
from rankwise.lint.rule import Rule
from rankwise.lint.running.settings import (
    Settings,
    check_selectors,
    load_settings,
    load_settings_file,
    override,
    pick_rules,
    shows,
)

if TYPE_CHECKING:
    from pathlib import Path


def _rule(id_: str, name: str) -> Rule[Any]:
    return Rule(id=id_, name=name, severity="error", classes=(), summary="", look=lambda _: ())


A, B, C = RULES = (_rule("RW101", "one-name"), _rule("RW102", "two-names"), _rule("RW201", "third"))


@dataclass(frozen=True)
class Case:
    settings: dict[str, Any]
    picked: str


@pytest.mark.parametrize(
    "case",
    [
        Case({}, "RW101 RW102 RW201"),
        Case({"select": ("RW1",)}, "RW101 RW102"),
        Case({"select": ("all",), "ignore": ("rw1",)}, "RW201"),
        Case({"select": ("RW101",), "ignore": ("RW1",)}, "RW101"),
        Case({"select": ("RW1",), "ignore": ("one-name",)}, "RW102"),
        Case({"select": ("RW2",), "extend_select": ("two-names",)}, "RW102 RW201"),
        Case({"extend_select": ("RW101",)}, "RW101 RW102 RW201"),
        Case({"ignore": ("ALL",)}, ""),
    ],
)
def test_which_rules_are_picked(case: Case) -> None:
    """Ids, beginnings, names and ALL select; of two that contradict each other the closer one wins."""
    assert " ".join(rule.id for rule in pick_rules(Settings(**case.settings), RULES)) == case.picked


def test_hints_are_shown_on_demand() -> None:
    """Hints want `severity = "hint"` or the rule's own id; a chapter's id is not enough."""
    assert not shows(Settings(), A, "hint", "a.py")
    assert shows(Settings(), A, "warning", "a.py")
    assert not shows(Settings(severity="error"), A, "warning", "a.py")
    assert shows(Settings(severity="hint"), A, "hint", "a.py")
    assert shows(Settings(select=("RW101",)), A, "hint", "a.py")
    assert not shows(Settings(select=("RW1",)), A, "hint", "a.py")


@pytest.mark.parametrize(
    ("pattern", "is_shown"),
    [
        ("tests/*", False),
        ("tests", False),
        ("**/deep/*.py", False),
        ("a.py", False),
        ("*.py", False),
        ("src/*", True),
        ("test", True),
    ],
)
def test_per_file_ignores(pattern: str, is_shown: bool, tmp_path: Path) -> None:
    """Patterns are names, or paths from the folder of the settings."""
    settings = Settings(per_file_ignores={pattern: ("RW1",)}, folder=tmp_path)
    path = str(tmp_path / "tests" / "deep" / "a.py")
    assert shows(settings, A, "error", path) is is_shown
    assert shows(settings, C, "error", path)


def test_the_nearest_settings_count(tmp_path: Path) -> None:
    """The search goes up, past files that say nothing of us."""
    (tmp_path / "pyproject.toml").write_text(
        '[tool.rankwise.check]\nselect = ["RW1"]\nextend-select = ["RW2"]\nexclude = ["old"]\nseverity = "hint"\n'
        '[tool.rankwise.check.per-file-ignores]\n"x.py" = ["RW3"]\n'
    )
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'rankwise-user'\n")
    settings = load_settings(inner)
    assert settings == Settings(
        select=("RW1",), extend_select=("RW2",), exclude=("old",), severity="hint",
        per_file_ignores={"x.py": ("RW3",)}, folder=tmp_path,
    )  # fmt: skip
    assert settings.excludes(tmp_path / "a" / "old" / "x.py")
    assert not settings.excludes(tmp_path / "a" / "older" / "x.py")
    assert load_settings_file(tmp_path / "pyproject.toml") == settings


def test_flags_stand_over_the_project() -> None:
    """--select takes the project's place; --ignore and --extend-select add to it."""
    project = Settings(select=("RW1",), extend_select=("RW3",), ignore=("RW101",))
    assert override(project, select=["RW2"], ignore=["RW201"]) == Settings(
        select=("RW2",), ignore=("RW101", "RW201"), folder=project.folder
    )
    assert override(project, extend_select=["RW4"], severity="error").extend_select == ("RW3", "RW4")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("selct = ['RW1']", "did you mean select"),
        ("extend_select = ['RW1']", "did you mean extend-select"),
        ("select = 'RW1'", "list of words"),
        ("severity = 'bad'", "not one of error, warning, hint"),
        ("per-file-ignores = ['x']", "table"),
        ("select = [", "pyproject.toml"),
    ],
)
def test_wrong_settings_are_told(text: str, words: str, tmp_path: Path) -> None:
    """A key or value that is not known ends the check with what may have been meant."""
    (tmp_path / "pyproject.toml").write_text(f"[tool.rankwise.check]\n{text}\n")
    with pytest.raises(UsageError) as caught:
        load_settings(tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize(("word", "meant"), [("RW1001", "RW101"), ("one-nme", "one-name"), ("zzz", "rankwise rules")])
def test_wrong_selectors_are_told(word: str, meant: str) -> None:
    """A selector that means no rule is an error, not silence."""
    with pytest.raises(UsageError) as caught:
        check_selectors(Settings(select=(word,)), RULES)
    assert meant in str(caught.value)
    check_selectors(Settings(select=("rw1", "THIRD", "ALL")), RULES)


def test_a_rule_that_is_gone_may_still_be_ignored() -> None:
    """A project that ignores a rule of an earlier version is checked as before; a misspelt one is told all the same."""
    check_selectors(
        Settings(ignore=("RW520", "RW513", "others-wait-for-preprocessing"), per_file_ignores={"a.py": ("rw520",)}),
        RULES,
    )
    with pytest.raises(UsageError, match="did you mean one-name"):
        check_selectors(Settings(ignore=("one-nme",)), RULES)
