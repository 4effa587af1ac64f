"""Looks twice at ranks that live on this host and leave their evidence in a folder: their records, what they answer, and what the kernel tells."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rankwise.base.files import read_regular
from rankwise.evidence.in_rank import ring
from rankwise.evidence.reader import offline_layout
from rankwise.evidence.reader.process_looks import BETWEEN_LOOKS_S, describe_rank, find_share, look_at
from rankwise.evidence.reader.process_state import IDLE_SHARE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.base.clock import Clock
    from rankwise.evidence.reader.scene import RankFacts

_QUESTION = struct.Struct("<Q")
_ANSWER_S, _LOOK_EVERY_S = 2.0, 0.02


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLook:
    """A rank that lives.

    Attributes:
        at_s: When it was looked at last, monotonic.
        raw: What it has recorded; None if that can't be read.
        is_still: Whether it made no record between the looks, and used next to no CPU time.
        process: What the kernel tells of it.
    """

    at_s: float
    raw: bytes | None
    is_still: bool
    process: RankFacts


def look(heads: Mapping[int, Mapping[str, Any]], clock: Clock) -> dict[int, LiveLook]:
    """Look at those ranks that live here; they go on."""
    living = {rank: head for rank, head in heads.items() if offline_layout.is_alive(head)}
    if not living:
        return {}
    pids = {rank: int(head["pid"]) for rank, head in living.items()}
    was, first = look_at(pids.values(), clock), {rank: _read(head) for rank, head in living.items()}
    before_s = clock.monotonic()
    asked = {rank: number for rank, head in living.items() if (number := _ask(head, first[rank])) is not None}
    clock.sleep(BETWEEN_LOOKS_S)
    _wait_answers(living, asked, before_s + _ANSWER_S, clock)
    now, found = look_at(pids.values(), clock), {}
    for rank, head in living.items():
        raw, pid = _read(head), pids[rank]
        share = find_share(was[pid], now[pid])
        if share is None or not offline_layout.is_alive(head):
            continue  # it has ended meanwhile
        is_still = _moves(raw) == _moves(first[rank]) and share < IDLE_SHARE
        facts = describe_rank(rank, pid, was[pid], now[pid], is_still=is_still)
        found[rank] = LiveLook(at_s=now[pid].at_s, raw=raw, is_still=is_still, process=facts)
    return found


def _read(head: Mapping[str, Any]) -> bytes | None:
    """Return what a rank has recorded, from the file in memory, or, where that has no name, by the rank's own descriptor."""
    folder = Path(f"/proc/{head['pid']}/fd")
    try:
        places = [Path(str(head["ring"]))] if head["ring"] else list(folder.iterdir())
    except OSError:
        return None
    for place in places:
        try:
            status = place.stat()
            if [status.st_dev, status.st_ino] == head["ring_id"]:
                return read_regular(place, ring.SIZE_BYTES)
        except OSError:
            continue  # closed meanwhile, or another user's
    return None


def _ask(head: Mapping[str, Any], raw: bytes | None) -> int | None:
    """Ask a rank for its stacks; return the question's number, None if nobody is there to answer."""
    reading = ring.RingReader(raw or b"")
    if not reading.is_begun or not (reading.get(ring.MEETS_AT) or reading.get(ring.JOINED_AT)):
        return None
    number, wanted = ring.read_asked(raw or b"") + 1, f"pipe:[{head['asks_id']}]"
    try:
        for link in Path(f"/proc/{head['pid']}/fd").iterdir():
            if os.readlink(link) == wanted:  # noqa: PTH115 - no path
                fd = os.open(link, os.O_WRONLY | os.O_NONBLOCK)
                try:
                    os.write(fd, _QUESTION.pack(number))
                finally:
                    os.close(fd)
                return number
    except OSError:
        return None  # it has ended, or its pipe is full of questions
    return None


def _wait_answers(
    living: Mapping[int, Mapping[str, Any]], asked: Mapping[int, int], until_s: float, clock: Clock
) -> None:
    waiting = dict(asked)
    while waiting and clock.monotonic() < until_s:
        for rank, number in list(waiting.items()):
            if ring.read_asked(_read(living[rank]) or b"") >= number:
                del waiting[rank]
        if waiting:
            clock.sleep(_LOOK_EVERY_S)


def _moves(raw: bytes | None) -> bytes:
    """Return what differs whenever a collective was entered or left, or a step made."""
    return b"" if raw is None else raw[ring.NUM_OVER_AT : ring.JOINED_AT]
