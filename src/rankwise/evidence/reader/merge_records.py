"""One list of collectives out of two: what a rank's Python has called, and what torch's flight recorder has seen."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from rankwise.base.faults import FaultRecord
from rankwise.evidence.in_rank import ring
from rankwise.evidence.reader.notes import Stack
from rankwise.evidence.reader.replicas import Replica
from rankwise.evidence.reader.scene import Evidence, Group, Op
from rankwise.evidence.reader.scene_file import fill

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: The flight recorder tells times by another clock.
_CLOCKS_S = 0.05
_FULL = "the table of texts is full: the lines of some collectives are not known"
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


@final
class Merger:
    """Reads the memory file of one rank again and again: what has not changed since the last time is not made anew."""

    def __init__(self) -> None:
        self._raw_texts: tuple[int, bytes] = (-1, b"")
        self._texts: dict[int, str] = {}
        self._groups: dict[str, Group] = {}
        self._ops: dict[bytes, Op | None] = {}
        self._entries: dict[tuple[Any, ...], Op | None] = {}
        self._joined: dict[tuple[int, int], tuple[Op, Op, Op]] = {}
        self._flight: tuple[tuple[Any, ...], list[Op], tuple[str, ...]] = ((), [], ())
        self._answer: tuple[tuple[Any, ...], dict[str, Stack], dict[str, FaultRecord] | None] = ((), {}, None)

    def read(self, raw: bytes) -> Evidence | None:
        """Return what a rank's memory file tells; None if that is nothing, or the script has written into the file, so that it is worth nothing."""
        reading = ring.RingReader(raw)
        try:
            return self.merge(reading) if reading.is_begun else None
        except (ValueError, LookupError, TypeError):
            return None

    def merge(self, reading: ring.RingReader) -> Evidence:
        """Return what a rank's memory file tells."""
        self._read_texts(reading)
        native, missing, dumped_s = self._read_flight(reading)
        stacks, handled, stacks_s = self._read_answer(reading)
        steps, digests = reading.get(ring.STEPS_AT), reading.read_report("digests")
        return Evidence(
            ops=self._read_ops(reading, native),
            groups=self._groups,
            has_joined=bool(reading.get(ring.JOINED_AT)),
            has_left=bool(reading.get(ring.LEFT_AT)),
            has_come=bool(reading.get(ring.MEETS_AT) or reading.get(ring.JOINED_AT)),
            steps=steps,
            step_s=reading.get_s(ring.STEP_S_AT) if steps else None,
            dumped_s=dumped_s,
            stacks=stacks,
            handled=handled,
            stacks_s=stacks_s,
            replicas=() if digests is None else _parse_replicas(digests[1]),
            missing=(*missing, *([_FULL] if reading.get(ring.FULL_AT) else [])),
        )

    def _read_texts(self, reading: ring.RingReader) -> None:
        raw = reading.read_raw_texts()
        if raw == self._raw_texts:
            return
        if not raw[1].startswith(self._raw_texts[1].rstrip(b"\0")):
            self._ops = {}  # another table, in which the same numbers mean other texts
        self._raw_texts, self._texts = raw, reading.read_texts()
        self._groups = _find_groups(self._texts)
        self._entries = {}  # of which group they are depends on the groups that there are

    def _read_ops(self, reading: ring.RingReader, seen: list[Op]) -> tuple[Op, ...]:
        native = {(op.group, op.seq): op for op in seen}
        ops: list[Op] = []
        joined: dict[tuple[int, int], tuple[Op, Op, Op]] = {}
        for op in self._read_records(reading):
            twin = None if op.is_message else native.pop((op.group, op.seq), None)
            if twin is None:
                ops.append(op)
                continue
            key = (id(op), id(twin))
            known = self._joined.get(key) or (op, twin, _join(op, twin))
            joined[key] = known
            ops.append(known[2])
        self._joined = joined
        ops += native.values()
        return tuple(sorted(ops, key=lambda op: op.entered_s or 0.0))

    def _read_records(self, reading: ring.RingReader) -> list[Op]:
        known: dict[bytes, Op | None] = {}
        found: list[Op] = []
        for raw in reading.read_raw_records():
            if raw in self._ops:
                op = known[raw] = self._ops[raw]
            else:
                try:
                    record = ring.Record(raw, self._texts)
                except ValueError:
                    continue  # its middle was being written
                op = None if record.state == ring.REFUSED else _to_op(record)
                if record.is_clear:  # else a text came after the table was read
                    known[raw] = op
            if op is not None:
                found.append(op)
        self._ops = known
        return found

    def _read_flight(self, reading: ring.RingReader) -> tuple[list[Op], tuple[str, ...], float | None]:
        """Return what the flight recorder has seen, what it can't show, and of when that is."""
        first_s = reading.get_s(ring.FIRST_S_AT) - _CLOCKS_S
        report = reading.read_report("flight")
        if report is None:
            return [], (), None
        turn, raw, at_s = report
        key = (turn, at_s, first_s, self._raw_texts[0])
        if key != self._flight[0]:
            answer = json.loads(raw)
            self._flight = (
                key, self._read_entries(answer.get("entries", ()), first_s), tuple(answer.get("missing", ()))
            )  # fmt: skip
        return self._flight[1], self._flight[2], at_s

    def _read_entries(self, entries: Sequence[Mapping[str, Any]], first_s: float) -> list[Op]:
        known: dict[tuple[Any, ...], Op | None] = {}
        for entry in entries:
            key = (
                entry["group"],
                entry["backend"],
                entry["seq"],
                entry["name"],
                entry["at_s"],
                entry["over"],
                entry["at_s"] < first_s,
            )
            known[key] = self._entries[key] if key in self._entries else _to_native(entry, self._groups, first_s)
        self._entries = known
        return [op for op in known.values() if op is not None]

    def _read_answer(
        self, reading: ring.RingReader
    ) -> tuple[dict[str, Stack], dict[str, FaultRecord] | None, float | None]:
        """Return the stacks of all threads, what they are handling, and of when that is."""
        report = reading.read_report("stacks")
        if report is None:
            return {}, None, None
        turn, raw, at_s = report
        if (turn, at_s) != self._answer[0]:
            answer = json.loads(raw)
            modules = answer.get("modules", {})
            stacks = {
                name: fill(Stack, {"frames": frames, "module": modules.get(name)})
                for name, frames in answer["stacks"].items()
            }
            handled = {name: _to_fault(fault) for name, fault in answer["handled"].items()}
            self._answer = (turn, at_s), stacks, handled
        return self._answer[1], self._answer[2], at_s


def _find_groups(texts: Mapping[int, str]) -> dict[str, Group]:
    groups = {}
    for text in texts.values():
        if text.startswith("group\t"):
            name, backend, ranks, own = text.split("\t")[1:5]
            groups[name] = Group(
                name=name, ranks=tuple(sorted(ring.read_ranks(ranks))), backend=backend, own=int(own) if own else None
            )  # fmt: skip
    return groups


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
        gives=record.gives,
        gets=record.gets,
        site=record.site or None,
        inside=tuple(record.inside.split(">")) if record.inside else (),
        module=record.module or None,
        entered_s=record.entered_s,
        source="python",
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
        op,
        is_over=op.is_over or twin.is_over,
        site=op.site or twin.site,
        inside=op.inside or twin.inside,
    )


@functools.lru_cache(maxsize=128)  # read again with every record that the rank makes
def _parse_replicas(raw: bytes) -> tuple[Replica, ...]:
    return tuple(fill(Replica, body) for body in json.loads(raw))


def _to_fault(body: Mapping[str, Any]) -> FaultRecord:
    """Return an exception that is being handled: its traceback as Python prints it, but without the text of the lines."""
    lines = [f'  File "{file}", line {line}, in {function}' for file, line, function in body["frames"]]
    frames = fill(Stack, dict(body)).frames
    where = next((str(frame) for frame in reversed(frames) if frame.is_users), None)
    message = str(body["message"])
    return FaultRecord(
        message=message,
        callstack="\n".join(["Traceback (most recent call last):", *lines, message]),
        where=where,
    )
