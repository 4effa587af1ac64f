"""One list of collectives out of two: what a rank's Python has called, and what torch's flight recorder has seen."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rankwise.evidence import ring
from rankwise.evidence.facts import Evidence, Group, Op
from rankwise.evidence.notes import Frame, Stack

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The flight recorder tells times by another clock.
_CLOCKS_S = 0.05
_FULL = "the table of texts is full: of some collectives the line is not known"
#: What the flight recorder calls otherwise than torch.distributed.
NAMES = {
    "allreduce": "all_reduce",
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}


def merge(reading: ring.Reading) -> Evidence:
    """Return what a rank's memory file tells."""
    groups = _read_groups(reading)
    flight, dumped_s = _read_json(reading, "flight")
    stacks, stacks_s = _read_json(reading, "stacks")
    first_s = reading.get_s(ring.FIRST_S_AT) - _CLOCKS_S
    seen = [op for entry in flight.get("entries", ()) if (op := _to_native(entry, groups, first_s))]
    native = {(op.group, op.seq): op for op in seen}
    ops: list[Op] = []
    for record in reading.read_records():
        op = _to_op(record)
        twin = None if op.is_message else native.pop((op.group, op.seq), None)
        ops.append(op if twin is None else _join(op, twin))
    ops += native.values()
    steps = reading.get(ring.STEPS_AT)
    return Evidence(
        ops=tuple(sorted(ops, key=lambda op: op.entered_s or 0.0)),
        groups=groups,
        has_joined=bool(reading.get(ring.JOINED_AT)),
        has_left=bool(reading.get(ring.LEFT_AT)),
        has_come=bool(reading.get(ring.MEETS_AT) or reading.get(ring.JOINED_AT)),
        steps=steps,
        step_s=reading.get_s(ring.STEP_S_AT) if steps else None,
        dumped_s=dumped_s,
        stacks=_to_stacks(stacks),
        stacks_s=stacks_s,
        missing=(*flight.get("missing", ()), *([_FULL] if reading.get(ring.FULL_AT) else [])),
    )


def _read_groups(reading: ring.Reading) -> dict[str, Group]:
    groups = {}
    for text in reading.read_texts().values():
        if text.startswith("group\t"):
            name, backend, ranks, own = text.split("\t")[1:5]
            groups[name] = Group(
                name=name, ranks=tuple(sorted(ring.read_ranks(ranks))), backend=backend, own=int(own) if own else None
            )  # fmt: skip
    return groups


def _read_json(reading: ring.Reading, area: str) -> tuple[dict[str, Any], float | None]:
    report = reading.read_report(area)
    if report is None:
        return {}, None
    return dict(json.loads(report[1])), report[2]


def _to_op(record: ring.Record) -> Op:
    group = record.group.split("\t")[1] if record.group else ""
    return Op(
        group=group,
        seq=record.seq,
        name=record.name,
        shapes=record.shapes,
        dtypes=record.dtypes,
        root=None if record.root == ring.NOBODY else record.root,
        peer=None if record.peer == ring.NOBODY else record.peer,
        reduce_op=record.reduce_op or None,
        site=record.site or None,
        inside=tuple(record.inside.split(">")) if record.inside else (),
        entered_s=record.entered_s,
        is_over=record.state != ring.ENTERED,
        has_raised=record.state == ring.RAISED,
    )


def _to_native(entry: Mapping[str, Any], groups: Mapping[str, Group], first_s: float) -> Op | None:
    """Return an entry of the flight recorder; None if it belongs to a default group that is no more."""
    if entry["at_s"] < first_s:
        return None
    # A group with different backends for different devices is one group for each: they count for themselves.
    one_of_several = f"{entry['group']}:{entry['backend']}"
    return Op(
        group=one_of_several if one_of_several in groups else entry["group"],
        seq=entry["seq"],
        name=NAMES.get(entry["name"], entry["name"]),
        shapes=tuple(tuple(shape) for shape in entry["shapes"]),
        dtypes=tuple(entry["dtypes"]),
        site=entry["site"] or None,
        inside=tuple(entry["inside"]),
        source="native",
        entered_s=entry["at_s"],
        is_over=entry["over"],
    )


def _join(op: Op, twin: Op) -> Op:
    """Return one collective that both have told of."""
    return replace(
        op, is_over=op.is_over or twin.is_over, site=op.site or twin.site, inside=op.inside or twin.inside
    )


def _to_stacks(told: Mapping[str, Any]) -> dict[str, Stack]:
    return {
        name: Stack(
            frames=tuple(Frame(file=file, line=line, function=function) for file, line, function in frames)
        )
        for name, frames in told.items()
    }
