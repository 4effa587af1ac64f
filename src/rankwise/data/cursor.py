"""Where the job stands in its data: epoch and samples consumed, the same two numbers on every rank."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, final

from rankwise.base.errors import DataError, UsageError

if TYPE_CHECKING:
    from rankwise.data.orders import Order
    from rankwise.data.schedule import Schedule

_VERSION = 1
#: Told in a state, so that one of the other kind of data set is known for what it is.
KIND, STREAM_KIND = "indexed", "stream"
_OTHER_SIZE = (
    "end the epoch with the data set that it began with: between epochs it may grow or shrink. To start again with these weights, load "
    "them alone, checkpoint.load(folder, {'model': model, 'optimizer': optimizer}), and save in another folder"
)


@final
class Cursor:
    """Counts what was delivered, and decides where the next pass begins.

    Args:
        schedule: How the epoch is cut into steps.
        order: In which order it shows its samples.
        seed: The seed of that order.

    Attributes:
        epoch: The epoch.
        consumed: Samples of it that were delivered, over all ranks.
        serial: Grows whenever the cursor is moved otherwise than by ``advance``: an older pass has no say any more.
    """

    def __init__(self, schedule: Schedule, order: Order, seed: int) -> None:
        self._schedule, self._order, self._seed = schedule, order, seed
        self.epoch = self.consumed = self.serial = 0
        #: Whether a step of this epoch was delivered here, since the cursor was last moved otherwise.
        self._is_under_way = False
        #: Where the loaded epoch begins for us; None once a loop over it is under way that set_epoch has begun.
        self._resumed_at: int | None = None
        self._was_begun = False

    def begin_pass(self) -> tuple[int, int]:
        """Begin a pass where the cursor is: it goes on with what one that was left early has not delivered.

        If that one had delivered all, the next epoch begins. Only a loaded state of an epoch's end gives a pass of no steps,
        so that what stands behind the loop is done.

        Returns:
            Epoch and consumed samples at which it begins.
        """
        if self._is_under_way and not self._schedule.count_steps(self.consumed):
            self.end_pass()
        self.serial += 1
        return self.epoch, self.consumed

    def advance(self, global_samples: int) -> None:
        """Count a step as consumed.

        Args:
            global_samples: Its samples over all ranks.

        Raises:
            UsageError: The epoch does not have so many samples left.
        """
        left = self._schedule.num_samples - self.consumed
        if not 0 < global_samples <= left:
            raise UsageError(
                f"a step of {global_samples} samples was delivered, and epoch {self.epoch} has {left} left",
                rank=self._schedule.rank,
                hint="advance once a step, by its plan's global_samples",
            )
        self.consumed += global_samples
        self._is_under_way = True
        if self._was_begun:
            self._resumed_at = None

    def end_pass(self) -> None:
        """Go to the start of the next epoch."""
        self._go_to(self.epoch + 1, 0)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; that of the loaded epoch is, the first time, where the state was.

        It stays there until a step was delivered: two calls in a row do no harm.

        Args:
            epoch: Which epoch, from 0.
        """
        resumed_at = self._resumed_at if epoch == self.epoch else None
        self._go_to(epoch, resumed_at or 0)
        self._resumed_at, self._was_begun = resumed_at, True

    def _go_to(self, epoch: int, consumed: int) -> None:
        self.epoch, self.consumed = epoch, consumed
        self._resumed_at, self._is_under_way, self._was_begun = None, False, False
        self.serial += 1

    def state_dict(self) -> dict[str, int | str]:
        """Return the cursor, and what must be the same where it is loaded: a few numbers and words that go into JSON."""
        return {
            "version": _VERSION,
            "kind": KIND,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "global_batch": self._schedule.global_batch,
            "num_samples": self._schedule.num_samples,
            "seed": self._seed,
            "order": self._order.name,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place.

        Between two epochs the data set may have another number of samples than when the state was saved: the next epoch has those
        of now, and rank 0 warns. Within an epoch its places would mean other samples.

        Args:
            state: What ``state_dict`` has returned.

        Raises:
            DataError: The state belongs to other data or another order, or is damaged; the cursor stays where it was.
        """
        self._check(state)
        size, consumed = self._schedule.num_samples, state["consumed"]
        if size != state["num_samples"] and self._schedule.rank == 0:
            warnings.warn(
                f"this was saved between two epochs of {state['num_samples']} samples, and the data set has {size} now: so has the next epoch",
                stacklevel=2,
            )
        self._go_to(state["epoch"], size if consumed and self._is_between_epochs(state) else consumed)
        self._resumed_at = self.consumed

    def _is_between_epochs(self, state: dict[str, Any]) -> bool:
        """Whether nothing of a sound state's epoch was delivered, or all that this schedule would deliver."""
        left = state["num_samples"] - state["consumed"]
        is_over = left < state["global_batch"] if self._schedule.drop_last else left == 0
        return state["consumed"] == 0 or bool(is_over)

    def _check(self, state: Any) -> None:
        rank, size = self._schedule.rank, self._schedule.num_samples
        check_kind(state, _VERSION, KIND, rank)
        epoch, consumed, saved_size = state.get("epoch"), state.get("consumed"), state.get("num_samples")
        counts = (epoch, consumed, saved_size, state.get("global_batch"))
        if any(type(one) is not int or one < 0 for one in counts) or not consumed <= saved_size:
            raise DataError(
                f"the state says epoch {epoch!r} and {consumed!r} of {saved_size!r} samples consumed",
                rank=rank,
                hint="the state is damaged: load an older one",
            )
        if saved_size != size and not self._is_between_epochs(state):
            raise DataError(
                f"the state was saved with num_samples {saved_size}, in the middle of epoch {epoch}, and this sampler has {size}",
                rank=rank,
                hint=_OTHER_SIZE,
            )
        for name, own, hint in (
            ("seed", self._seed, "give the sampler the seed of the state"),
            ("order", self._order.name, "give the sampler the shuffle, weights, lengths of the state, and with lengths its global batch"),
        ):  # fmt: skip
            if state.get(name) != own:
                raise DataError(
                    f"the state was saved with {name} {state.get(name)!r}, and this sampler has {own!r}",
                    rank=rank,
                    hint=hint,
                )


def check_kind(state: Any, version: int, kind: str, rank: int) -> None:
    """Refuse what is no state of this kind of data set.

    Args:
        state: What was given.
        version: The version that can be read.
        kind: ``KIND`` or ``STREAM_KIND``.
        rank: Ours, for the error.

    Raises:
        DataError: It is another thing, or of another version or kind.
    """
    if not isinstance(state, dict) or state.get("version") != version:
        value = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise DataError(
            f"this is not a state of a sampler or loader that can be read here: version {value!r}, but {version} is expected",
            rank=rank,
            hint="load what state_dict() has returned, with the rankwise that saved it",
        )
    if state.get("kind") != kind:
        words = {KIND: "a data set that has an index", STREAM_KIND: "a data set that can only be iterated"}
        raise DataError(
            f"the state was saved for {words.get(str(state.get('kind')), 'something unknown')}, but this is {words[kind]}",
            rank=rank,
            hint="load it into a loader of the same data set, or start an epoch with set_epoch",
        )
