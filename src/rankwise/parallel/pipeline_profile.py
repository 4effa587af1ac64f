"""What the stages of a pipeline take, measured while it trains: forward, backward, waiting, and what would make it faster."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Literal, final

import torch
import torch.distributed as dist

from rankwise.parallel.partition import balance

#: The last steps are kept: a profile around a whole training must not grow.
_MOST_STEPS = 100
#: Below these, a proposal is not worth a line.
_MUCH_BUBBLE, _MUCH_GAIN = 0.1, 0.02

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

    For GPipe and 1F1B on p ranks with m micro-batches and equal stages the bubble is (p - 1) / (m + p - 1) (Narayanan
    et al., arXiv:2104.04473); played through, it holds for every schedule.
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


@final
class Recorder:
    """Notes when this rank's stages compute.

    Args:
        device: Of this rank; on an accelerator its own events are taken, and nobody waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: deque[tuple[Any, list[Any]]] = deque(maxlen=_MOST_STEPS)

    def mark(self) -> Any:
        """Return this moment: seconds, or an event of the device."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """A step begins, on all ranks at once."""
        self._steps.append((self.mark(), []))

    def add(self, stage: int, work: Work, micro_batch: int, start: Any) -> None:
        """Note work that ends now."""
        self._steps[-1][1].append([stage, work, micro_batch, start, self.mark()])

    def extend(self) -> None:
        """Count what was done since the last work's end to it: the loss is the last stage's forward too."""
        self._steps[-1][1][-1][4] = self.mark()

    def gather(self, group: dist.ProcessGroup) -> list[Timeline]:
        """Return what all ranks have recorded: for each step and rank its work.

        Collective: every rank of the pipeline.
        """
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        own = [
            [(*work, self._since(zero, start), self._since(zero, end)) for *work, start, end in row]
            for zero, row in self._steps
        ]
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, own, group=group)
        return [[[Span(*one) for one in row] for row in step] for step in zip(*gathered, strict=True)]

    def _since(self, zero: Any, moment: Any) -> float:
        return float(moment - zero if self._device.type == "cpu" else zero.elapsed_time(moment) / 1e3)


@final
class PipelineProfile:
    """What a pipeline's stages took, of ``Pipeline.profile``; filled when its block ends.

    ``print(profile)`` shows it as a table.

    Attributes:
        steps: For each step and each rank of the pipeline what it computed, in its order.
        bubble: Share of the ranks' time in which they compute nothing, 0 to 1; of the median step.
        schedule_bubble: What the schedule has with stages of equal cost, if nothing is lost between them.
        uneven_bubble: The same with the stages' own costs.
        proposals: What would make it faster, each a line; the best first.
    """

    def __init__(self, schedule: str, microbatches: int, ranks: Sequence[int], blocks: Sequence[Sequence[str]]) -> None:
        self._schedule, self._microbatches, self._ranks, self._blocks = schedule, microbatches, ranks, blocks
        self.steps: list[Timeline] = []
        self.bubble = self.schedule_bubble = self.uneven_bubble = 0.0
        self.proposals: list[str] = []
        self._costs: Mapping[tuple[int, Work], float] = {}

    def _take(self, steps: Sequence[Timeline], num_samples: int) -> None:
        """Work out what the steps took."""
        self.steps = list(steps)
        if not self.steps:
            return
        of_kind: dict[tuple[int, Work], list[float]] = {}
        for one in (one for step in self.steps for row in step for one in row):
            of_kind.setdefault((one.stage, one.work), []).append(one.seconds)
        self._costs = {kind: median(seconds) for kind, seconds in of_kind.items()}
        mean = {
            work: fmean(cost for (_, other), cost in self._costs.items() if other == work) for _, work in self._costs
        }
        self.bubble = find_bubble(self._middle)
        self.schedule_bubble = find_bubble(replay(self._middle, lambda one: mean[one.work]))
        self.uneven_bubble = find_bubble(self._play(self._costs))
        found = [self._propose_microbatches(num_samples), self._propose_cut()]
        self.proposals = [text for _, text in sorted((one for one in found if one is not None), reverse=True)]

    @property
    def _middle(self) -> Timeline:
        """The step of median length."""
        return sorted(self.steps, key=find_length)[len(self.steps) // 2]

    def _play(self, costs: Mapping[tuple[int, Work], float]) -> Timeline:
        return replay(self._middle, lambda one: costs[one.stage, one.work])

    def _propose_microbatches(self, num_samples: int) -> tuple[float, str] | None:
        """With twice as many, filling and draining the pipeline takes half the share."""
        own, twice = self.schedule_bubble, 2 * self._microbatches
        halved = own / (2 - own)
        if own < _MUCH_BUBBLE or num_samples < twice:
            return None
        text = f"microbatches={twice}: the schedule's own bubble falls from {own:.0%} to {halved:.0%}, if half as many samples take half the time"
        return own - halved, text

    def _propose_cut(self) -> tuple[float, str] | None:
        """Balance the blocks anew, those of one stage taken as equal."""
        whole = [
            sum(cost for (stage, _), cost in self._costs.items() if stage == number)
            for number in range(len(self._blocks))
        ]
        each = [cost / len(names) for cost, names in zip(whole, self._blocks, strict=True) for _ in names]
        begins = [*balance(each, len(self._blocks)), len(each)]
        sizes = [end - begin for begin, end in pairwise(begins)]
        if sizes == [len(names) for names in self._blocks]:
            return None
        after = [sum(each[begin:end]) for begin, end in pairwise(begins)]
        costs = {(stage, work): cost * after[stage] / whole[stage] for (stage, work), cost in self._costs.items()}
        now, then = find_length(self._play(self._costs)), find_length(self._play(costs))
        gain = 1 - then / now
        if gain < _MUCH_GAIN:
            return None
        return (
            gain,
            f"cut={sizes}: a step takes {gain:.0%} less, if the blocks of a stage are alike; example=batch measures each block",
        )

    def __str__(self) -> str:
        if not self.steps:
            return "no step of the pipeline was run"
        length = find_length(self._middle)
        lines = [
            f"{self._schedule}, {self._microbatches} micro-batches, {len(self.steps)} steps, {length * 1e3:.3g} ms each (median)",
            f"{'stage':<6}{'rank':<6}{'blocks':<28}{'forward':>12}{'backward':>12}{'rank waits':>18}",
        ]
        for stage, names in enumerate(self._blocks):
            place = next(number for number, row in enumerate(self._middle) if any(one.stage == stage for one in row))
            forward = self._costs[stage, "forward"]
            backward = sum(cost for (other, work), cost in self._costs.items() if other == stage and work != "forward")
            waits = length - sum(one.seconds for one in self._middle[place])
            held = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            lines.append(
                f"{stage:<6}{self._ranks[place]:<6}{held:<28}{forward * 1e3:>9.3f} ms{backward * 1e3:>9.3f} ms{waits * 1e3:>9.3f} ms {waits / length:>4.0%}"
            )
        uneven = max(0.0, self.uneven_bubble - self.schedule_bubble)
        rest = max(0.0, self.bubble - max(self.uneven_bubble, self.schedule_bubble))
        lines.append(
            f"bubble: {self.bubble:.0%} of the ranks' time: the schedule {self.schedule_bubble:.0%}, uneven stages {uneven:.0%}, messages and the rest {rest:.0%}"
        )
        return "\n".join([*lines, *(f"try {text}" for text in self.proposals)])
