"""Read the files that torch's flight recorder writes when a collective times out: one for each rank, as torch 2.13 has them.

They are pickles, and pickles can run code when they are opened. These hold numbers, texts, lists and dicts; one that names
anything else is refused, and nothing of it is run.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

from rankwise.evidence.in_rank.call_sites import DULL
from rankwise.evidence.in_rank.flight_recorder import TYPES
from rankwise.evidence.reader.merge_records import NAMES
from rankwise.evidence.reader.notes import Frame, Stack
from rankwise.evidence.reader.scene import Evidence, Group, Op

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from rankwise.evidence.reader.scene import Source

Plain = dict[str, Any]
_MOST_INSIDE = 10
_DEFAULT = "default_pg"
_UNTOLD = "unknown"
#: What stands for the user's line in stacks that are made of entries without frames.
UNKNOWN_LINE = f"{_UNTOLD}:0"
_MESSAGE = re.compile(r"(?P<name>send|recv) (?P<mine>\d+)(?:->|<-)(?P<peer>\d+)")
_RANKS = re.compile(r"\[[\d, ]*\]")
#: Whatever a pickle that is damaged, or meant to do harm, makes the reader stumble over.
_BROKEN = (
    pickle.UnpicklingError, ValueError, TypeError, EOFError, AttributeError, LookupError, ImportError, MemoryError, OverflowError,
)  # fmt: skip
_MARKS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_NO_STACK = "a flight recorder shows what a rank has issued, not where it is: its line is that of its last collective"
_NO_FRAMES = "the JSON form of a flight recorder has no source lines"
_NO_MEMBERS = "the members of some groups, such as Gloo's, are not recorded: their collectives are not compared"
_NO_MESSAGES = "the first messages between ranks were overwritten: they are neither counted nor compared"


@final
class _Unpickler(pickle.Unpickler):
    """Reads plain values only."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"it names {module}.{name}, which no flight recorder does: refused, not executed")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FlightDump:
    """One rank's file, read.

    Attributes:
        entries: Its collectives and messages, oldest first.
        configs: What it tells of groups, by their names.
    """

    entries: tuple[Plain, ...]
    configs: Plain

    @property
    def world_size(self) -> int | None:
        """How many ranks the job has; None if it is not told."""
        for name in self.configs:
            if self.configs[name].get("desc") == _DEFAULT and (ranks := self._find_members(name)):
                return len(ranks)
        return None

    @property
    def backends(self) -> dict[str, set[str]]:
        """The backends of each group that has issued anything."""
        found: dict[str, set[str]] = {}
        for entry in self.entries:
            found.setdefault(_group_of(entry), set()).add(_backend_of(entry))
        return found

    @property
    def last_s(self) -> float | None:
        """When the last thing happened that it tells of, in seconds since the epoch."""
        fields = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns")
        return max((entry.get(name) or 0 for entry in self.entries for name in fields), default=0) / 1e9 or None

    def to_evidence(self, *, world_size: int, mixed: Collection[str], dumped_s: float) -> Evidence:
        """Return what it tells of its rank.

        Args:
            world_size: Of the job.
            mixed: Names of groups that have several backends, each with numbers of its own.
            dumped_s: When the file was written, in seconds since the epoch.
        """
        missing = [_NO_STACK] if any(entry.get("frames") for entry in self.entries) else [_NO_STACK, _NO_FRAMES]
        groups: dict[str, Group] = {}
        for entry in self.entries:
            label, name = _label(entry, mixed), _group_of(entry)
            is_default = entry["process_group"][1] == _DEFAULT
            members = self._find_members(name) or (tuple(range(world_size)) if is_default else ())
            if members:
                groups[label] = Group(name=label, ranks=tuple(sorted(members)), backend=_backend_of(entry))
            elif _NO_MEMBERS not in missing:
                missing.append(_NO_MEMBERS)
        is_whole = not self.entries or self.entries[0].get("record_id", 0) == 0
        if not is_whole and any(entry.get("is_p2p") for entry in self.entries):
            missing.append(_NO_MESSAGES)
        return Evidence(
            ops=tuple(self._list_ops(mixed, is_whole=is_whole)),
            groups=groups,
            has_joined=bool(self.entries),
            dumped_s=dumped_s,
            missing=tuple(missing),
        )

    def guess_stack(self) -> Stack | None:
        """Return where the rank was when it issued its last collective, if that is not over; None if it is.

        A GPU's collectives are issued long before they are done, so of them only the user's lines are told: the wait is
        somewhere behind them.
        """
        if not self.entries or not any(not _is_over(entry) for entry in self.entries):
            return None
        last = self.entries[-1]
        frames = _list_frames(last) or [_stand_in(last), Frame(file=_UNTOLD, line=0, function="")]
        stack = Stack(frames=tuple(frames))
        if _backend_of(last) == "nccl" or _is_over(last):
            stack = Stack(frames=stack.frames[len(stack.below_user) :])
        return stack if stack.frames else None

    def _list_ops(self, mixed: Collection[str], *, is_whole: bool) -> Iterator[Op]:
        counts: dict[tuple[str, str, int], int] = {}
        before: dict[str, Op] = {}
        for entry in self.entries:
            if entry.get("is_p2p"):
                op = self._to_message(entry, mixed, counts) if is_whole else None
                if op is not None:
                    yield op
                continue
            op = _to_op(entry, mixed)
            # What is issued as one piece has one number: of its parts the first is enough, as no other rank's can be
            # told apart.
            if op.group not in before or before[op.group].seq != op.seq:
                before[op.group] = op
                yield op

    def _to_message(self, entry: Plain, mixed: Collection[str], counts: dict[tuple[str, str, int], int]) -> Op | None:
        found = _MESSAGE.search(entry["profiling_name"])
        if found is None:
            return None
        members = self._find_members(_group_of(entry))
        place = int(found["peer"])
        peer = members[place] if place < len(members) else place
        key = (_label(entry, mixed), found["name"], peer)
        counts[key] = counts.get(key, 0) + 1
        return _to_op(entry, mixed, name=found["name"], seq=counts[key], peer=peer)

    def _find_members(self, name: str) -> tuple[int, ...]:
        """Return a group's members as global ranks, in the group's own order; nothing where it is not told."""
        text = str(self.configs.get(name, {}).get("ranks", ""))
        return tuple(map(int, re.findall(r"\d+", text))) if _RANKS.fullmatch(text) else ()


def parse(data: bytes) -> FlightDump:
    """Read a file of the flight recorder, pickle or JSON.

    Raises:
        ValueError: It is none, or it is damaged, or a pickle that names what such a file does not hold.
    """
    try:
        body = json.loads(data) if data.lstrip()[:1] == b"{" else _unpickle(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except _BROKEN as error:
        raise ValueError(str(error) or type(error).__name__) from None
    if not isinstance(body, dict) or "version" not in body or not isinstance(body.get("entries", []), list):
        raise ValueError("it holds no flight recorder")
    dump = FlightDump(entries=tuple(body.get("entries", ())), configs=body.get("pg_config") or {})
    try:  # all of it is looked at once here, so that nobody stumbles later
        dump.to_evidence(world_size=dump.world_size or 1, mixed=(), dumped_s=dump.last_s or 0.0)
        dump.guess_stack()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"its entries are not in torch's format: {error!r}") from None
    return dump


def _unpickle(data: bytes) -> Any:
    """Return what a pickle of plain values holds."""
    for opcode, argument, _ in pickletools.genops(data):
        # The reader makes room for as many marks as the highest number says, and would take all memory for it.
        if opcode.name in _MARKS and isinstance(argument, int) and argument > len(data):
            raise ValueError("it has a memo index that no pickle of its size needs: refused")
    return _Unpickler(io.BytesIO(data)).load()


def _to_op(
    entry: Plain,
    mixed: Collection[str],
    *,
    name: str | None = None,
    seq: int | None = None,
    peer: int | None = None,
) -> Op:
    frames = _list_frames(entry)
    text = entry["profiling_name"].partition(":")[2]
    inside = [frame for frame in Stack(frames=tuple(frames)).below_user if "/torch/" in frame.file]
    source: Source = "native"
    if inside and inside[0].file.endswith("/torch/distributed/distributed_c10d.py"):
        source = "python"
    named = [frame.function for frame in inside if frame.function not in DULL]
    return Op(
        group=_label(entry, mixed),
        seq=int(entry["collective_seq_id"]) if seq is None else seq,
        name=name or NAMES.get(text, text),
        shapes=tuple(tuple(map(int, shape)) for shape in entry.get("input_sizes") or ()),
        dtypes=tuple(TYPES.get(kind.lower(), kind.lower()) for kind in entry.get("input_dtypes") or ()),
        peer=peer,
        site=next((str(frame) for frame in frames if frame.is_users), None),
        inside=tuple(reversed(named[:_MOST_INSIDE])),
        source=source,
        entered_s=int(entry["time_created_ns"]) / 1e9,
        is_over=_is_over(entry),
    )


def _is_over(entry: Plain) -> bool:
    if entry.get("state") == "completed" or entry.get("time_discovered_completed_ns"):
        return True
    # NCCL's entries retire also when their timeout has passed; Gloo's have no state, and retire when they are done.
    return bool(entry.get("retired")) and _backend_of(entry) != "nccl"


def _list_frames(entry: Plain) -> list[Frame]:
    """Return the frames of Python, innermost first; those of C++ tell a user nothing."""
    return [
        Frame(file=str(one["filename"]), line=int(one["line"]), function=str(one["name"]))
        for one in entry.get("frames") or ()
        if str(one["filename"]).endswith(".py") or str(one["filename"]).startswith("<")
    ]


def _stand_in(entry: Plain) -> Frame:
    """Return the frame that a collective has, for the forms that leave frames out."""
    text = str(entry["profiling_name"]).partition(":")[2]
    return Frame(file="/site-packages/torch/distributed/distributed_c10d.py", line=0, function=NAMES.get(text, text))


def _group_of(entry: Plain) -> str:
    return str(entry["process_group"][0])


def _backend_of(entry: Plain) -> str:
    return str(entry["profiling_name"]).partition(":")[0]


def _label(entry: Plain, mixed: Collection[str]) -> str:
    name = _group_of(entry)
    return f"{name}:{_backend_of(entry)}" if name in mixed else name
