"""A case as JSON and back, its scene apart: that is a file of its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rankwise.base.faults import FaultRecord
from rankwise.evidence.reader.notes import Problem, Stack
from rankwise.evidence.reader.scene_file import PARTS, VERSION, Parts, Plain, checked, fill, spread
from rankwise.verdict.case import Case, LostNode, RankEnd
from rankwise.verdict.finding import JobFinding, Waiting

if TYPE_CHECKING:
    from collections.abc import Iterable

_PARTS: Parts = PARTS | {
    Case: {"ranks": RankEnd, "findings": JobFinding, "decided": JobFinding, "lost_nodes": LostNode},
    RankEnd: {"fault": FaultRecord, "crash": Stack, "stack": Stack, "problem": Problem},
    JobFinding: {"waiting": Waiting},
}


def to_json(case: Case) -> Plain:
    """Return a case, without its scene, as what ``json.dumps`` takes."""
    body = {"version": VERSION, **spread(case, _PARTS)}
    del body["scene"]
    body["sights"] = body.pop("findings")  # as earlier versions wrote them
    return body


def from_json(body: Plain) -> Case:
    """Return the case that ``to_json`` was given, without a scene.

    Raises:
        ValueError: It is no case, or one of a later version.
    """
    with checked(body, "case"):
        # Version 0.2 called the supervisor keeper.
        lost = bool(body.get("supervisor_lost", body.get("keeper_lost")))
        return fill(Case, {**body, "findings": body["sights"], "supervisor_lost": lost}, _PARTS)


def write_findings(findings: Iterable[JobFinding]) -> str:
    """Return findings as one line of text, for another node; moments are left out, as its clock is another."""
    return json.dumps([{**spread(finding, _PARTS), "since_s": None} for finding in findings], separators=(",", ":"))


def read_findings(text: str) -> tuple[JobFinding, ...]:
    """Return the findings that ``write_findings`` was given; none of an empty text.

    Raises:
        ValueError: It is no such text.
    """
    return tuple(fill(JobFinding, finding, _PARTS) for finding in json.loads(text or "[]"))
