"""One optimizer step as the loader gives it: the micro-batches of this rank, and what the loss must be multiplied with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from rankwise.data.sample_position import Place, find_place, show

if TYPE_CHECKING:
    from collections.abc import Iterator


@final
class MicroBatches:
    """The micro-batches of a step, all at once.

    Args:
        taken: Each with its place; None where nobody knows it.
    """

    as_many_on_every_rank = True

    def __init__(self, taken: list[tuple[Any, Place | None]]) -> None:
        self._taken = taken

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._taken)

    def __iter__(self) -> Iterator[Any]:
        """Yield them; each becomes the one at hand."""
        before: Place | None = None
        for batch, place in self._taken:
            if place is not None:
                # As good as new: nobody has asked for it in this round.
                before = Place(place.epoch, place.positions, before)
                show(before)
            yield batch


@final
class Step:
    """The micro-batches of one step, to be iterated once: ``for micro in rankwise.accumulate(ddp, step)``.

    Attributes:
        index: Which step of the epoch, from 0.
        num_samples: Samples of it on this rank; may be 0.
        global_samples: Samples of it over all ranks.
        scale: What a sum-reduced loss must be multiplied by, so that DDP's average over the ranks is the mean over all
            samples: ``loss_scale(num_samples)`` without communication.
        as_many_on_every_rank: Whether ``len()`` is the same on all ranks: always.
    """

    as_many_on_every_rank = True

    def __init__(
        self,
        micro_batches: Iterator[Any],
        *,
        index: int,
        num_micro_batches: int,
        num_samples: int,
        global_samples: int,
        world_size: int,
    ) -> None:
        self._micro_batches, self._num_micro_batches = micro_batches, num_micro_batches
        self.index, self.num_samples, self.global_samples = index, num_samples, global_samples
        self.scale = world_size / global_samples

    def __len__(self) -> int:
        """Return how many micro-batches each rank has."""
        return self._num_micro_batches

    def __iter__(self) -> Iterator[Any]:
        """Yield them; each becomes the one at hand (``rankwise.data.sample_position``), and the step counts as consumed with the last."""
        return self._micro_batches

    def fetch(self) -> MicroBatches:
        """Take all micro-batches of the step at once: for code that needs them before the first forward, such as to count tokens.

        Returns:
            The micro-batches, to be iterated as often as needed; each becomes the current one when it is yielded.
        """
        return MicroBatches([(batch, find_place()) for batch in self._micro_batches])

    def __repr__(self) -> str:
        return f"Step(index={self.index}, num_samples={self.num_samples}, global_samples={self.global_samples}, micro_batches={len(self)})"

    def drain(self) -> None:
        """Take what the loop has left: the next step follows it."""
        for _ in self._micro_batches:
            pass
        show(None)
