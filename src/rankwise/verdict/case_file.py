"""A case as JSON and back, its scene apart: that is a file of its own."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from rankwise.evidence.notes import Problem
from rankwise.evidence.scene_file import VERSION, fill, fill_fault, fill_stack, spread_fault, spread_stack
from rankwise.verdict.case import Case, RankEnd, Waiting
from rankwise.verdict.sight import Sight

if TYPE_CHECKING:
    from collections.abc import Iterable

Plain = dict[str, Any]
_END_FIELDS = tuple(field.name for field in fields(RankEnd))
_SIGHT_FIELDS = tuple(field.name for field in fields(Sight))
_OTHERS = tuple(
    field.name for field in fields(Case) if field.name not in {"ranks", "scene", "sights", "decided"}
)


def to_json(case: Case) -> Plain:
    """Return a case, without its scene, as what ``json.dumps`` takes."""
    return {
        "version": VERSION,
        **{name: getattr(case, name) for name in _OTHERS},
        "ranks": [_spread_end(end) for end in case.ranks],
        "sights": [_spread_sight(sight) for sight in case.sights],
        "decided": [_spread_sight(sight) for sight in case.decided],
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
            sights=tuple(map(_fill_sight, body["sights"])),
            decided=tuple(map(_fill_sight, body.get("decided", ()))),
            scene=None,
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no case: {error!r}") from error


def write_sights(sights: Iterable[Sight]) -> str:
    """Return sights as one line of text, for another node; moments are left out, as its clock is another."""
    return json.dumps([{**_spread_sight(sight), "since_s": None} for sight in sights], separators=(",", ":"))


def read_sights(text: str) -> tuple[Sight, ...]:
    """Return the sights that ``write_sights`` was given; none of an empty text.

    Raises:
        ValueError: It is no such text.
    """
    return tuple(map(_fill_sight, json.loads(text or "[]")))


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


def _spread_sight(sight: Sight) -> Plain:
    body = {name: getattr(sight, name) for name in _SIGHT_FIELDS}
    waiting = [{"rank": one.rank, "where": one.where, "op": one.op} for one in sight.waiting]
    return {**body, "waiting": waiting}


def _fill_sight(body: Plain) -> Sight:
    return fill(Sight, body, waiting=tuple(fill(Waiting, one) for one in body["waiting"]))
