"""The pages of the rules tell the truth: their bad examples are found, their good ones are clean, and docs/ shows what the code says."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.lint import registry
from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.program import Project
from rankwise.lint.running.check import check_unit

if TYPE_CHECKING:
    from types import ModuleType

    from rankwise.lint.finding import Finding
    from rankwise.lint.rule import Rule

ROOT = Path(__file__).parents[2]
RULES = registry.all_rules()
#: Failure classes that leave something in a script or in a command that a reader could see.
IN_TEXT = frozenset(
    """
    I1 I3 I4 I6 I9 I11 I13 I14 I15 I16 I17 I19 I20 I21 I24 I25 I26 I27 I28
    L1 L2 L3 L4 L5 L6 L7 L8 L9 L10 L11 L12 L13 L14 L15 L16
    C1 C2 C4 C5 C8 C9 C10 C11 C12 C13 C14 C15 C16 C17 C18 C19 C20 C21 C22 C23 C24 C25 C26 C27
    D1 D3 D4 D5 D7 D8 D9 D10 D11 D13 D14 D15 D16 D17 D18 D19 D20 D23 D24 D25 D26 D27 D28 D29 D30
    X1 X2 X3 X4 X5 X6 X7 X8 X9 X10 X11 X12 X13 X14 X15 X17 X18
    K1 K2 K3 K4 K5 K6 K7 K8 K9 M1 M2 M3 M4 M5 M6 M7 M8 R1 R2 R4 R6 R7 R8 R13 R14 R15
    """.split()  # noqa: SIM905
)


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_rules", ROOT / "docs" / "generate_rules.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()


def find(code: str, language: Any) -> list[Finding]:
    """Check an example as a file of its own."""
    name = "train.py" if language == "python" else "job.sh"
    return check_unit(CodeUnit(path=name, language=language, code=code), Project(), RULES)


def by_id(rule: Rule[Any]) -> str:
    return rule.id


@pytest.mark.parametrize("rule", RULES, ids=by_id)
def test_bad_examples_are_found(rule: Rule[Any]) -> None:
    """Each bad example on a rule's page gives that rule's finding, which says what to do; a command gives no other."""
    bad, _, language = registry.examples(rule)
    for code in bad:
        found = find(code, language)
        assert language != "shell" or {one.rule for one in found} == {rule.id}
        found = [one for one in found if one.rule == rule.id]
        assert found, f"{rule.id} does not see its own example:\n{code}"
        for one in found:
            assert one.fix.strip()
            assert one.message.strip()
            assert "\n" not in one.message + one.fix
            assert one.failure_class == "" or one.failure_class in rule.classes


@pytest.mark.parametrize("rule", RULES, ids=by_id)
def test_good_examples_are_clean(rule: Rule[Any]) -> None:
    """Each good example on a rule's page gives no finding of any rule, hints apart."""
    _, good, language = registry.examples(rule)
    assert good, f"the page of {rule.id} shows no good example"
    for code in good:
        found = [one for one in find(code, language) if language == "shell" or one.severity != "hint"]
        assert found == [], code


@pytest.mark.parametrize("rule", RULES, ids=by_id)
def test_page_has_its_parts(rule: Rule[Any]) -> None:
    """A page says what is wrong, why it breaks, and when the rule says nothing; the rule's words are those of a list."""
    text = registry.page(rule)
    assert re.match(r"[^\n]+\.\n\n", text), "the first line is not one sentence"
    assert "**Why it breaks.**" in text
    assert "**When it says nothing.**" in text
    assert rule.summary
    assert not rule.summary.endswith(".")
    assert "\n" not in rule.summary
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", rule.name)
    assert inspect.isfunction(rule.look)


def test_classes_of_rules_are_explained() -> None:
    """Each failure class that a rule finds has its entry in the reference."""
    anchors = GENERATOR.find_anchors()
    used = {one: rule.id for rule in RULES for one in rule.classes}
    assert {id_: rule for id_, rule in used.items() if id_ not in anchors} == {}


def test_classes_are_found_or_told_why_not() -> None:
    """Each failure class that shows in text or in a command has a rule, or stands in docs/undecided.py with the reason; none does both."""
    found = {one for rule in RULES for one in rule.classes}
    told = set(GENERATOR.UNDECIDED)
    assert sorted(IN_TEXT - found - told) == [], "write a rule, or the reason why there is none"
    assert sorted(told & found) == [], "there is a rule now: take the reason out"
    assert sorted(told - IN_TEXT) == []
    assert all(name and reason.endswith(".") for name, reason in GENERATOR.UNDECIDED.values())


def test_pages_in_docs_are_those_of_the_code() -> None:
    """docs/rules/check holds what `make docs` would write now, and nothing else."""
    folder = ROOT / "docs" / "rules" / "check"
    written = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    pages = GENERATOR.render()
    assert sorted(written) == sorted(pages), "run `make docs`"
    assert [name for name, text in pages.items() if written[name] != text] == [], "run `make docs`"


#: What these mend can't be seen on a page: a blank behind the backslash at the end of a line.
NOT_SHOWN = {"RW706"}


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.fixable and rule.id not in NOT_SHOWN], ids=by_id)
def test_fixable_rules_bring_edits(rule: Rule[Any]) -> None:
    """A rule that says `--fix` mends it does so in at least one of its bad examples, and then no longer finds it there."""
    from rankwise.lint.running.text_edits import fix_text

    bad, _, language = registry.examples(rule)
    fixed = [(after, num) for code in bad for after, num in [fix_text(code, lambda text: find(text, language))] if num]
    assert fixed, "no bad example has edits"
    for after, _ in fixed:
        assert not [one for one in find(after, language) if one.rule == rule.id and one.edits], after


def test_rules_that_are_not_fixable_bring_none() -> None:
    """A rule whose findings carry edits says that it is fixable."""
    told = {rule.id: rule.fixable for rule in RULES}
    for rule in RULES:
        bad, _, language = registry.examples(rule)
        for code in bad:
            assert all(told[one.rule] or not one.edits for one in find(code, language)), rule.id
