"""Decides who reads what of a data set that can only be iterated, and refuses what can't be right."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch.utils.data import DataLoader as TorchLoader, IterableDataset

from rankwise.base.errors import UsageError
from rankwise.data.stream_reader import Split

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwise.runtime.context import RankContext

#: What torch's loader is given, and how it is said here.
_SAID_OTHERWISE = {
    "batch_size": "global_batch counts the samples of one step over all ranks; micro_batch those of one forward pass",
    "generator": "seed=... sets the order",
    "timeout": "timeout_s=...",
} | dict.fromkeys(
    ("sampler", "batch_sampler"),
    "the loader draws the order itself, and gives each rank its part: see weights and lengths; an order of your own"
    " belongs into a data set whose set_epoch(epoch) draws it, with shuffle=False",
)
#: What a data set asks for to split itself: by worker, by rank.
_BY_RANK = "get_rank|get_world_size|RANK|LOCAL_RANK|WORLD_SIZE"
_ASKED = re.compile(rf"\b(get_worker_info|{_BY_RANK})\b")
_ASKED_BY_RANK = re.compile(rf"\b({_BY_RANK})\b")


def is_stream(dataset: Any) -> bool:
    """Tell whether a data set can only be iterated.

    Raises:
        UsageError: It can neither be indexed nor iterated.
    """
    is_indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if is_indexed and not isinstance(dataset, IterableDataset):
        return False
    if hasattr(dataset, "__iter__"):
        return True
    raise UsageError(
        f"a {type(dataset).__name__} is not a data set: it can neither be indexed nor iterated",
        hint="give it __getitem__ and __len__, or __iter__",
    )


def check_source(dataset: Any, unknown: Iterable[str]) -> None:
    """Refuse what belongs to torch's loader: its arguments, and itself, whose batches would be put into batches.

    Args:
        dataset: What the loader was given as data set.
        unknown: Arguments that it does not have.

    Raises:
        UsageError: Says what to give instead.
    """
    for name in unknown:
        hint = _SAID_OTHERWISE.get(name, "help(rankwise.DataLoader) lists them")
        raise UsageError(f"the DataLoader has no argument {name!r}", hint=hint)
    is_torchs = isinstance(dataset, TorchLoader) and dataset.batch_sampler is not None
    if is_torchs or any(one.__module__ == "rankwise.data.loader" for one in type(dataset).__mro__):
        raise UsageError("the data set is a DataLoader, which yields batches", hint="pass its data set: loader.dataset")


def is_one_shot(dataset: Any) -> bool:
    """Tell whether a stream can be read once only: a generator, an open file."""
    return hasattr(dataset, "__next__")


def choose_split(dataset: Any, split: str | None, *, num_workers: int) -> Split:
    """Return who reads what of a stream.

    Args:
        dataset: The stream.
        split: What the user has said, or None.
        num_workers: The loader's.

    Raises:
        UsageError: It can't be guessed, or what is said can't work.
    """
    name = type(dataset).__name__
    if is_one_shot(dataset) and (num_workers > 0 or split not in {None, "stride"}):
        raise UsageError(
            f"a {name} can be read once, by one process, and there are {num_workers} workers (split={split!r})",
            hint="pass a data set whose __iter__ starts again each time, or num_workers=0",
        )
    can_shard = callable(getattr(dataset, "shard", None))
    if split is None:
        asked = find_own_splitting(dataset)
        if asked is None and not can_shard:
            return "stride"
        does, own = (
            f"asks for {asked} in its __iter__, as if to split itself",
            "'dataset': it gives each worker a part",
        )
        if can_shard:
            does, own = "can be cut by shard()", "'shard': each worker gets a part of its own"
        raise UsageError(
            f"{name} {does}: specify who reads what",
            hint=f"split={own}; or split='stride': every worker reads all of it and keeps its share, in the same order at any number of ranks",
        )
    if split not in get_args(Split):
        raise UsageError(f"split={split!r}", hint=f"one of {', '.join(map(repr, get_args(Split)))}")
    if split == "shard" and not can_shard:
        raise UsageError(
            f"split='shard', and {name} has no shard(num_shards, index)",
            hint="split='dataset' if it splits itself in __iter__, else 'stride'",
        )
    return split  # type: ignore[return-value]


def find_own_splitting(dataset: Any, *, by_rank: bool = False) -> str | None:
    """Return what the data set's ``__iter__`` asks for to split itself, as far as its source tells; else None.

    Args:
        dataset: The stream.
        by_rank: Look for splitting by ranks only: where all ranks read one stream, workers are hidden from it.
    """
    try:
        source = inspect.getsource(type(dataset).__iter__)
    except (OSError, TypeError):  # built in, or made in a notebook that is gone
        return None
    found = (_ASKED_BY_RANK if by_rank else _ASKED).search(source)
    return found[1] if found else None


def check_stream_options(
    split: Split, *, drop_last: bool, shuffle: bool | None, replacement: bool, **drawn: Any
) -> None:
    """Refuse what a stream can't do.

    Args:
        split: Who reads what.
        drop_last: The loader's.
        shuffle: The loader's.
        replacement: The loader's.
        **drawn: The loader's arguments that choose samples by their index; None where not given.

    Raises:
        UsageError: One was given.
    """
    given = ["shuffle=True"] * bool(shuffle) + ["replacement=False"] * (not replacement)
    given += [name for name, value in drawn.items() if value is not None]
    if given:
        raise UsageError(
            f"{given[0]} with a data set that can only be iterated: its order is its own",
            hint="shuffle inside it, as Hugging Face's .shuffle(buffer_size=...) does, or leave the argument out",
        )
    if drop_last and split != "stride":
        raise UsageError(
            f"drop_last=True with split={split!r}: each worker's part ends by itself, and what is left would be lost",
            hint="drop_last=False: ranks whose part has ended get empty batches",
        )


def read_device(device: str | torch.device | None, ctx: RankContext | None) -> torch.device:
    """Return the device that is meant; if none is given the job's.

    Args:
        device: The loader's argument.
        ctx: The job; None: there is none.

    Raises:
        UsageError: It names no device.
    """
    if device is None:
        return ctx.device if ctx is not None else torch.device("cpu")
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"device={device!r}: {str(error).splitlines()[0]}",
            hint="a torch.device or its name: 'cpu', 'cuda', 'cuda:1'",
        ) from None
