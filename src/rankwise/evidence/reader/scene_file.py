"""Facts as JSON and back, a scene first of all: what was known of all ranks at one moment, for another day, another machine, another clock."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rankwise.base.faults import FaultRecord
from rankwise.evidence.reader.notes import Frame, Stack
from rankwise.evidence.reader.replicas import Digest, Replica
from rankwise.evidence.reader.scene import Child, Evidence, Group, Op, RankFacts, Scene
from rankwise.evidence.reader.size_limits import check_world_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

#: Grows when a reader of before would misread what is written now; a new field with a default is no such thing.
VERSION = 1

Plain = dict[str, Any]
Parts = dict[type, dict[str, type]]
_Fact = TypeVar("_Fact")
#: The fields of facts that hold facts themselves: one or none, several, or one for each name.
PARTS: Parts = {
    Scene: {"ranks": RankFacts},
    RankFacts: {"fault": FaultRecord, "evidence": Evidence, "stack": Stack, "children": Child},
    Child: {"stack": Stack},
    Evidence: {"ops": Op, "groups": Group, "stacks": Stack, "handled": FaultRecord, "replicas": Replica},
    Replica: {"digests": Digest},
}
_BY_NAME = frozenset({"groups", "stacks", "handled"})
#: The fields that are moments on the host's clock; whatever else ends in ``_s`` is a duration, or a time of day.
MOMENTS: dict[type, tuple[str, ...]] = {
    Scene: ("now_s",),
    RankFacts: ("ended_s", "finished_s"),
    Evidence: ("step_s", "dumped_s", "stacks_s"),
    Op: ("entered_s",),
    FaultRecord: ("monotonic_s",),
}


def to_json(scene: Scene) -> Plain:
    """Return a scene as what ``json.dumps`` takes."""
    return {"version": VERSION, **spread(scene)}


def from_json(body: Plain) -> Scene:
    """Return the scene that ``to_json`` was given; fields that are unknown here are left out.

    Args:
        body: As it was read.

    Raises:
        ValueError: It is no scene, or one of a later version.
    """
    with checked(body, "scene"):
        scene = fill(Scene, body)
        check_world_size(scene.world_size)
        return scene


@contextmanager
def checked(body: Plain, what: str) -> Iterator[None]:
    """Make of whatever goes wrong with a file a ValueError: it is none of these, or one of a later version."""
    if body.get("version") != VERSION:
        raise ValueError(f"version {body.get('version')!r} of a {what}, but this reader knows {VERSION}")
    try:
        yield
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no {what}: {error!r}") from error


def spread(fact: object, parts: Parts = PARTS) -> Plain:
    """Return a fact as JSON; not by ``dataclasses.asdict``, which copies all below it and takes ten times as long."""
    if isinstance(fact, Stack):
        frames = [[frame.file, frame.line, frame.function] for frame in fact.frames]
        return {"frames": frames} if fact.module is None else {"frames": frames, "module": fact.module}
    kind: Any = type(fact)
    body = {name: getattr(fact, name) for name in _list_fields(kind)}
    for name, part in parts.get(kind, {}).items():
        # Operations as rows of a table: a thousand of them for each rank.
        body[name] = _spread_table(body[name]) if part is Op else _change(body[name], spread, parts)
    return body


def fill(kind: Callable[..., _Fact], body: Plain, parts: Parts = PARTS) -> _Fact:
    """Make a fact of its JSON; fields that are unknown here are left out."""
    if kind is Stack:
        frames = tuple(Frame(file=file, line=line, function=name) for file, line, name in body["frames"])
        return kind(frames=frames, module=body.get("module"))
    own = parts.get(cast("type", kind), {})
    values = {name: freeze(body[name]) for name in _list_fields(kind) if name in body and name not in own}
    for name, part in own.items():
        if name not in body:
            continue
        value = body[name]
        if part is Op:
            value = [dict(zip(value["columns"], row, strict=True)) for row in value["rows"]]
        if name not in _BY_NAME and isinstance(value, dict):
            values[name] = fill(part, value, parts)
        else:
            values[name] = _change(value, functools.partial(fill, part), parts)
    return kind(**values)


def shift(fact: _Fact, later_s: float) -> _Fact:
    """Return a fact on a clock that is ahead by so much: with all its moments, and those of the facts in it."""
    changed = {name: _change(getattr(fact, name), shift, later_s) for name in PARTS.get(type(fact), ())}
    for name in MOMENTS.get(type(fact), ()):
        if (moment := getattr(fact, name)) is not None:
            changed[name] = moment + later_s
    return replace(fact, **changed) if changed else fact  # type: ignore[type-var]


def _change(value: Any, change: Any, *args: Any) -> Any:
    """Return what a fact, several or those by name, or none, are changed to."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {name: change(one, *args) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(change(one, *args) for one in value)
    return change(value, *args)


def freeze(value: Any) -> Any:
    """Turn lists back into tuples, at all depths."""
    return tuple(freeze(one) for one in value) if isinstance(value, list) else value


@functools.cache
def _list_fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _spread_table(ops: tuple[Op, ...]) -> Mapping[str, Any]:
    names = _list_fields(Op)
    return {"columns": names, "rows": [[getattr(op, name) for name in names] for op in ops]}
