"""What is made of a rank's records bit by bit is what is made of them at once, whatever happens in between."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.evidence.in_rank import ring
from rankwise.evidence.reader.merge_records import Merger

if TYPE_CHECKING:
    from rankwise.evidence.reader.scene import Evidence

_GROUP = "group\t0\tgloo\t0-1\t1"


class _Rank:
    """A rank that does something at each turn."""

    def __init__(self, seed: int) -> None:
        self.memory = bytearray(ring.SIZE_BYTES)
        self._random = random.Random(seed)
        self._begin()

    def _begin(self) -> None:
        self._writer = ring.RingWriter(self.memory, 7)
        self._seq, self._open, self._entries = 0, [], []

    def _enter(self) -> None:
        for _ in range(self._random.choice([1, 5, 400])):
            self._seq += 1
            texts = [
                f"op{self._random.randrange(3)}",
                _GROUP,
                f"a.py:{self._random.randrange(50)}",
                "",
                "sum",
                f"layers.{self._random.randrange(3)}",
            ]
            form = ring.add_split_sizes(b"float32[4]", ring.describe_split_sizes([self._seq, 2], [3, 2]))
            numbers: Any = tuple(self._writer.intern(text) if text else 0 for text in texts)
            self._open.append(self._writer.enter(self._seq, float(self._seq), numbers, -2, -2, form))

    def _leave(self) -> None:
        for number in self._open:
            self._writer.leave(number, 1.0, self._random.choice([ring.OVER, ring.RAISED, ring.REFUSED]))
        self._open = []

    def _fly(self) -> None:
        self._entries += [
            {"group": "0", "backend": "gloo", "name": "allreduce", "seq": seq, "shapes": [[2]], "dtypes": ["float32"], "over": seq % 2 == 0,
             "site": "a.py:3", "inside": [], "at_s": float(seq)} for seq in range(self._seq, self._seq + 3)]  # fmt: skip
        told = {"entries": self._entries[-50:], "missing": []}
        self._writer.report("flight", json.dumps(told).encode(), float(self._seq))

    def _answer(self) -> None:
        told = {"stacks": {"MainThread": [["a.py", self._seq, "f"]]}, "handled": {"MainThread": {"message": "E", "frames": []}}}  # fmt: skip
        self._writer.report("stacks", json.dumps(told).encode(), float(self._seq))

    def _renew(self) -> None:
        if self._random.random() < 0.3:
            self._begin()  # another Python of the same rank
        elif self._random.random() < 0.3:
            self._writer.begin_world(float(self._seq))
            self._seq = 0

    def move(self) -> Evidence:
        """Do something, and return what its records tell to somebody who has never read them."""
        self._random.choice([self._enter, self._leave, self._fly, self._answer, self._renew])()
        return Merger().merge(ring.RingReader(bytes(self.memory)))


@pytest.mark.parametrize("seed", range(8))
def test_reading_again_gives_what_reading_anew_gives(seed: int) -> None:
    """Records that come, end, are refused and are written over; groups made anew; another Python with other texts."""
    rank, merger = _Rank(seed), Merger()
    for _ in range(40):
        anew = rank.move()
        assert merger.merge(ring.RingReader(bytes(rank.memory))) == anew


def test_what_has_not_changed_is_not_made_again() -> None:
    """A record that was read before is the same object the next time, as a thousand of them are read several times a second."""
    memory = bytearray(ring.SIZE_BYTES)
    writer, merger = ring.RingWriter(memory, 7), Merger()
    texts = (writer.intern("barrier"), writer.intern(_GROUP), 0, 0, 0, 0)
    writer.enter(1, 1.0, texts, -2, -2, b"")
    (first,) = merger.merge(ring.RingReader(bytes(memory))).ops
    writer.enter(2, 2.0, texts, -2, -2, b"")
    again, _ = merger.merge(ring.RingReader(bytes(memory))).ops
    assert again is first


def test_a_text_that_comes_after_its_record_is_not_missed() -> None:
    """The table is read a moment before the records: what has no name yet has it the next time."""
    memory = bytearray(ring.SIZE_BYTES)
    writer, merger = ring.RingWriter(memory, 7), Merger()
    before = bytes(memory)
    texts = (writer.intern("barrier"), writer.intern(_GROUP), 0, 0, 0, 0)
    writer.enter(1, 1.0, texts, -2, -2, b"")
    after = bytes(memory)
    records = ring.HEADER_BYTES + ring.TEXT_BYTES
    torn = after[: ring.NUM_TEXTS_AT] + before[ring.NUM_TEXTS_AT : ring.NUM_TEXTS_AT + 8]
    torn += after[len(torn) : ring.HEADER_BYTES] + before[ring.HEADER_BYTES : records] + after[records:]
    assert [op.name for op in merger.merge(ring.RingReader(torn)).ops] == [""]
    assert [op.name for op in merger.merge(ring.RingReader(after)).ops] == ["barrier"]
