"""Where the samples of the current micro-batch stand in their epoch: what a random number must depend on to be the same at any number of ranks."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from rankwise.base.errors import UsageError
from rankwise.runtime.context import find_current

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@final
@dataclass(slots=True, eq=False)
class Place:
    """The place of one micro-batch of this rank.

    A sample's position is counted in the epoch's order, over all ranks; it stays the same at any number of ranks and
    micro-batches, after a resume, and with another global batch. Only with ``split="shard"`` or ``"dataset"`` positions
    are unique and no more, as which samples a step holds depends on the ranks there.

    Attributes:
        epoch: Which epoch, from 0.
        positions: Where each sample stands in the epoch's order, from 0, in the order of the batch.
        before: The place of the micro-batch before this one, in the same step; None once this one was read.
        memo: For those that compute something from the place, to keep it as long as the micro-batch lasts.
    """

    epoch: int
    positions: Sequence[int]
    before: Place | None = None
    memo: dict[Any, Any] = field(default_factory=dict)
    _is_read: bool = False

    def check_turn(self) -> None:
        """Make sure that this is the micro-batch at hand, and not one that somebody has taken ahead.

        Raises:
            UsageError: Nobody has asked for the place of the micro-batch before this one, which has samples too.
        """
        before, self.before, self._is_read = self.before, None, True
        if before is not None and not before._is_read and len(before.positions):
            self.before, self._is_read = before, False
            raise UsageError(
                "a micro-batch was taken from its step before the model has seen the previous one: which samples are current?",
                rank=find_rank(),
                hint="take the micro-batches of a step one by one, or all by step.fetch(), which list(step) is not; or pass it:"
                " `with rankwise.train.placed(...)`",
            )


def deal_places(
    epoch: int,
    first: int,
    stride: int,
    sizes: Sequence[int],
    kept: Sequence[Sequence[int] | None] | None = None,
) -> list[Place]:
    """Return the places of a rank's micro-batches of one step, to which every W-th position was dealt.

    Args:
        epoch: Which epoch.
        first: The position of the rank's first sample.
        stride: How far the next one is: the number of ranks.
        sizes: Samples dealt to each micro-batch.
        kept: Which of these are left in each, where samples were left out; None: all of them.

    Returns:
        Each place, in order.
    """
    if kept is None and len(sizes) == 1:  # as a rule
        return [Place(epoch, range(first, first + sizes[0] * stride, stride))]
    places: list[Place] = []
    for number, size in enumerate(sizes):
        end = first + size * stride
        positions: Sequence[int] = range(first, end, stride)
        left = kept[number] if kept else None
        positions = positions if left is None else [positions[one] for one in left]
        places.append(Place(epoch, positions, places[-1] if places else None))
        first = end
    return places


_shown: Place | None = None


def show(place: Place | None) -> None:
    """Make a place the current one: its micro-batch is handed out now; None: no place is, as the step is over."""
    # One for the process, not for each thread: a backward on a GPU runs in a thread of torch's, and computes
    # activations again there.
    global _shown  # noqa: PLW0603 - the micro-batch at hand is a fact of the process
    _shown = place


def current_place() -> Place:
    """Return the place of the micro-batch that the loop has got last.

    Returns:
        The place. Of several loaders, the one that has handed out last counts.

    Raises:
        UsageError: No micro-batch is at hand; or micro-batches were taken ahead, so that nobody knows which.
    """
    place = _shown
    if place is None:
        raise UsageError(
            "no micro-batch of a rankwise.DataLoader is current: the place of these samples in the epoch is not known",
            rank=find_rank(),
            hint="iterate over a rankwise.DataLoader, or pass it: `with rankwise.train.placed(positions, epoch=epoch)`;"
            " call model.eval() to evaluate",
        )
    place.check_turn()
    return place


def find_place() -> Place | None:
    """Return the current place, or None, and ask nothing."""
    return _shown


@contextmanager
def placed(positions: Sequence[int], *, epoch: int = 0) -> Iterator[Place]:
    """Set where the samples of a batch are, in a loop without ``rankwise.DataLoader``; forward and backward belong inside.

    Args:
        positions: For each sample of this rank's batch, in its order: a number that no other sample of the epoch has on
            any rank, 0 or more; best the sample's place in the epoch, or its index in the data set.
        epoch: Which epoch, from 0.

    Yields:
        The place.
    """
    before, place = _shown, Place(epoch, positions)
    show(place)
    try:
        yield place
    finally:
        show(before)


def find_rank() -> int | None:
    """Return this rank, if a job was joined."""
    ctx = find_current()
    return None if ctx is None else ctx.rank
