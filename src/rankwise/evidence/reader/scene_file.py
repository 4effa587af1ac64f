"""A scene as JSON and back: what was known of all ranks at one moment, for another day and another machine."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rankwise.base.faults import FaultRecord
from rankwise.evidence.reader.notes import Frame, Stack
from rankwise.evidence.reader.replicas import Digest, Replica
from rankwise.evidence.reader.scene import Child, Evidence, Group, Op, RankFacts, Scene
from rankwise.evidence.reader.size_limits import check_world_size

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Grows when a reader of before would misread what is written now; a new field with a default is no such thing.
VERSION = 1

Plain = dict[str, Any]
_Fact = TypeVar("_Fact")
_OP_FIELDS = tuple(field.name for field in fields(Op))


def to_json(scene: Scene) -> Plain:
    """Return a scene as what ``json.dumps`` takes."""
    return {
        "version": VERSION,
        **_spread(scene, ranks=[_spread_rank(facts) for facts in scene.ranks]),
    }


def from_json(body: Plain) -> Scene:
    """Return the scene that ``to_json`` was given; fields that are unknown here are left out.

    Raises:
        ValueError: It is no scene, or one of a later version.
    """
    if body.get("version") != VERSION:
        raise ValueError(f"version {body.get('version')!r} of a scene, but this reader knows {VERSION}")
    try:
        return fill(
            Scene,
            body,
            ranks=tuple(map(_fill_rank, body["ranks"])),
            world_size=check_world_size(body["world_size"]),
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no scene: {error!r}") from error


def fill(kind: type[_Fact], body: Plain, **parts: object) -> _Fact:
    """Make a fact of its fields as JSON has them; ``parts`` are those that are facts themselves."""
    known = {field.name for field in fields(cast("Any", kind))}
    values = {name: freeze(value) for name, value in body.items() if name in known and name not in parts}
    return kind(**values, **parts)


def freeze(value: object) -> object:
    """Turn lists back into tuples, at all depths."""
    if isinstance(value, list):
        return tuple(freeze(one) for one in value)
    return value


def fill_stack(body: Plain | None) -> Stack | None:
    """Make a stack of its JSON; None stays None."""
    if body is None:
        return None
    return Stack(
        frames=tuple(Frame(file=file, line=line, function=name) for file, line, name in body["frames"]),
        module=body.get("module"),
    )


def spread_stack(stack: Stack | None) -> Plain | None:
    """Return a stack as JSON; None stays None."""
    if stack is None:
        return None
    frames = [[frame.file, frame.line, frame.function] for frame in stack.frames]
    return {"frames": frames} if stack.module is None else {"frames": frames, "module": stack.module}


def fill_fault(body: Plain | None) -> FaultRecord | None:
    """Make a fault of its JSON; None stays None."""
    return None if body is None else fill(FaultRecord, body)


def spread_fault(fault: FaultRecord | None) -> Plain | None:
    """Return a fault as JSON; None stays None."""
    return None if fault is None else _spread(fault)


def _spread(fact: object, **parts: object) -> Plain:
    """Return the fields of a fact; not ``dataclasses.asdict``, which copies all below it and takes ten times as long."""
    names = [field.name for field in fields(cast("Any", fact))]
    return {name: parts[name] if name in parts else getattr(fact, name) for name in names}


def _spread_rank(facts: RankFacts) -> Plain:
    evidence = facts.evidence
    return _spread(
        facts,
        fault=spread_fault(facts.fault),
        evidence=None if evidence is None else _spread_evidence(evidence),
        stack=spread_stack(facts.stack),
        children=[_spread(child) for child in facts.children],
    )


def _spread_evidence(evidence: Evidence) -> Plain:
    return _spread(
        evidence,
        # As rows of a table: a thousand of them for each rank.
        ops={
            "columns": _OP_FIELDS,
            "rows": [[getattr(op, name) for name in _OP_FIELDS] for op in evidence.ops],
        },
        groups={name: _spread(group) for name, group in evidence.groups.items()},
        stacks={name: spread_stack(stack) for name, stack in evidence.stacks.items()},
        replicas=[_spread_replica(one) for one in evidence.replicas],
        handled=None
        if evidence.handled is None
        else {name: spread_fault(fault) for name, fault in evidence.handled.items()},
    )


def _spread_replica(replica: Replica) -> Plain:
    return _spread(replica, digests=[_spread(one) for one in replica.digests])


def _fill_replica(body: Plain) -> Replica:
    return fill(Replica, body, digests=tuple(fill(Digest, one) for one in body["digests"]))


def _fill_rank(body: Plain) -> RankFacts:
    evidence = body.get("evidence")
    return fill(
        RankFacts,
        body,
        fault=fill_fault(body.get("fault")),
        evidence=None if evidence is None else _fill_evidence(evidence),
        stack=fill_stack(body.get("stack")),
        children=tuple(fill(Child, child) for child in body.get("children", ())),
    )


def _fill_evidence(body: Plain) -> Evidence:
    table: Mapping[str, Any] = body["ops"]
    ops = tuple(fill(Op, dict(zip(table["columns"], row, strict=True))) for row in table["rows"])
    return fill(
        Evidence,
        body,
        ops=ops,
        groups={name: fill(Group, group) for name, group in body["groups"].items()},
        stacks={name: fill_stack(stack) for name, stack in body["stacks"].items()},
        replicas=tuple(_fill_replica(one) for one in body.get("replicas", ())),
        handled=None
        if (handled := body.get("handled")) is None
        else {name: fill_fault(fault) for name, fault in handled.items()},
    )
