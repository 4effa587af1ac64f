"""SARIF 2.1.0, the form that code hosts and editors read (https://docs.oasis-open.org/sarif/sarif/v2.1.0/)."""

from __future__ import annotations

import hashlib
import json
import os.path
from collections import Counter
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rankwise.base import __version__
from rankwise.lint.registry import all_rules, chapter, page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.lint.finding import Edit, Finding, Span
    from rankwise.lint.reporters.text import LinesOf
    from rankwise.lint.rule import Rule

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "hint": "note"}
Json = dict[str, Any]


def render(findings: Sequence[Finding], *, lines_of: LinesOf, root: Path | None = None) -> str:
    """Return one run with all rules and a result for each finding.

    Args:
        findings: What was found.
        lines_of: Gives the lines of a file: by them a finding is known again when it has moved.
        root: Folder that the paths are shown relative to; the current one if None.
    """
    rules, home = all_rules(), find_home()
    numbers = {rule.id: number for number, rule in enumerate(rules)}
    writer = _Writer(root or Path.cwd(), lines_of)
    run = {
        "tool": {
            "driver": {
                "name": "rankwise",
                "semanticVersion": __version__,
                **({"informationUri": home} if home else {}),
                "rules": [_describe(rule, home) for rule in rules],
            }
        },
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {"%SRCROOT%": {"description": {"text": "The folder of the check."}}},
        "results": [writer.result(one, numbers) for one in findings],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def find_home() -> str:
    """Return the address of the project's repository, as its package names it; nothing if it names none."""
    from importlib import metadata  # noqa: PLC0415 - it takes a while to import

    try:
        named = metadata.metadata("rankwise").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return ""  # run from a folder of sources
    addresses = {str(one).partition(", ")[0]: str(one).partition(", ")[2] for one in named}
    return addresses.get("Source", "").rstrip("/")


def _describe(rule: Rule[Any], home: str) -> Json:
    text = page(rule)
    return {
        "id": rule.id,
        "name": "".join(word.capitalize() for word in rule.name.split("-")),
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": text.partition("\n\n")[0].strip().replace("\n", " ")},
        "help": {"text": text, "markdown": text},
        **({"helpUri": f"{home}/blob/main/docs/rules/check/{rule.id}.md"} if home else {}),
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        "properties": {
            "tags": [chapter(rule.id), *rule.classes],
            "problem.severity": "recommendation" if rule.severity == "hint" else rule.severity,
        },
    }


class _Writer:
    """Turns findings into results; counts those that look alike, in the order of the file."""

    def __init__(self, root: Path, lines_of: LinesOf) -> None:
        self._root = root
        self._lines_of = lines_of
        self._seen: Counter[tuple[str, str, str]] = Counter()

    def result(self, one: Finding, numbers: dict[str, int]) -> Json:
        where = f" (cell {one.cell}, line {one.span.line})" if one.cell is not None else ""
        advice = f"\n-> {one.fix}" if one.fix else ""
        result: Json = {
            "ruleId": one.rule,
            "level": _LEVELS[one.severity],
            "message": {"text": f"{one.message}{where}{advice}"},
            "locations": [self._location(one.path, one.span, one.cell)],
            "partialFingerprints": {"rankwiseFinding/v1": self._fingerprint(one)},
        }
        if one.rule in numbers:
            result["ruleIndex"] = numbers[one.rule]
        if one.failure_class:
            result["properties"] = {"failureClass": one.failure_class}
        if one.also:
            result["relatedLocations"] = [
                {
                    "id": number,
                    **self._location(path, span, one.cell if path == one.path else None),
                    "message": {"text": word},
                }
                for number, (word, path, span) in enumerate(one.also, 1)
            ]
        # The lines of a cell are no lines of the file: an edit there can't be said in SARIF.
        if one.edits and one.cell is None and not _is_no_file(one.path):
            result["fixes"] = [self._fix(one)]
        return result

    def _location(self, path: str, span: Span, cell: int | None) -> Json:
        if _is_no_file(path):
            return {"logicalLocations": [{"name": path.strip("<>"), "fullyQualifiedName": path}]}
        physical: Json = {"artifactLocation": self._artifact(path)}
        if cell is not None:
            return {
                "physicalLocation": physical,
                "logicalLocations": [{"name": f"cell {cell}", "fullyQualifiedName": f"{path}:cell {cell}"}],
            }
        return {"physicalLocation": {**physical, "region": _region(span)}}

    def _artifact(self, path: str) -> Json:
        absolute = Path(self._root, path)
        try:
            inside = PurePath(_lexical(absolute)).relative_to(_lexical(self._root))
        except ValueError:
            return {"uri": absolute.absolute().as_uri()}
        return {"uri": quote(inside.as_posix()), "uriBaseId": "%SRCROOT%"}

    def _fix(self, one: Finding) -> Json:
        return {
            "description": {"text": one.fix or one.message},
            "artifactChanges": [
                {
                    "artifactLocation": self._artifact(one.path),
                    "replacements": [_replacement(edit) for edit in one.edits],
                }
            ],
        }

    def _fingerprint(self, one: Finding) -> str:
        """Return what stays when lines are added above: the rule and the text of the line, counted in its file."""
        lines = self._lines_of(one.path, one.cell)
        text = lines[one.span.line - 1].strip() if 1 <= one.span.line <= len(lines) else one.message
        key = (one.path, one.rule, text)
        self._seen[key] += 1
        return hashlib.sha256(f"{one.rule}\0{text}\0{self._seen[key]}".encode()).hexdigest()[:32]


def _is_no_file(path: str) -> bool:
    return path.startswith("<") or path == "-"


def _lexical(path: Path) -> str:
    # normpath, not resolve: a link inside the folder is shown by the name that the user gave.
    return os.path.normpath(path)


def _region(span: Span) -> Json:
    return {"startLine": span.line, "startColumn": span.col, "endLine": span.end_line, "endColumn": span.end_col}


def _replacement(edit: Edit) -> Json:
    return {"deletedRegion": _region(edit.span), "insertedContent": {"text": edit.text}}
