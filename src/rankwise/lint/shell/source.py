"""Bytes that the parser reads, with their way back to the places in the piece."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from rankwise.lint.finding import Span


@dataclass(frozen=True, slots=True)
class Whole:
    """The text of a piece, as bytes, and where its lines begin."""

    data: bytes
    starts: tuple[int, ...]
    is_ascii: bool

    def stretch(self, start: int, end: int) -> Span:
        """The stretch between two bytes."""
        if self.is_ascii:
            line = bisect_right(self.starts, start)
            begin = self.starts[line - 1]
            if line == len(self.starts) or end <= self.starts[line]:
                return Span(line, start - begin + 1, line, end - begin + 1)
        return Span(*self.place(start), *self.place(end))

    def place(self, offset: int) -> tuple[int, int]:
        """Line and column, both from 1, of a byte."""
        line = bisect_right(self.starts, offset) - 1
        before = self.data[self.starts[line] : offset]
        return line + 1, (len(before) if before.isascii() else len(before.decode(errors="replace"))) + 1


@dataclass(frozen=True, slots=True)
class Source:
    """What one run of the parser reads: the piece, or the text in a string of it.

    Attributes:
        data: The bytes.
        whole: The piece.
        places: For each byte of ``data`` its place in the piece; empty where both are the same.
    """

    data: bytes
    whole: Whole
    places: tuple[int, ...] = field(default=())

    def place_of(self, offset: int) -> int:
        """The byte of the piece that stands at ``offset`` here."""
        if not self.places:
            return offset
        if offset < len(self.places):
            return self.places[offset]
        return self.places[-1] + 1

    def span(self, start: int, end: int) -> Span:
        """Where a stretch of ``data`` stands in the piece."""
        if not self.places:
            return self.whole.stretch(start, end)
        first = self.place_of(start)
        last = self.place_of(end - 1) + 1 if end > start else first
        return self.whole.stretch(first, last)

    def inner(self, start: int, end: int, *, unescape: bytes = b"") -> Source:
        """The text of a stretch, as a shell that gets it reads it; a backslash before ``unescape`` falls away."""
        data, places, offset = bytearray(), [], start
        while offset < end:
            if self.data[offset] == 0x5C and offset + 1 < end and self.data[offset + 1] in unescape:
                offset += 1
            data.append(self.data[offset])
            places.append(self.place_of(offset))
            offset += 1
        return Source(bytes(data), self.whole, tuple(places))


def whole_source(text: str) -> Source:
    """The source of a whole piece."""
    data = text.encode(errors="replace")
    starts, offset = [0], data.find(b"\n")
    while offset >= 0:
        starts.append(offset + 1)
        offset = data.find(b"\n", offset + 1)
    return Source(data, Whole(data, tuple(starts), data.isascii()))
