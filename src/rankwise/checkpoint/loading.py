"""Load a training state: all ranks agree on the latest checkpoint that is whole, whatever their number."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from rankwise.base.errors import CheckpointError
from rankwise.checkpoint.contents import find_checkpoint
from rankwise.checkpoint.disk import put_in_words
from rankwise.checkpoint.folder import read_contents
from rankwise.checkpoint.parts import PerRank, check_state
from rankwise.checkpoint.plan import Reads, plan_reads
from rankwise.checkpoint.ranks import find_alone, find_ranks
from rankwise.checkpoint.reading import read_all, read_tensors, receive_all
from rankwise.checkpoint.rng import RNG, RandomStates, reseed
from rankwise.checkpoint.saving import finish_saves, note_serial
from rankwise.checkpoint.sources import choose, look, open_together
from rankwise.checkpoint.targets import Loading, Part, make_part
from rankwise.checkpoint.tree import decode
from rankwise.checkpoint.writing import warn

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping, Sequence

    from rankwise.checkpoint.ranks import Ranks


def load(
    folder: str | Path,
    state: MutableMapping[str, Any],
    *,
    step: int | None = None,
    strict: bool = True,
    rng: bool | None = None,
    pickle: bool = False,
    alone: bool = False,
) -> int | None:
    """Load the latest complete checkpoint into a state, at any world size.

    All ranks load the same one; a copy in the hosts' memory counts like one on the disk. Modules, optimizers and what
    else has ``load_state_dict`` are given their state, tensors and DTensors are filled where they are, and plain values
    are put into ``state``. A damaged checkpoint is reported and skipped for the one before it, unless a step is asked
    for. Where some ranks don't see the folder, rank 0 reads and sends.

    Args:
        folder: Where checkpoints are, or one of them.
        state: The parts to load, by the names they were saved under; other parts stay unread.
        step: The step to load; None: the latest.
        strict: Whether parts and a module's names that are in one of state and checkpoint only are an error; else those
            stay as they are, with a warning.
        rng: Whether the random generators continue where they were; at another world size they are reseeded from there.
            None: if an optimizer is among the parts, as training continues then.
        pickle: Whether pickled objects may be loaded. Whoever wrote them can have any code executed by that.
        alone: Whether this rank loads without the others: each rank of a job with parameter servers, which have no
            process group.

    Returns:
        The step, or None if there is no checkpoint yet.

    Raises:
        UsageError: The state is no dict of parts.
        CheckpointError: None is complete, the step does not exist, or the state does not fit; the same on every rank.
        CollectiveTimeoutError: Some rank did not call; names it.

    Collective: every rank, with the same parts; with ``alone`` this one only.
    """
    ranks, folder = find_alone() if alone else find_ranks(), Path(folder)
    check_state(state)
    finish_saves(folder)
    goes_on = any(isinstance(getattr(one, "value", one), Optimizer) for one in state.values())
    with_rng = goes_on if rng is None else rng
    failed: list[str] = []
    before: object = None
    while True:
        views = ranks.control.exchange(look(folder, step), what="checkpoint.load")
        # A job that saves there meanwhile may have deleted what we were about to read: then there are newer ones.
        if views == before:
            raise CheckpointError(
                f"no checkpoint in {folder} can be loaded: {'; '.join(failed)}",
                rank=ranks.rank,
                hint="`rankwise checkpoint verify` reads every byte; use a backup. The state may be partly loaded: don't continue with it",
            )
        before, failed = views, []
        candidates = choose(folder, views, step)
        note_serial(folder, max((one.serial for view in views for one in view.candidates), default=0))
        if not candidates:
            return None
        for damage in views[0].problems if step is None and ranks.is_main else ():
            warn(f"skipped a damaged checkpoint: {damage}")
        for chosen in candidates:
            opened = open_together(folder, ranks, views, chosen)
            if isinstance(opened, str):
                problem: str | None = opened
            else:
                problem = _attempt(Loading(state, ranks, opened, pickle, strict), rng=with_rng)
            if problem is None:
                return chosen.step
            failed.append(problem)
            if step is None and ranks.is_main:
                warn(f"skipped step {chosen.step}: {problem}")


def _attempt(loading: Loading, *, rng: bool) -> str | None:
    """Load a checkpoint that all ranks have opened; return why it can't be read, or None.

    Raises:
        CheckpointError: It is whole and does not fit.
    """
    parts: list[Part] = []
    with _raising_on_all(loading.ranks):
        parts = _make_parts(loading, rng=rng)
    problem = _fill(loading, parts)
    if problem is None:
        with _raising_on_all(loading.ranks):
            for part in parts:
                part.finish()
    return problem


@contextmanager
def _raising_on_all(ranks: Ranks) -> Iterator[None]:
    """Raise on every rank what went wrong on any."""
    error: Exception | None = None
    try:
        yield
    except Exception as found:  # noqa: BLE001 - the user's code may raise anything, and the others must know
        error = found
    word = None if error is None else put_in_words(error)["error"]
    words = ranks.control.exchange(word, what="checkpoint.load (does it fit?)")
    if error is not None:
        raise error
    rank = next((rank for rank, one in enumerate(words) if one), None)
    if rank is not None:
        raise CheckpointError(words[rank], rank=rank, hint="the error on that rank has the details")


def _make_parts(loading: Loading, *, rng: bool) -> list[Part]:
    opened, state = loading.opened, loading.state
    parts = [make_part(loading, name) for name in state if loading.is_strict or name in opened.manifest.parts]
    # Without a seed it is a part of the user's that has this name.
    owners = [
        trees[RNG]["stateful"]
        for _, trees in sorted(opened.index.rank_trees.items())
        if "seed" in (trees.get(RNG, {}).get("stateful") or ())
    ]
    if not rng or not owners or RNG in state:
        return parts
    ranks, step = loading.ranks, opened.manifest.step
    if len(owners) == opened.manifest.world_size == ranks.world_size:
        return [*parts, make_part(replace(loading, state={RNG: PerRank(RandomStates())}), RNG)]
    # Some rank has nobody to go on as: all are seeded anew.
    seed = {"seed": owners[0]["seed"]}
    anew = Part(finish=lambda: reseed(seed, step=step, rank=ranks.rank, world_size=ranks.world_size))
    return [*parts, anew]


def _fill(loading: Loading, parts: Sequence[Part]) -> str | None:
    """Read all tensors; return what is damaged, on any rank."""
    ranks, opened = loading.ranks, loading.opened
    targets = {name: tensor for part in parts for name, tensor in part.targets.items()}
    problem: Exception | None = None
    try:
        reads = plan_reads(targets, opened.index)
        if _must_send(loading, reads):
            receive_all(ranks, opened, reads)
        else:
            read_all(opened.here, opened.index, reads)
    except Exception as error:  # noqa: BLE001 - no memory, or whatever the device says: the others must know
        problem = error
    is_damage = isinstance(problem, CheckpointError)
    message = None if problem is None else put_in_words(problem)["error"]
    words = ranks.control.exchange((message, is_damage), what="checkpoint.load (all read?)")
    if problem is not None and not is_damage:
        raise problem
    for rank, (word, is_theirs) in enumerate(words):
        if word is not None and not is_theirs:
            raise CheckpointError(
                word,
                rank=rank,
                hint="the error on that rank has the details; the state is partly loaded: don't continue with it",
            )
    return next((word for word, _ in words if word), None)


def _must_send(loading: Loading, reads: Reads) -> bool:
    """Whether some rank needs what it can't read by itself; the same on every rank."""
    if not loading.opened.senders:
        return False
    is_short = not reads.by_chunk.keys() <= loading.opened.here.keys()
    return any(loading.ranks.control.exchange(is_short, what="checkpoint.load (is all here?)"))


def read(folder: str | Path, *, step: int | None = None, pickle: bool = False) -> dict[str, Any]:
    """Read a whole checkpoint into host memory, on this process alone: to look at it, or to take parts of it.

    Args:
        folder: Where checkpoints are, or one of them.
        step: The step; None: the latest.
        pickle: As for ``load``.

    Returns:
        The parts by name: a module's and an optimizer's as their state dicts; of what each rank has its own, a dict by
            rank.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    one = find_checkpoint(folder, step)
    _, index = read_contents(one)
    tensors = read_tensors(one.path, index)

    def put_together(tree: Any) -> Any:
        return decode(next(iter(tree.values())), tensors.__getitem__, can_pickle=pickle)

    found = {name: put_together(tree) for name, tree in index.trees.items()}
    for rank, trees in sorted(index.rank_trees.items()):
        for name, tree in trees.items():
            found.setdefault(name, {})[rank] = put_together(tree)
    return found
