"""A case as JSON and back, its scene apart: that is a file of its own."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from rankwise.evidence.reader.notes import Problem
from rankwise.evidence.reader.scene_file import (
    VERSION,
    fill,
    fill_fault,
    fill_stack,
    spread_fault,
    spread_stack,
)
from rankwise.verdict.case import Case, LostNode, RankEnd, Waiting
from rankwise.verdict.finding import JobFinding

if TYPE_CHECKING:
    from collections.abc import Iterable

Plain = dict[str, Any]
_END_FIELDS = tuple(field.name for field in fields(RankEnd))
_FINDING_FIELDS = tuple(field.name for field in fields(JobFinding))
_OTHERS = tuple(
    field.name for field in fields(Case) if field.name not in {"ranks", "scene", "findings", "decided"}
)


def to_json(case: Case) -> Plain:
    """Return a case, without its scene, as what ``json.dumps`` takes."""
    return {
        "version": VERSION,
        **{name: getattr(case, name) for name in _OTHERS},
        "ranks": [_spread_end(end) for end in case.ranks],
        "lost_nodes": [asdict(one) for one in case.lost_nodes],
        "sights": [_spread_finding(finding) for finding in case.findings],
        "decided": [_spread_finding(finding) for finding in case.decided],
    }


def from_json(body: Plain) -> Case:
    """Return the case that ``to_json`` was given, without a scene.

    Raises:
        ValueError: It is no case, or one of a later version.
    """
    if body.get("version") != VERSION:
        raise ValueError(f"version {body.get('version')!r} of a case, but this reader knows {VERSION}")
    try:
        return fill(
            Case,
            body,
            ranks=tuple(map(_fill_end, body["ranks"])),
            findings=tuple(map(_fill_finding, body["sights"])),
            decided=tuple(map(_fill_finding, body.get("decided", ()))),
            scene=None,
            lost_nodes=tuple(fill(LostNode, one) for one in body.get("lost_nodes", ())),
            supervisor_lost=bool(body.get("supervisor_lost", body.get("keeper_lost"))),  # as 0.2 called it
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no case: {error!r}") from error


def write_findings(findings: Iterable[JobFinding]) -> str:
    """Return findings as one line of text, for another node; moments are left out, as its clock is another."""
    return json.dumps(
        [{**_spread_finding(finding), "since_s": None} for finding in findings], separators=(",", ":")
    )


def read_findings(text: str) -> tuple[JobFinding, ...]:
    """Return the findings that ``write_findings`` was given; none of an empty text.

    Raises:
        ValueError: It is no such text.
    """
    return tuple(map(_fill_finding, json.loads(text or "[]")))


def _spread_end(end: RankEnd) -> Plain:
    body = {name: getattr(end, name) for name in _END_FIELDS}
    return {
        **body,
        "fault": spread_fault(end.fault),
        "problem": None if end.problem is None else asdict(end.problem),
        "crash": spread_stack(end.crash),
        "stack": spread_stack(end.stack),
    }


def _fill_end(body: Plain) -> RankEnd:
    return fill(
        RankEnd,
        body,
        fault=fill_fault(body["fault"]),
        problem=_fill_problem(body.get("problem")),
        crash=fill_stack(body["crash"]),
        stack=fill_stack(body["stack"]),
    )


def _fill_problem(body: Plain | None) -> Problem | None:
    return None if body is None else fill(Problem, body)


def _spread_finding(finding: JobFinding) -> Plain:
    body = {name: getattr(finding, name) for name in _FINDING_FIELDS}
    waiting = [{"rank": one.rank, "where": one.where, "op": one.op} for one in finding.waiting]
    return {**body, "waiting": waiting}


def _fill_finding(body: Plain) -> JobFinding:
    return fill(JobFinding, body, waiting=tuple(fill(Waiting, one) for one in body["waiting"]))
