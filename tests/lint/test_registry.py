"""The registry: every rule is found, once, by id or by name."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from rankwise.base.errors import UsageError
from rankwise.lint import registry, rules
from rankwise.lint.rule import Rule

FOLDER = Path(rules.__file__).parent


def module(name: str, id_: str, rule_name: str = "some-words") -> ModuleType:
    made = ModuleType(f"rankwise.lint.rules.{name}")
    made.RULE = Rule(  # type: ignore[attr-defined]
        id=id_, name=rule_name, severity="error", classes=(), summary="x", check=lambda _: ()
    )
    return made


def test_every_rule_file_is_found() -> None:
    """Each file rwNNN_*.py in the folder of rules gives a rule, and the list is sorted by id."""
    ids = sorted(path.name[:5].upper() for path in FOLDER.glob("rw[0-9][0-9][0-9]_*.py"))
    assert [rule.id for rule in registry.all_rules()] == ids


def test_a_rule_by_id_or_name_in_any_case() -> None:
    """``RW801``, ``rw801`` and ``trailing-comma`` are the same rule."""
    assert registry.rule("RW801") is registry.rule("rw801") is registry.rule(" Trailing-Comma ")


def test_unknown_rules_are_guessed() -> None:
    """A slip in an id or a name names the rule that is meant; nonsense leads to the list."""
    with pytest.raises(UsageError, match=re.escape("did you mean RW801 (trailing-comma)?")):
        registry.rule("traling-coma")
    with pytest.raises(UsageError, match="rankwise rules"):
        registry.rule("")


@pytest.mark.parametrize(
    ("modules", "told"),
    [
        ((module("rw101_a", "RW101"), module("rw101_b", "RW101", "other-words")), "RW101 is the rule in rw101_a.py"),
        ((module("rw101_a", "RW101"), module("rw102_b", "RW102")), "some-words is the rule in rw101_a.py"),
        ((module("rw101_a", "RW102"),), "says that its id is RW102"),
        ((module("rw001_a", "RW001"),), "says that its id is RW001"),
    ],
)  # fmt: skip
def test_doubled_and_wrong_ids_are_refused(modules: tuple[ModuleType, ...], told: str) -> None:
    """Two rules of one id or name, an id that is not its file's, a chapter that there is not: each is an error with names."""
    with pytest.raises(ValueError, match=told):
        registry.check_modules(modules)


def page_of(monkeypatch: pytest.MonkeyPatch, text: str) -> Rule[object]:
    made = module("rw101_a", "RW101")
    made.__doc__ = text
    monkeypatch.setattr(registry, "_modules", lambda: (made,))
    return made.RULE  # type: ignore[no-any-return]


def test_examples_are_cut_out_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fences belong to the part above them; those in the prose are no examples."""
    rule = page_of(
        monkeypatch,
        "It is ``wrong``.\n\n**Why.**\n\n```python\nprose\n```\n\nBad:\n\n```python\na\n```\n\n```python\nb\n```\n\nGood:\n\n"
        "```python\nc\n```\n\n**When it says nothing.**\n\n```python\nprose\n```\n",
    )
    assert registry.examples(rule) == (["a\n", "b\n"], ["c\n"], "python")
    assert registry.page(rule).startswith("It is `wrong`.\n\n**Why.**\n\n```python\n")


def test_shell_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page with bash fences has examples in shell."""
    rule = page_of(monkeypatch, "X.\n\nBad:\n\n```bash\na\n```\n\nGood:\n\n```bash\nb\n```\n")
    assert registry.examples(rule).language == "shell"


@pytest.mark.parametrize("fence", ["", "```perl\na\n```\n", "```python\na\n```\n\n```bash\na\n```\n"])
def test_pages_without_examples_are_refused(monkeypatch: pytest.MonkeyPatch, fence: str) -> None:
    """No bad example, another language or two of them: an error that names the rule."""
    rule = page_of(monkeypatch, f"X.\n\nBad:\n\n{fence}")
    with pytest.raises(ValueError, match="RW101"):
        registry.examples(rule)


def test_every_chapter_has_a_title() -> None:
    """Each rule belongs to a chapter that has a title."""
    assert all(registry.chapter(rule.id) for rule in registry.all_rules())
