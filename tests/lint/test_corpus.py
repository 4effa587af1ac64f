"""Scripts as users write them: the mistakes are found, by their class, and legal scripts are left in peace."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.lint.inputs.reading import read_file
from rankwise.lint.program import Project
from rankwise.lint.registry import all_rules
from rankwise.lint.running.check import check_unit

if TYPE_CHECKING:
    from rankwise.lint.finding import Finding

CORPUS = Path(__file__).parent / "corpus"
SETS = sorted(path.parent.name for path in CORPUS.glob("*/index.json"))
#: Of mistakes that break, hang or are silently wrong, as many are found at least.
LEAST_RECALL = 0.95


def entries(name: str) -> dict[str, dict[str, Any]]:
    index = json.loads((CORPUS / name / "index.json").read_text())
    return {path: entry for path, entry in index.items() if not path.startswith("_")}


def files_of(path: Path) -> list[Path]:
    if path.name in {"train.py", "main.py"}:
        path = path.parent
    return sorted(one for one in path.rglob("*") if one.is_file() and one.suffix != ".pyc") if path.is_dir() else [path]


@cache
def findings_of(path: Path) -> tuple[Finding, ...]:
    found: list[Finding] = []
    files = files_of(path)
    for file in files:
        for unit in read_file(str(file), file.read_bytes()).units:
            found += check_unit(unit, Project(roots=(file.parent, path)), all_rules())
    return tuple(found)


def is_found(path: Path, entry: dict[str, Any]) -> bool:
    found = findings_of(path)
    by_name = any(expected.startswith("M:") for expected in entry["expect"])
    return any(one.failure_class in entry["expect"] or by_name for one in found)


@pytest.mark.parametrize("name", SETS)
def test_mistakes_are_found(name: str) -> None:
    """Of the scripts that break, hang or are silently wrong, nearly all are found, with the class of the mistake."""
    bad = {path: entry for path, entry in entries(name).items() if entry["severity"] == "error"}
    missed = [path for path, entry in bad.items() if not is_found(CORPUS / name / path, entry)]
    assert len(missed) <= (1 - LEAST_RECALL) * len(bad), missed


@pytest.mark.parametrize("name", SETS)
def test_legal_scripts_have_no_errors(name: str) -> None:
    """Scripts that look like mistakes and are none get no finding that says error."""
    legal = [path for path, entry in entries(name).items() if not entry["expect"]]
    accused = {
        path: [
            f"{one.rule} line {one.span.line}: {one.message}"
            for one in findings_of(CORPUS / name / path)
            if one.severity == "error"
        ]
        for path in legal
    }
    assert {path: what for path, what in accused.items() if what} == {}


@pytest.mark.parametrize("name", SETS)
def test_findings_stand_at_the_mistake(name: str) -> None:
    """Where the place of a mistake is known, a finding of its class stands there, in nine of ten scripts."""
    elsewhere, num_found = [], 0
    for path, entry in entries(name).items():
        if not entry["expect"] or not entry.get("lines") or "cells" in entry or not (CORPUS / name / path).is_file():
            continue
        right = [one for one in findings_of(CORPUS / name / path) if one.failure_class in entry["expect"]]
        if right:
            num_found += 1
            places = [range(first, last + 1) for first, last in entry["lines"]]
            if not any(one.span.line in place for one in right for place in places):
                elsewhere.append((path, [one.span.line for one in right], entry["lines"]))
    assert len(elsewhere) <= 0.1 * num_found, elsewhere
