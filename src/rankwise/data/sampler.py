"""Deal the samples of an epoch out to the ranks, a global batch at a time, from one cursor that all ranks share.

Step k holds the samples at positions kB to (k+1)B of the epoch's order, whatever the number of ranks, of workers or of
micro-batches; these only decide who computes which of them. So the cursor is two numbers, epoch and samples consumed,
and a job may go on from it with another number of ranks.

A batch counts as consumed when the training loop has got it, not when a worker has been told to load it:

- iterating the sampler itself counts what it hands out;
- ``track(loader)`` counts what comes out of a torch DataLoader that has this sampler as ``batch_sampler``;
- whoever draws ahead by other means takes ``draw`` or ``draw_steps``, which count nothing, and calls ``advance``.
"""

from __future__ import annotations

import operator
import warnings
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils.data import Sampler

from rankwise.base.errors import DataError, UsageError
from rankwise.data.batches import cut
from rankwise.data.data_ranks import find_world
from rankwise.data.epoch_order import LengthGroupedOrder, Order, SequentialOrder, ShuffledOrder, WeightedOrder
from rankwise.data.saved_positions import KIND, VERSION, check_state, is_between_epochs
from rankwise.data.schedule import FIRST_BLOCK, LAST_BLOCK, Schedule, StepPlan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sized


@final
class GlobalBatchSampler(Sampler):  # type: ignore[misc]
    """Yields the indices of this rank's batches; step k holds the same samples at any number of ranks.

    Every sample appears once an epoch (with weights: as drawn), also when neither the number of ranks nor the global
    batch divides the number of samples. Every rank yields the same number of lists; where a step has fewer samples than
    ranks, some of these are empty. Each pass is an epoch, and the next one follows by itself; ``set_epoch`` may be
    called too.

    A pass that was left early is not over: the next one continues after its last step, as after a
    resume, so that nothing is lost or repeated. After the last step of an epoch the next one begins. ``set_epoch``
    begins an epoch from its start.

    Args:
        dataset: The data set, or the number of its samples.
        global_batch: Samples of one optimizer step over all ranks.
        micro_batch: Most samples of one forward pass of a rank; None: all that it has of a step.
        shuffle: Reshuffle in each epoch.
        seed: The order's seed, the same on all ranks.
        drop_last: Leave out the last step of an epoch if it is not full.
        weights: Draw by chance, each sample in proportion to its weight; it replaces ``shuffle``.
        num_samples: With weights: samples of an epoch; None: as many as the data set has.
        replacement: With weights: whether a sample may appear twice in an epoch.
        lengths: Put samples of like length into the same step; each rank gets its part of the short and the long ones.
        num_replicas: Ranks that share the data; None: the job's.
        rank: Which of them this is; None: the job's.

    Attributes:
        schedule: How an epoch is cut into steps.
        order: In which order it shows its samples.
        seed: The order's seed.

    Raises:
        UsageError: Invalid arguments, or the environment names several ranks, but no job was joined.
    """

    def __init__(  # noqa: PLR0913 - each is a fact of its own, and most users give two
        self,
        dataset: Sized | int,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        weights: Any = None,
        num_samples: int | None = None,
        replacement: bool = True,
        lengths: Any = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.num_replicas, self.rank = find_world(num_replicas, rank)
        self.global_batch = check_number("global_batch", global_batch)
        self.micro_batch = None if micro_batch is None else check_number("micro_batch", micro_batch)
        self.drop_last, self.seed = drop_last, check_number("seed", seed, least=None)
        size = count_samples(dataset)
        self.order: Order
        if weights is not None:
            _refuse("weights", lengths=lengths is not None)
            _check_one_each("weights", weights, size)
            wanted = size if num_samples is None else check_number("num_samples", num_samples)
            self.order = WeightedOrder(weights, wanted, self.seed, replacement=replacement)
        else:
            _refuse("no weights", num_samples=num_samples is not None, replacement=not replacement)
            self.order = ShuffledOrder(size, self.seed) if shuffle else SequentialOrder(size)
        if lengths is not None:
            _refuse("lengths", shuffle=not shuffle)
            _check_one_each("lengths", lengths, size)
            self.order = LengthGroupedOrder(lengths, self.global_batch, self.seed)
        self.num_samples = self.order.num_samples
        if drop_last and 0 < self.num_samples < self.global_batch:
            raise UsageError(
                f"drop_last with {self.num_samples} samples and a global batch of {self.global_batch}: no step is left",
                rank=self.rank,
                hint="use a smaller global batch, or drop_last=False",
            )
        self.schedule = Schedule(
            num_samples=self.num_samples,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            drop_last=drop_last,
            num_replicas=self.num_replicas,
            rank=self.rank,
        )
        self._epoch = self._consumed = 0
        #: Grows whenever the cursor is moved otherwise than by ``advance``: an older pass has no say any more.
        self._serial = 0
        #: Whether a step of this epoch was delivered here, since the cursor was last moved otherwise.
        self._is_under_way = False
        #: Where the loaded epoch begins for us; None once a loop over it is under way that set_epoch has begun.
        self._resumed_at: int | None = None
        self._was_begun = self._is_tracked = False

    # ------------------------------------------------------------- what an epoch holds

    @property
    def num_steps(self) -> int:
        """Global steps of a whole epoch."""
        return self.schedule.count_steps()

    def __len__(self) -> int:
        """Return how many lists a whole epoch yields on each rank."""
        return self.schedule.count_micro_batches()

    # ------------------------------------------------------------------------- drawing

    def draw(self, epoch: int, consumed: int = 0) -> Iterator[list[int]]:
        """Yield the lists of this rank from any place of any epoch, and leave the cursor where it is.

        Args:
            epoch: Which epoch.
            consumed: Samples of it to leave out, over all ranks.

        Yields:
            Indices of one micro-batch, or of the whole step without ``micro_batch``; perhaps none.
        """
        for _, micro_batches in self.draw_steps(epoch, consumed):
            yield from micro_batches

    def draw_steps(self, epoch: int, consumed: int = 0) -> Iterator[tuple[StepPlan, list[list[int]]]]:
        """Yield step by step what ``draw`` yields flat, each with its plan.

        Args:
            epoch: Which epoch.
            consumed: Samples of it to leave out, over all ranks.

        Yields:
            The plan, and the lists of this rank's micro-batches.
        """
        num_steps, num_full = self.schedule.count_steps(consumed), (self.num_samples - consumed) // self.global_batch
        step, size = 0, FIRST_BLOCK
        while step < num_steps:
            first = self.schedule.plan(step, consumed)
            fitting = max(1, size // max(1, first.num_samples))
            rows = self._take(epoch, first, num_steps=min(fitting, num_full - step) if step < num_full else 1)
            for number, indices in enumerate(rows):
                plan = self.schedule.plan(step + number, consumed) if number else first
                yield plan, cut(indices, plan.micro_sizes)
            step, size = step + len(rows), min(2 * size, LAST_BLOCK)

    def _take(self, epoch: int, first: StepPlan, *, num_steps: int) -> list[list[int]]:
        """Return this rank's indices in each of some steps of the same size."""
        starts = first.start + self.global_batch * torch.arange(num_steps, device="cpu")
        # Every num_replicas-th sample: where they are sorted by length, each rank has its part of all lengths.
        inside = torch.arange(first.global_samples, device="cpu")[self.rank :: self.num_replicas]
        positions = (starts[:, None] + inside).flatten()
        rows: list[list[int]] = self.order.take(epoch, positions).view(num_steps, len(inside)).tolist()
        return rows

    # -------------------------------------------------------------------------- passes

    @property
    def epoch(self) -> int:
        """The epoch in which the cursor is."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """Samples of the epoch that were delivered, over all ranks."""
        return self._consumed

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, as the usual loop does before each pass.

        The first time after ``load_state_dict``, the loaded epoch begins where the state was, so that
        ``for epoch in range(sampler.epoch, num_epochs)`` loses nothing; called again before a step was delivered, too.

        Args:
            epoch: Which epoch, from 0.

        Raises:
            UsageError: It is not a number of an epoch.
        """
        epoch = check_number("epoch", epoch, least=0)
        resumed_at = self._resumed_at if epoch == self._epoch else None
        self._go_to(epoch, resumed_at or 0)
        self._resumed_at, self._was_begun = resumed_at, True

    def _go_to(self, epoch: int, consumed: int) -> None:
        self._epoch, self._consumed = epoch, consumed
        self._resumed_at, self._is_under_way, self._was_begun = None, False, False
        self._serial += 1

    def __iter__(self) -> Iterator[list[int]]:
        """Begin a pass; its lists count as consumed when they are handed out."""
        if self._is_tracked:
            return self.draw(self.epoch, self.consumed)
        epoch, consumed = self.begin_pass()
        return self._count(self.draw(epoch, consumed), consumed)

    def track(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Begin a pass over a torch DataLoader whose ``batch_sampler`` this is, and count what comes out of it.

        Its workers draw ahead: without this the cursor would count what they load ahead.

        Args:
            loader: The DataLoader.

        Returns:
            An iterator over the loader's batches.

        Raises:
            UsageError: The loader has another batch sampler.
            DataError: While iterating: it gave more or fewer batches than the sampler has lists.
        """
        theirs: object = getattr(loader, "batch_sampler", None)
        if theirs is not self:
            raise UsageError(
                f"this {type(loader).__name__} has another batch_sampler: its batches can't be counted here",
                rank=self.rank,
                hint="make it with DataLoader(dataset, batch_sampler=sampler)",
            )
        _, consumed = self.begin_pass()
        self._is_tracked = True
        try:
            batches: Iterator[Any] = iter(loader)
        finally:
            self._is_tracked = False
        return self._count(batches, consumed)

    def _count(self, batches: Iterator[Any], consumed: int) -> Iterator[Any]:
        """Return an iterator over a pass that moves the cursor with what it hands out."""
        serial = self._serial

        def run() -> Iterator[Any]:
            for step in range(self.schedule.count_steps(consumed)):
                plan = self.schedule.plan(step, consumed)
                for left in reversed(range(len(plan.micro_sizes))):
                    batch = next(batches, self)
                    if batch is self:
                        raise self._miscounted("has ended", plan)
                    # A pass that another one has replaced must not move the other's cursor.
                    if left == 0 and serial == self._serial:
                        self.advance(plan.global_samples)
                    yield batch
            # Asked once more, a loader ends, and with it its workers.
            if next(batches, self) is not self:
                raise self._miscounted("goes on", None)
            if serial == self._serial:
                self.end_pass()

        return run()

    def _miscounted(self, what: str, plan: StepPlan | None) -> DataError:
        where = "after its last step" if plan is None else f"before step {plan.index} was complete"
        return DataError(
            f"the loader {what} {where}: an epoch has {len(self)} batches of this rank",
            rank=self.rank,
            hint="it must yield one batch for each list of the sampler: make it with DataLoader(dataset, batch_sampler=sampler)",
        )

    def begin_pass(self) -> tuple[int, int]:
        """Begin a pass where the cursor is; at the end of an epoch that was read here, the next epoch begins.

        Returns:
            Epoch and consumed samples at which it begins.
        """
        # What was left early has delivered all. Only a loaded state of an epoch's end gives a pass of no steps,
        # so that what stands behind the loop is done.
        if self._is_under_way and not self.schedule.count_steps(self._consumed):
            self.end_pass()
        self._serial += 1
        return self._epoch, self._consumed

    def advance(self, global_samples: int) -> None:
        """Count a step as consumed: the training loop has got the last batch of it.

        Args:
            global_samples: Its samples over all ranks.

        Raises:
            UsageError: The epoch does not have so many samples left.
        """
        left = self.num_samples - self._consumed
        if not 0 < global_samples <= left:
            raise UsageError(
                f"a step of {global_samples} samples was delivered, and epoch {self._epoch} has {left} left",
                rank=self.rank,
                hint="advance once a step, by its plan's global_samples",
            )
        self._consumed += global_samples
        self._is_under_way = True
        if self._was_begun:
            self._resumed_at = None

    def end_pass(self) -> None:
        """Go to the start of the next epoch: the loop has reached its end."""
        self._go_to(self._epoch + 1, 0)

    # --------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, int | str]:
        """Return the cursor: a few numbers that are the same on all ranks and go into JSON.

        In the loop's body the batch at hand counts as consumed; of a step of several micro-batches, only the last
        counts.
        """
        return {
            "version": VERSION,
            "kind": KIND,
            "epoch": self._epoch,
            "consumed": self._consumed,
            "global_batch": self.global_batch,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "order": self.order.name,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a saved cursor was, with any number of ranks, workers and micro-batches.

        Another global batch is fine too: steps then begin at the first sample that is not consumed. Only an order by
        length depends on it.

        Args:
            state: What ``state_dict`` has returned.

        Raises:
            DataError: The state belongs to other data or another order, or is damaged; the cursor stays where it was.
        """
        check_state(state, self.schedule, seed=self.seed, order=self.order.name)
        # Between two epochs the data set may have got another size; within one its places would mean other samples.
        size, consumed = self.num_samples, state["consumed"]
        if size != state["num_samples"] and self.rank == 0:
            warnings.warn(
                f"this was saved between two epochs of {state['num_samples']} samples, and the data set has {size} now: so has the next epoch",
                stacklevel=2,
            )
        is_over = consumed and is_between_epochs(state, drop_last=self.drop_last)
        self._go_to(state["epoch"], size if is_over else consumed)
        self._resumed_at = self._consumed


def count_samples(dataset: Sized | int) -> int:
    """Return how many samples a data set has.

    Args:
        dataset: The data set, or the number itself.

    Raises:
        UsageError: It does not tell.
    """
    if isinstance(dataset, int):
        return check_number("dataset", dataset, least=0)
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise UsageError(
            f"a {type(dataset).__name__} does not report how many samples it has: {error}",
            hint="give it __len__, or give the number itself; an iterable data set has no sampler",
        ) from None


def check_number(name: str, value: Any, *, least: int | None = 1) -> int:
    """Return an argument as a whole number.

    Args:
        name: Its name, for the error.
        value: What was given.
        least: The least that it may be; None: there is none.

    Raises:
        UsageError: It is no such number.
    """
    bound = "" if least is None else f", {least} or more"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        raise UsageError(f"{name}={value!r}", hint=f"{name} is a whole number{bound}")
    return number


def _check_one_each(name: str, values: Any, size: int) -> None:
    number = len(values) if hasattr(values, "__len__") else f"a {type(values).__name__} as"
    if number != size:
        raise UsageError(
            f"{number} {name} for {size} samples",
            hint=f"give a list, array or tensor of {name}, one for each sample",
        )


def _refuse(what: str, **given: bool) -> None:
    for name, is_given in given.items():
        if is_given:
            raise UsageError(f"{name}= can't go together with {what}", hint="leave one of them out")
