"""When each stage of a pipeline computes which micro-batch: what a schedule would take at best, and a picture. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Literal, final

if TYPE_CHECKING:
    from collections.abc import Callable

Work = Literal["forward", "backward", "input gradients", "weight gradients"]


@final
@dataclass(frozen=True, slots=True)
class Span:
    """One stage's work on one micro-batch, in seconds since the step began on all ranks; zero-bubble schedules compute the two kinds of gradients apart."""

    stage: int
    work: Work
    micro_batch: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


#: One step: for each rank what it computed, in its order.
Timeline = Sequence[Sequence[Span]]


def find_length(timeline: Timeline) -> float:
    """Return the seconds from the first start to the last end."""
    spans = [one for row in timeline for one in row]
    return max(one.end_s for one in spans) - min(one.start_s for one in spans)


def find_bubble(timeline: Timeline) -> float:
    """Return the share of the ranks' time in which they compute nothing: 0 to 1."""
    busy = sum(one.seconds for row in timeline for one in row)
    return 1 - busy / (len(timeline) * find_length(timeline))


def replay(timeline: Timeline, cost: Callable[[Span], float]) -> Timeline:
    """Return the same order of work with other costs, where nothing is lost between the stages: each begins as soon as it can.

    For GPipe and 1F1B on p ranks with m micro-batches and equal stages the bubble is (p - 1) / (m + p - 1) (Narayanan et al.,
    arXiv:2104.04473); played through, it holds for every schedule.
    """
    last = max(one.stage for row in timeline for one in row)
    ends: dict[tuple[int, bool, int], float] = {}
    played: list[list[Span]] = [[] for _ in timeline]
    free = [0.0] * len(timeline)
    while any(len(done) < len(row) for done, row in zip(played, timeline, strict=True)):
        has_moved = False
        for rank, row in enumerate(timeline):
            while len(played[rank]) < len(row):
                one = row[len(played[rank])]
                needed = _needs(one, last)
                if needed is not None and needed not in ends:
                    break
                start = max(free[rank], 0.0 if needed is None else ends[needed])
                free[rank] = start + cost(one)
                played[rank].append(Span(one.stage, one.work, one.micro_batch, start, free[rank]))
                if one.work != "weight gradients":
                    ends[one.stage, one.work == "forward", one.micro_batch] = free[rank]
                has_moved = True
        if not has_moved:
            raise ValueError("the ranks' work is in an order in which each waits for another")
    return played


def _needs(one: Span, last: int) -> tuple[int, bool, int] | None:
    """Return what must have ended before; a rank's own order takes care of the rest."""
    if one.work == "forward":
        return (one.stage - 1, True, one.micro_batch) if one.stage else None
    if one.work == "weight gradients" or one.stage == last:
        return None
    return (one.stage + 1, False, one.micro_batch)


# ------------------------------------------------------------------ the picture

_WIDTH, _LEFT, _ROW, _GAP, _TOP = 1000, 70, 34, 10, 56
_COLORS: dict[Work, tuple[str, str]] = {
    "forward": ("#8ab6ea", "#5a8fd0"),
    "backward": ("#f0b878", "#dc9440"),
    "input gradients": ("#f0b878", "#dc9440"),
    "weight gradients": ("#9fd3ae", "#6db585"),
}


def draw(timeline: Timeline, ranks: Sequence[int], title: str) -> str:
    """Return an SVG of one step: a row for each rank, a box for each micro-batch; a rank's second stage is darker."""
    length = find_length(timeline)
    begin = min(one.start_s for row in timeline for one in row)
    scale = (_WIDTH - _LEFT - 34) / length
    bottom = _TOP + len(timeline) * (_ROW + _GAP)
    parts = [_text(16, 24, title, size=15)]
    for place, (rank, row) in enumerate(zip(ranks, timeline, strict=True)):
        y = _TOP + place * (_ROW + _GAP)
        parts.append(_text(16, y + _ROW / 2 + 4, f"rank {rank}"))
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{length * scale:.1f}" height="{_ROW}" fill="#eef1f4"/>'
        )
        stages = sorted({one.stage for one in row})
        for one in row:
            x, width = _LEFT + (one.start_s - begin) * scale, max(one.seconds * scale, 0.5)
            words = (
                f"stage {one.stage}, {one.work} of micro-batch {one.micro_batch}: {one.seconds * 1e3:.3f} ms"
            )
            fill = _COLORS[one.work][min(stages.index(one.stage), 1)]
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW}" fill="{fill}" stroke="#fff" stroke-width="0.5">'
                f"<title>{escape(words)}</title></rect>"
            )
            if width > 14:
                parts.append(_text(x + width / 2, y + _ROW / 2 + 4, str(one.micro_batch), anchor="middle"))
    for tick in range(6):
        x = _LEFT + length * scale * tick / 5
        parts.append(_text(x, bottom + 14, f"{length * tick / 5 * 1e3:.3g} ms", anchor="middle", size=11))
    works = list(dict.fromkeys(one.work for row in timeline for one in row))
    for place, work in enumerate(works):
        x = _LEFT + place * 150
        parts.append(f'<rect x="{x}" y="{bottom + 30}" width="14" height="14" fill="{_COLORS[work][0]}"/>')
        parts.append(_text(x + 20, bottom + 42, work))
    height = bottom + 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" font-family="sans-serif">'
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="#1f2933" text-anchor="{anchor}">{escape(words)}</text>'
