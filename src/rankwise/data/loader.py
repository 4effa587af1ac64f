"""Loads the batches of each rank so that a job gives the same samples at every step, at any number of ranks and workers."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from torch.utils.data import default_collate

from rankwise.base.errors import UsageError
from rankwise.data.batches import Packing
from rankwise.data.data_ranks import find_world
from rankwise.data.map_passes import MapPasses
from rankwise.data.map_reader import MapReader
from rankwise.data.peers import Peers
from rankwise.data.pipeline import Pipeline
from rankwise.data.sampler import GlobalBatchSampler, check_number
from rankwise.data.splitting import check_source, check_stream_options, choose_split, is_stream, read_device
from rankwise.data.stream_cursor import StreamCursor
from rankwise.data.stream_passes import StreamPasses
from rankwise.data.stream_reader import Dealing, StreamReader
from rankwise.runtime.context import find_current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankwise.data.steps import Step
    from rankwise.data.stream_reader import Split
    from rankwise.runtime.context import RankContext


@final
class DataLoader:
    """Iterates over this rank's batches, on its device; ``steps()`` groups them into optimizer steps.

    Step k of an epoch holds the same samples at any number of ranks, workers and micro-batches, and every sample
    appears once. All ranks have the same number of batches: where a short last step has fewer samples than ranks, some
    get an empty batch, with tensors of size 0, so that they take part in every collective.

    With ``sample_seeds``, Python's, torch's and NumPy's generators are seeded by (seed, epoch, sample) before each sample
    is read: augmentation is the same at any number of ranks and workers. The training process's own generators stay as
    they were. Seeding begins with the first micro-batch that draws a random number, which is read twice. A data set's
    ``__getitems__`` can't be seeded by sample, and is used with ``sample_seeds=False`` only. What ``collate_fn`` draws
    is the same after a resume, but each rank draws for its own part of a step.

    A data set that can only be iterated is split as ``split`` says. ``"stride"``, the default: every worker of every
    rank reads the whole stream, and keeps its share; the same order at any number of ranks. ``"shard"``: each worker
    reads ``dataset.shard(num_shards=..., index=...)``. ``"dataset"``: the data set gives each worker a part by itself.
    With the last two, ranks agree before each step whether any has samples left.

    Args:
        dataset: With ``__getitem__`` and ``__len__``, or with ``__iter__``. Its ``set_epoch`` is called, if it has one.
        global_batch: Samples of one optimizer step over all ranks.
        micro_batch: Most samples of one forward pass of a rank; None: all that it has of a step.
        shuffle: Reshuffle in each epoch; None: yes, unless the data set can only be iterated.
        seed: Seed of order and samples, the same on all ranks.
        drop_last: Leave out the last step of an epoch if it is not full.
        drop_none: Leave out samples that are None. The ranks then exchange at each step how many are left.
        weights: As for ``GlobalBatchSampler``, and so are the three that follow.
        num_samples: With weights: samples of an epoch.
        replacement: With weights: whether a sample may appear twice in an epoch.
        lengths: Put samples of like length into the same step.
        num_workers: Processes that load; 0: the training process itself. On Linux, SIGTERM and SIGUSR1 from outside end
            none of them.
        collate_fn: Makes a batch of a list of samples.
        device: Where batches go; None: the job's device.
        pin_memory: Whether workers' batches go through pinned memory; None: if the device is CUDA.
        prefetch_factor: Batches that each worker loads ahead; None: 2.
        persistent_workers: Keep the workers from epoch to epoch.
        multiprocessing_context: How workers are started: "fork", "spawn", "forkserver".
        worker_init_fn: Called in each worker with its number.
        timeout_s: Seconds to wait for a batch from a worker; 0: without end.
        sample_seeds: Seed each sample.
        split: Who reads what of a data set that can only be iterated: "stride", "shard", "dataset".
        ctx: The job; None: the one that ``init()`` joined, or none.
        **unknown: Nothing else; an error names what takes the place of an argument of torch's.

    Attributes:
        sampler: Which sample is where, and the cursor; None for a data set that can only be iterated.
        device: Where batches go.
        global_batch: Samples of one optimizer step over all ranks.
        micro_batch: Most samples of one forward pass of a rank, or None.
        seed: Seed of order and samples.

    Raises:
        UsageError: Invalid arguments; says what to do.
        DataError: While iterating: a sample or batch is None, or ranks don't read the same stream.
        CollectiveError: While iterating: the ranks hold different data, seeds or positions; says who holds what.

    Collective: every rank iterates, the same number of batches: each pass begins with a small exchange.
    """

    def __init__(  # noqa: PLR0913 - torch's names, and most users give three
        self,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = False,
        drop_none: bool = False,
        weights: Any = None,
        num_samples: int | None = None,
        replacement: bool = True,
        lengths: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: str | torch.device | None = None,
        pin_memory: bool | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: Any = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        timeout_s: float = 0,
        sample_seeds: bool = True,
        split: Split | None = None,
        ctx: RankContext | None = None,
        **unknown: NoReturn,
    ) -> None:
        check_source(dataset, unknown)
        ctx = ctx or find_current()
        world_size, rank = (ctx.data_size, ctx.data_rank) if ctx is not None else find_world()
        self.dataset, self._peers = dataset, Peers(ctx, world_size, rank)
        self._is_reported_uneven = False
        self.device = read_device(device, ctx)
        seed = check_number("seed", seed, least=None)
        num_workers = check_number("num_workers", num_workers, least=0)
        global_batch = check_number("global_batch", global_batch)
        micro_batch = None if micro_batch is None else check_number("micro_batch", micro_batch)
        self.global_batch, self.micro_batch, self.seed = global_batch, micro_batch, seed
        self.sampler: GlobalBatchSampler | None = None
        packing = Packing(collate=collate_fn or default_collate, drops_none=drop_none)
        warns = world_size > 1 and (rank == 0 if ctx is None else ctx.is_main)
        load = partial(
            Pipeline, device=self.device, rank=rank, warns_of_draws=warns, seed=seed, num_workers=num_workers, pin_memory=pin_memory,
            worker_init_fn=worker_init_fn, timeout=timeout_s, multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor, persistent_workers=persistent_workers,
        )  # fmt: skip
        drawn = {"weights": weights, "num_samples": num_samples, "lengths": lengths}
        self._passes: MapPasses | StreamPasses
        self._cursor: GlobalBatchSampler | StreamCursor
        if is_stream(dataset):
            chosen = choose_split(dataset, split, num_workers=num_workers)
            check_stream_options(chosen, drop_last=drop_last, shuffle=shuffle, replacement=replacement, **drawn)
            self._check_reach(f"split={chosen!r}", is_needed=chosen != "stride")
            dealing = Dealing(
                split=chosen, rank=rank, world_size=world_size, num_shards=max(1, num_workers),
                global_batch=global_batch, micro_batch=micro_batch, drops_last=drop_last,
                # One stream for all must draw the same everywhere, whether the user cares for seeds or not.
                seed=seed if sample_seeds or chosen == "stride" else None,
            )  # fmt: skip
            pipeline = load(StreamReader(dataset, packing, dealing))
            self._cursor = StreamCursor(dealing, seed)
            self._passes = StreamPasses(self._cursor, dealing, pipeline, self._peers, dataset)
        else:
            if split is not None:
                raise UsageError(
                    f"split={split!r} with a data set that has an index",
                    hint="leave it out: its samples are distributed by their index",
                )
            self._check_reach("drop_none=True", is_needed=drop_none)
            self._cursor = self.sampler = GlobalBatchSampler(
                dataset, global_batch=global_batch, micro_batch=micro_batch, shuffle=shuffle is not False,
                seed=seed, drop_last=drop_last, replacement=replacement, num_replicas=world_size, rank=rank, **drawn,
            )  # fmt: skip
            pipeline = load(MapReader(dataset, packing, seed=seed if sample_seeds else None))
            self._passes = MapPasses(
                self.sampler, pipeline, self._peers, drops_none=drop_none, draws_twice=weights is not None
            )

    def _check_reach(self, what: str, *, is_needed: bool) -> None:
        if is_needed and self._peers.world_size > 1 and not self._peers.are_reached:
            raise UsageError(
                f"{what} with {self._peers.world_size} ranks: they must exchange how many samples they have",
                rank=self._peers.rank,
                hint="call `rankwise.init()` before you make the loader",
            )

    # ------------------------------------------------------------------------ iterating

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass and yield this rank's batches; those of several micro-batches one after the other.

        A mean over such a batch has the same weight on each rank. Where ranks hold unequal numbers of samples that is
        not the mean of all of them: it is said once, and ``steps()`` is exact.
        """
        for step in self.steps():
            self._tell_uneven(step)
            yield from step

    def _tell_uneven(self, step: Step) -> None:
        size = self._peers.world_size
        is_even = step.num_samples * size == step.global_samples
        if is_even or self._peers.rank or self._is_reported_uneven or not torch.is_grad_enabled():
            return
        self._is_reported_uneven = True
        warnings.warn(
            f"step {step.index} of this epoch has {step.global_samples} samples, of which rank 0 holds {step.num_samples}, and not each rank as many: if "
            "the loss is a mean over the batch, DDP's average of it is not the mean over all samples there. loader.steps() with rankwise.accumulate "
            "and step.scale is exact",
            stacklevel=3,
        )

    def steps(self) -> Iterator[Step]:
        """Begin a pass and yield its optimizer steps, each with its micro-batches.

        A pass that is read to its end is followed by the next epoch's. One that was left early is not over: the next
        continues after its last step, as after a resume, so that nothing is lost or repeated; ``next(iter(loader))``
        gives another batch each time. Reading only the first batch counts too. ``set_epoch`` and ``epochs`` begin an
        epoch from its start.

        After a state of an epoch's end was loaded, the first pass has no steps: what follows the loop runs.

        Returns:
            An iterator over the steps of this rank.

        Collective: every rank, and all of them the same way.
        """
        return self._passes.steps()

    def __len__(self) -> int:
        """Return how many batches a whole epoch has, the same on every rank.

        Raises:
            TypeError: The data set can only be iterated.
        """
        number = self._passes.count_batches()
        if number is None:
            raise TypeError(
                f"a {type(self.dataset).__name__} can only be iterated, and its number of batches is not known"
            )
        return number

    # --------------------------------------------------------------------------- epochs

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._cursor.epoch

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs that are left, from the current one on: ``for epoch in loader.epochs(10)``.

        Each begins from its start, only that of a loaded state where the state was; it is over when the loop's body has
        finished.

        Args:
            num_epochs: How many the whole training has.

        Yields:
            The number of the epoch; what the loop's body iterates belongs to it.
        """
        while self.epoch < num_epochs:
            epoch = self.epoch
            self.set_epoch(epoch)
            yield epoch
            if self.epoch == epoch:  # the body left its pass early, or made none
                self._cursor.end_pass()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the first time after ``load_state_dict``, the loaded epoch begins where the state was.

        Calling it is optional: passes follow each other.

        Args:
            epoch: Which epoch, from 0.
        """
        self._cursor.set_epoch(epoch)

    # ---------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that the loop got; what workers have read ahead does not count.

        A step of several micro-batches counts with its last one. The state is the same on all ranks; with
        ``split="shard"`` or ``"dataset"`` each rank has its own.
        """
        return self._cursor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, with any number of ranks and workers.

        With ``split="shard"`` or ``"dataset"``: with the same numbers, each rank with its own state.

        Args:
            state: What ``state_dict`` has returned.

        Raises:
            DataError: It was saved for other data, another seed or order, or other numbers where these must be the
                same.
        """
        self._cursor.load_state_dict(state)
