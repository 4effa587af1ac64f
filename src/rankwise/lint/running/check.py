"""The check of a piece of code: what the rules find, without what a comment silences, placed in the file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import RankwiseError
from rankwise.lint.inputs.unparsed import find_unparsed
from rankwise.lint.program import matters
from rankwise.lint.rules import unparsed as unreadable
from rankwise.lint.running.suppress import find_suppressions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rankwise.lint.code_unit import CodeUnit
    from rankwise.lint.finding import Finding
    from rankwise.lint.program import Project
    from rankwise.lint.rule import Rule


def check_unit(
    unit: CodeUnit, project: Project, rules: Sequence[Rule[Any]], failures: list[str] | None = None
) -> list[Finding]:
    """Find the mistakes in a piece of code.

    Args:
        unit: The code.
        project: What it may import.
        rules: What to look for.
        failures: Takes what went wrong inside of a rule, which then has no findings; None lets the rule's error
            through.

    Returns:
        Findings in the order of the file; their places are those in the file.

    Raises:
        UsageError: The piece is shell text, and the parser for it is not installed.
    """
    if unit.language == "python" and not (matters(unit.code) or project.starts_ranks(Path(unit.path), unit.code)):
        found = _tell_unparsed(unit)
    else:
        found = _apply(unit, project, rules, failures)
    if not found:
        return []
    silenced = find_suppressions(unit)
    shown = {one for one in found if not silenced.hides(one.rule, one.span)}
    return sort_findings(unit.place_finding(one) for one in shown)


def _concerns(rule: Rule[Any], studied: Any) -> bool:
    """Whether a rule can find anything: most need a text in which something can be run."""
    return not rule.needs_ranks or bool(getattr(studied, "entries", True))


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Put findings into the order in which they are read, each once."""
    key = {one: (one.path, one.cell or 0, one.span, one.rule, one.message) for one in findings}
    return sorted(key, key=key.__getitem__)


def _apply(unit: CodeUnit, project: Project, rules: Sequence[Rule[Any]], failures: list[str] | None) -> list[Finding]:
    found: list[Finding] = []
    try:
        studied = _study(unit, project)
    except SyntaxError as error:
        if found := _tell_unparsed(unit):
            return found
        _note(failures, "the model", unit.path, error)
        return found
    except RankwiseError:
        raise  # the shell's parser is not installed
    except Exception as error:  # noqa: BLE001 - the one edge: a check that breaks on one file goes on with the next
        _note(failures, "the model", unit.path, error)
        return found
    for rule in rules:
        if rule.looks_at == unit.language and rule.id != unreadable.text_is_not_python.id and _concerns(rule, studied):
            try:
                found += rule.check(studied)
            except Exception as error:  # noqa: BLE001 - the same edge, for one rule
                _note(failures, f"rule {rule.id}", unit.path, error)
    return found


def _tell_unparsed(unit: CodeUnit) -> list[Finding]:
    unparsed = find_unparsed(unit.code)
    return [] if unparsed is None else [unreadable.tell(unit.path, unparsed)]


def _study(unit: CodeUnit, project: Project) -> object:
    if unit.language == "shell":
        from rankwise.lint.shell.study import study_shell  # noqa: PLC0415 - its parser is an extra

        return study_shell(unit)
    from rankwise.lint.simulated_run import study  # noqa: PLC0415 - a run that finds all in its cache needs no model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd escapes in the user's strings are not ours to tell
        return study(unit, project)


def _note(failures: list[str] | None, who: str, path: str, error: Exception) -> None:
    if failures is None:
        raise error
    reported = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {reported[-1]}" if reported else type(error).__name__
    failures.append(f"RW999 internal: {who} failed on {path}: {what}; please report it")
