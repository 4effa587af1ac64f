"""The memory file in which a rank records its collectives: how it is laid out, written by the rank and read by its parent.

The rank loads this file by its path, so it stands alone: standard library only. The file is a header, a table of texts, a
ring of records of one size, and three areas for reports that are written now and then: the flight recorder's, the stacks
of all threads, and checksums of the model. Whoever writes may be killed at any moment, and is never waited for: a record says its number at its begin and at
its end, and a report has a checksum and leaves the one before it alone.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import struct
import threading
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The last digits are the version.
MAGIC = 0x5257_4556_0002
NUM_RECORDS = 1024
HEADER_BYTES = 4096
TEXT_BYTES = 96 << 10
FLIGHT_BYTES = 192 << 10
STACKS_BYTES = 96 << 10
DIGESTS_BYTES = 128 << 10

#: Where the header has what. All are numbers of 8 bytes; those of time are floats.
_MAGIC_AT, PID_AT, ASKED_AT, NUM_OVER_AT, HEAD_AT, NUM_TEXTS_AT, STEPS_AT, STEP_S_AT, JOINED_AT, LEFT_AT = range(
    0, 80, 8
)
#: The number of the first record, and the time, of the present default group: its numbers begin at 1 again.
FIRST_AT, FIRST_S_AT, FULL_AT, _FLIGHT_TURN_AT, _STACKS_TURN_AT = range(80, 120, 8)
#: Whether the rank is, or was, in init_process_group.
MEETS_AT = 120
_DIGESTS_TURN_AT = 128
_MARK_BYTES = 136

#: number + 1, sequence number, entered, over, state; texts: name, group, site, inside, reduce op, module; root, peer;
#: the tensors; number + 1 again.
_RECORD = struct.Struct("<QqddiIIIIIIii96sQ")
RECORD_BYTES = _RECORD.size
#: Both ends of a record, which are its number.
_ENDS = struct.Struct(f"<Q{RECORD_BYTES - 16}xQ")
_OVER_AT = 24
_TEXTS_AT = HEADER_BYTES
_RECORDS_AT = _TEXTS_AT + TEXT_BYTES
_FLIGHT_AT = _RECORDS_AT + NUM_RECORDS * RECORD_BYTES
_STACKS_AT = _FLIGHT_AT + 2 * FLIGHT_BYTES
_DIGESTS_AT = _STACKS_AT + 2 * STACKS_BYTES
SIZE_BYTES = _DIGESTS_AT + 2 * DIGESTS_BYTES

_U64, _F64, _END = struct.Struct("<Q"), struct.Struct("<d"), struct.Struct("<di")
_TEXT = struct.Struct("<H")
_REPORT = struct.Struct("<QIId")
FORM_BYTES = 96
#: What became of a collective; of one that was refused, as its arguments are wrong, no other rank has heard.
ENTERED, OVER, RAISED, REFUSED = range(4)
_READ_AND_WRITE, _SHARED = 3, 1
#: A lock of ours is held for microseconds.
_LOCK_S = 0.01
#: For a root or a peer that there is none of.
NOBODY = -2


class RingWriter:
    """Writes into the memory file, from any thread that has the interpreter's lock."""

    def __init__(self, memory: Any, pid: int) -> None:
        self._memory = memory
        self._numbers, self._texts = itertools.count(), {"": 0}
        self._end_of_texts = _TEXTS_AT
        self._num_over = itertools.count(1)
        self._steps = itertools.count(1)
        self._lock = threading.Lock()
        self._turns = dict.fromkeys(_AREAS, 0)
        # What the parent has asked for is not forgotten when a rank is one Python after another.
        asked = _U64.unpack_from(memory, ASKED_AT)[0]
        # A new file has no memory yet, and none is taken for nothing.
        if _U64.unpack_from(memory, _MAGIC_AT)[0]:
            memory[:HEADER_BYTES] = bytes(HEADER_BYTES)
            memory[_RECORDS_AT:] = bytes(SIZE_BYTES - _RECORDS_AT)
        _U64.pack_into(memory, ASKED_AT, asked)
        _U64.pack_into(memory, PID_AT, pid)
        _U64.pack_into(memory, _MAGIC_AT, MAGIC)

    def intern(self, text: str) -> int:
        """Return the number of a text in the table; 0, which means unknown, when the table is full."""
        number = self._texts.get(text)
        if number is not None:
            return number
        raw = text.encode("utf-8", "replace")[:4000]
        # A signal's handler may come in between, in the very thread that holds the lock.
        if not self._lock.acquire(timeout=_LOCK_S):
            return 0
        try:
            begin = self._end_of_texts
            end = begin + _TEXT.size + len(raw)
            if end > _RECORDS_AT:
                self.mark(FULL_AT)
                return 0
            self._memory[begin + _TEXT.size : end] = raw
            _TEXT.pack_into(self._memory, begin, len(raw))
            self._texts[text], self._end_of_texts = begin, end
            self.mark(NUM_TEXTS_AT, len(self._texts) - 1)
        finally:
            self._lock.release()
        return begin

    def enter(
        self,
        seq: int,
        entered_s: float,
        texts: tuple[int, int, int, int, int, int],
        root: int,
        peer: int,
        form: bytes,
    ) -> int:
        """Record that a collective begins.

        Args:
            seq: Its sequence number.
            entered_s: When.
            texts: Numbers of name, group, site, functions between, reduce op, module.
            root: Global rank, or ``NOBODY``.
            peer: Global rank, -1 for any, or ``NOBODY``.
            form: What the tensors are, as ``describe_form`` has it.

        Returns:
            The record's number, for ``leave``.
        """
        number = next(self._numbers)
        at = _RECORDS_AT + number % NUM_RECORDS * RECORD_BYTES
        _RECORD.pack_into(
            self._memory, at, number + 1, seq, entered_s, 0.0, ENTERED, *texts, root, peer, form, number + 1
        )
        _U64.pack_into(self._memory, HEAD_AT, number + 1)
        return number

    def leave(self, number: int, over_s: float, state: int) -> None:
        """Record that a collective is over, unless its record has been written over by now."""
        at = _RECORDS_AT + number % NUM_RECORDS * RECORD_BYTES
        if _U64.unpack_from(self._memory, at)[0] == number + 1:
            _END.pack_into(self._memory, at + _OVER_AT, over_s, state)
            _U64.pack_into(self._memory, NUM_OVER_AT, next(self._num_over))

    def count_step(self, now_s: float) -> None:
        """Record a step of an optimizer."""
        _F64.pack_into(self._memory, STEP_S_AT, now_s)
        _U64.pack_into(self._memory, STEPS_AT, next(self._steps))

    def mark(self, at: int, value: int = 1) -> None:
        """Put a number into the header."""
        _U64.pack_into(self._memory, at, value)

    def read_moves(self) -> bytes:
        """Return what is different whenever a collective was entered or left, or a step made."""
        return bytes(self._memory[NUM_OVER_AT:JOINED_AT])

    def begin_world(self, now_s: float) -> None:
        """Record that a default process group is there: what was recorded before belongs to another."""
        _F64.pack_into(self._memory, FIRST_S_AT, now_s)
        self.mark(FIRST_AT, _U64.unpack_from(self._memory, HEAD_AT)[0])
        self.mark(LEFT_AT, 0)
        self.mark(JOINED_AT)

    def report(self, area: str, raw: bytes, now_s: float) -> None:
        """Write a report beside the last one of its kind."""
        start, size, turn_at = _AREAS[area]
        turn = self._turns[area] = self._turns[area] + 1
        at = start + turn % 2 * size
        self._memory[at + _REPORT.size : at + _REPORT.size + len(raw)] = raw
        _REPORT.pack_into(self._memory, at, turn, len(raw), zlib.crc32(raw), now_s)
        _U64.pack_into(self._memory, turn_at, turn)


_AREAS = {
    "flight": (_FLIGHT_AT, FLIGHT_BYTES, _FLIGHT_TURN_AT),
    "stacks": (_STACKS_AT, STACKS_BYTES, _STACKS_TURN_AT),
    "digests": (_DIGESTS_AT, DIGESTS_BYTES, _DIGESTS_TURN_AT),
}


def get_room(area: str) -> int:
    """Return how many bytes a report may have."""
    return _AREAS[area][1] - _REPORT.size


def describe_form(tensors: list[tuple[tuple[int, ...], str]]) -> bytes:
    """Write down shapes and types of tensors: ``3*float32[2,5]``, as many as there is room for, then ``…``."""
    parts: list[str] = []
    for (shape, dtype), alike in itertools.groupby(tensors):
        count = sum(1 for _ in alike)
        front = f"{count}*" if count > 1 else ""
        parts.append(f"{front}{dtype}[{','.join(map(str, shape))}]")
    text = ";".join(parts).encode()
    return text if len(text) <= FORM_BYTES else _forget_shapes(text)


def _forget_shapes(form: bytes) -> bytes:
    return b"?" + form.partition(b"[")[0].rpartition(b"*")[2][:40]


def describe_split_sizes(gives: list[int], gets: list[int]) -> bytes:
    """Write down how many elements go to each member and come from each: ``|512:3,2,1>3*2``, in units of 512 elements."""
    unit = math.gcd(*gives, *gets) or 1
    sides = (
        ",".join(f"{count}*{value}" if count > 1 else str(value) for value, count in _count_runs(side, unit))
        for side in (gives, gets)
    )
    return f"|{unit}:{'>'.join(sides)}".encode()


def _count_runs(numbers: list[int], unit: int) -> Any:
    for number, alike in itertools.groupby(numbers):
        yield number // unit, sum(1 for _ in alike)


def add_split_sizes(form: bytes, split_sizes: bytes) -> bytes:
    """Return tensors and split sizes as one: where there is no room for both without the shapes, and without the split sizes if need be."""
    for front in (form, _forget_shapes(form)):
        if len(front) + len(split_sizes) <= FORM_BYTES:
            return front + split_sizes
    return form


def map_file(fd: int) -> Any:
    """Return the memory file as a buffer.

    Not by ``mmap``: that keeps a descriptor of its own, in the script's numbers.
    """
    import ctypes  # torch has imported it by now

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    at = libc.mmap(None, ctypes.c_size_t(SIZE_BYTES), _READ_AND_WRITE, _SHARED, fd, ctypes.c_long(0))
    if at in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "the memory file can't be mapped")
    return memoryview((ctypes.c_char * SIZE_BYTES).from_address(at)).cast("B")


def claim(memory: Any, pid: int) -> bool:
    """Whether the memory file is this process's to write: a rank may be several Pythons, of which the first one that lives has it."""
    owner = int(_U64.unpack_from(memory, PID_AT)[0])
    if owner in {0, pid}:
        return True
    try:
        os.kill(owner, 0)
    except OSError:
        return True
    return False


def find_spans(ranks: Iterable[int]) -> list[list[int]]:
    """Return the first and the last of each run of ranks that follow each other."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return spans


def write_ranks(ranks: tuple[int, ...]) -> str:
    """Write ranks in few letters: ``0-3,7``."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in find_spans(ranks))


def read_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks that ``write_ranks`` wrote."""
    ranks: list[int] = []
    for span in text.split(",") if text else ():
        first, _, last = span.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return tuple(ranks)


# ------------------------------------------------------------------ reading


class Record:
    """A collective as the ring has it; names as in ``Op``.

    Attributes:
        is_clear: Whether all its texts are known.

    Raises:
        ValueError: It was being written.
    """

    __slots__ = (
        "dtypes",
        "entered_s",
        "form",
        "gets",
        "gives",
        "group",
        "inside",
        "is_clear",
        "module",
        "name",
        "number",
        "over_s",
        "peer",
        "reduce_op",
        "root",
        "seq",
        "shapes",
        "site",
        "state",
    )

    def __init__(self, raw: bytes, texts: dict[int, str]) -> None:
        fields = _RECORD.unpack(raw)
        self.is_clear = all(number in texts for number in fields[5:11])
        self.number, self.seq, self.entered_s, self.over_s = fields[0] - 1, fields[1], fields[2], fields[3]
        self.name, self.group, self.site, self.inside, self.reduce_op, self.module = (
            texts.get(number, "") for number in fields[5:11]
        )
        self.state = fields[4]
        self.root, self.peer = fields[11], fields[12]
        form, _, split_sizes = fields[13].rstrip(b"\0").decode("utf-8", "replace").partition("|")
        self.shapes, self.dtypes = parse_form(form)
        self.gives, self.gets = parse_split_sizes(split_sizes) if split_sizes else ((), ())


@functools.lru_cache(maxsize=4096)  # most are alike
def parse_form(text: str) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Return shapes and types from what ``describe_form`` wrote; no shapes where they did not fit."""
    if not text or text.startswith("?"):
        return (), (text[1:],) if len(text) > 1 else ()
    shapes: list[tuple[int, ...]] = []
    dtypes: list[str] = []
    for part in text.split(";"):
        count, star, one = part.rpartition("*")
        dtype, _, dims = one.rstrip("]").partition("[")
        times = int(count) if star else 1
        shapes += [tuple(int(dim) for dim in dims.split(",") if dim)] * times
        dtypes += [dtype] * times
    return tuple(shapes), tuple(dtypes)


@functools.lru_cache(maxsize=4096)
def parse_split_sizes(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what goes to each member and what comes from each, from what ``describe_split_sizes`` wrote after its bar."""
    unit, _, sides = text.partition(":")
    gives, _, gets = sides.partition(">")
    return _read_runs(gives, int(unit)), _read_runs(gets, int(unit))


def _read_runs(text: str, unit: int) -> tuple[int, ...]:
    numbers: list[int] = []
    for run in text.split(",") if text else ():
        count, star, value = run.rpartition("*")
        numbers += [int(value) * unit] * (int(count) if star else 1)
    return tuple(numbers)


class RingReader:
    """What the memory file holds, read at one moment while the rank goes on writing."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self.is_begun = len(raw) == SIZE_BYTES and self.get(_MAGIC_AT) == MAGIC

    def get(self, at: int) -> int:
        """Return a number of the header."""
        return int(_U64.unpack_from(self._raw, at)[0])

    def get_s(self, at: int) -> float:
        """Return a time of the header."""
        return float(_F64.unpack_from(self._raw, at)[0])

    def read_texts(self) -> dict[int, str]:
        """Return the table of texts: by where each begins, which is its number."""
        texts, at = {0: ""}, _TEXTS_AT
        for _ in range(min(self.get(NUM_TEXTS_AT), TEXT_BYTES)):
            if at + _TEXT.size > _RECORDS_AT:
                break
            length = _TEXT.unpack_from(self._raw, at)[0]
            begin = at + _TEXT.size
            texts[at] = self._raw[begin : min(begin + length, _RECORDS_AT)].decode("utf-8", "replace")
            at = begin + length
        return texts

    def read_raw_texts(self) -> tuple[int, bytes]:
        """Return how many texts there are, and the table as it is written: it only grows, unless another Python of the rank begins anew."""
        return self.get(NUM_TEXTS_AT), self._raw[_TEXTS_AT:_RECORDS_AT]

    def read_raw_records(self) -> list[bytes]:
        """Return the bytes of the records that are whole, oldest first: those that were read before are equal to what they were."""
        head, first = self.get(HEAD_AT), self.get(FIRST_AT)
        ends = _ENDS.iter_unpack(self._raw[_RECORDS_AT:_FLIGHT_AT])
        # Another thread's may be whole before the head tells of it; of a torn one the two ends differ.
        whole = sorted(
            (begin, slot)
            for slot, (begin, end) in enumerate(ends)
            if begin == end and begin > first and abs(head - begin) <= 2 * NUM_RECORDS
        )
        places = [_RECORDS_AT + slot * RECORD_BYTES for _, slot in whole]
        return [self._raw[at : at + RECORD_BYTES] for at in places]

    def read_report(self, area: str) -> tuple[int, bytes, float] | None:
        """Return the newest whole report of a kind: its turn, what it says, and of when it is.

        None if there is none.
        """
        start, size, _ = _AREAS[area]
        found = []
        for slot in range(2):
            at = start + slot * size
            turn, length, check, at_s = _REPORT.unpack_from(self._raw, at)
            raw = self._raw[at + _REPORT.size : at + _REPORT.size + length]
            if turn and length <= size - _REPORT.size and zlib.crc32(raw) == check:
                found.append((turn, raw, at_s))
        return max(found, default=None)


def read_mark(header: bytes) -> bytes:
    """Return what is different whenever the rank has recorded anything."""
    return header[:_MARK_BYTES]


def read_asked(header: bytes) -> int:
    """Return the number of the last question that the rank has answered."""
    return int(_U64.unpack_from(header, ASKED_AT)[0]) if len(header) >= _MARK_BYTES else 0
