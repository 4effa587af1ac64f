"""The registry: every rule is found, once, by id or by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rankwise.base.errors import UsageError
from rankwise.lint import registry, rules
from rankwise.lint.rule import Rule

FOLDER = Path(rules.__file__).parent
PAGES = Path(__file__).parents[2] / "docs" / "rules" / "check"


def made(id_: str, name: str = "some-words") -> Rule[object]:
    return Rule(id=id_, name=name, severity="error", classes=(), summary="x", look=lambda _: ())


def test_every_rule_has_its_page() -> None:
    """Each rule that a module defines is in the list, sorted by id, and has a page; each page has a rule."""
    pages = sorted(path.stem for path in PAGES.glob("RW*.md"))
    assert [rule.id for rule in registry.all_rules()] == pages
    defined = sum(text.count("\n@rule(") for text in (path.read_text() for path in FOLDER.glob("*.py")))
    assert defined == len(pages)


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
    ("rules", "told"),
    [
        ((made("RW101"), made("RW101", "other-words")), r"RW101 is both RW101 \(some-words\) and RW101 \(other-words\)"),
        ((made("RW101"), made("RW102")), "some-words is both RW101"),
        ((made("RW001"),), "some-words has the id RW001"),
    ],
)  # fmt: skip
def test_doubled_and_wrong_ids_are_refused(rules: tuple[Rule[object], ...], told: str) -> None:
    """Two rules of one id or name, or a chapter that there is not: each is an error with names."""
    with pytest.raises(ValueError, match=told):
        registry.in_order(rules)


def page_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> Rule[object]:
    page = tmp_path / "rules" / "check" / "RW101.md"
    page.parent.mkdir(parents=True)
    page.write_text(f"# RW101: X\n\n**error**\n\n{text}\n**To silence it** on one line.\n")
    monkeypatch.setattr(registry, "docs_folder", lambda: tmp_path)
    return made("RW101")


def test_examples_are_cut_out_of_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fences belong to the part above them; those in the prose are no examples."""
    rule = page_of(
        monkeypatch,
        tmp_path,
        "It is `wrong`.\n\n**Why.**\n\n```python\nprose\n```\n\nBad:\n\n```python\na\n```\n\n```python\nb\n```\n\nGood:\n\n"
        "```python\nc\n```\n\n**When it says nothing.**\n\n```python\nprose\n```\n",
    )
    assert registry.examples(rule) == (["a\n", "b\n"], ["c\n"], "python")
    assert registry.page(rule).startswith("It is `wrong`.\n\n**Why.**\n\n```python\n")


def test_shell_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A page with bash fences has examples in shell."""
    rule = page_of(monkeypatch, tmp_path, "X.\n\nBad:\n\n```bash\na\n```\n\nGood:\n\n```bash\nb\n```\n")
    assert registry.examples(rule).language == "shell"


@pytest.mark.parametrize("fence", ["", "```perl\na\n```\n", "```python\na\n```\n\n```bash\na\n```\n"])
def test_pages_without_examples_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fence: str) -> None:
    """No bad example, another language or two of them: an error that names the rule."""
    rule = page_of(monkeypatch, tmp_path, f"X.\n\nBad:\n\n{fence}")
    with pytest.raises(ValueError, match="RW101"):
        registry.examples(rule)


def test_every_chapter_has_a_title() -> None:
    """Each rule belongs to a chapter that has a title."""
    assert all(registry.chapter(rule.id) for rule in registry.all_rules())
