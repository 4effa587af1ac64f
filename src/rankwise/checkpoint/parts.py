"""The parts of a training state: what of each is saved, and how it comes back into the living object."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rankwise.base.errors import CheckpointError, UsageError
from rankwise.base.memory import view_memory
from rankwise.checkpoint.tree import Encoder, list_tensors, rename_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: What wrappers put into the names of parameters.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")

#: Bytes of one tensor, and of all of a part, of which it is looked whether they are the same on all ranks.
_LARGEST_COMPARED, _MOST_COMPARED, _MOST_TENSORS = 1 << 20, 64 << 20, 4096
_MOST_SHOWN = 5
#: What each forward pass of torch's BatchNorm changes.
_STATISTICS = (".running_mean", ".running_var", ".num_batches_tracked")


@final
@dataclass(frozen=True, slots=True)
class PerRank:
    """A part of the state that each rank has its own of: ``{"buffer": PerRank(replay_buffer)}``.

    Attributes:
        value: What could stand there without it: an object with ``state_dict()``, tensors, containers, numbers.
        at_other_size: At another world size it is not known whose part is whose: ``load`` refuses, or keeps what is
            there.
    """

    value: Any
    at_other_size: Literal["refuse", "keep"] = "refuse"


@final
@dataclass(slots=True)
class Flat:
    """A state taken apart.

    Attributes:
        tensors: By name; names begin with the part's.
        shared: Names of those that are the same on all ranks, as DDP sees to it: the ranks share the work of writing
            them.
        trees: For each part all else.
        rank_trees: For each part that this rank has its own of, all else.
        of_modules: Names of those that stood in what a module's ``state_dict()`` returns.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    trees: dict[str, Any] = field(default_factory=dict)
    rank_trees: dict[str, Any] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    of_modules: set[str] = field(default_factory=set)


def check_state(state: Any) -> None:
    """Refuse a model or a list where a dict of parts belongs."""
    if not hasattr(state, "keys"):
        raise UsageError(
            f"the state is a {type(state).__name__}", hint='name its parts: {"model": model, "optimizer": optimizer}'
        )


def flatten(state: Mapping[str, Any], rank: int, *, can_pickle: bool = False) -> Flat:
    """Take a state apart.

    Args:
        state: The parts by name.
        rank: Whose it is.
        can_pickle: Whether objects that are not plain data may be pickled.

    Raises:
        CheckpointError: A part can't be saved; names the place.
    """
    flat, names = Flat(), name_parameters(state)
    for part, held in state.items():
        _check_name(part)
        is_own = isinstance(held, PerRank)
        value = held.value if isinstance(held, PerRank) else held
        encoder = Encoder(f"{part}@{rank}" if is_own else part, can_pickle=can_pickle)
        tree = _take_apart(value, encoder, names, state)
        (flat.rank_trees if is_own else flat.trees)[part] = tree
        flat.tensors.update(encoder.tensors)
        flat.of_modules |= encoder.of_modules
        if not is_own:
            flat.shared |= _list_equal(part, value, encoder, state)
    return flat


def _list_equal(part: str, value: Any, encoder: Encoder, state: Mapping[str, Any]) -> set[str]:
    """Return the names of what DDP keeps the same on all ranks, in a module or an optimizer.

    Of a module not its buffers, which each rank changes in its own forward.
    """
    if isinstance(value, DistributedDataParallel):
        names = {f"{part}.{name}" for name, _ in unwrap(value).named_parameters()}
        return names & encoder.tensors.keys()
    if not isinstance(value, torch.optim.Optimizer):
        return set()
    wrapped = [module for module in state.values() if isinstance(module, DistributedDataParallel)]
    kept = {id(parameter) for module in wrapped for parameter in module.parameters()}
    return set(encoder.tensors) if kept >= set(map(id, list_parameters(value))) else set()


def make_own(flat: Flat, part: str, rank: int) -> None:
    """Make a part that was taken for common a rank's own; of one that is no module or optimizer the tensors too."""
    tree = flat.trees.pop(part)
    kind, held = next(iter(tree.items()))
    if kind in {"stateful", "value"}:
        names = {name: f"{part}@{rank}{name[len(part) :]}" for name in list_tensors(held)}
        if not any(isinstance(flat.tensors[name], DTensor) for name in names):
            flat.tensors.update({own: flat.tensors.pop(name) for name, own in names.items()})
            tree = {kind: rename_tensors(held, names)}
    flat.rank_trees[part] = tree


def digest_contents(flat: Flat) -> dict[str, int]:
    """Return checksums of the arrays and tensors of the parts that are no module or optimizer: ranks that differ are to be told.

    Of tensors on the CPU, none above 1 MiB, and of all parts together no more than 64 MiB and 4096 tensors: some 30 ms
        at most. What a
    module's ``state_dict()`` gave is left out, with its copies' statistics of batches: under DDP each rank has its own,
    and rank 0's count.

    Args:
        flat: The state.
    """
    sums, left, num_left = dict[str, int](), _MOST_COMPARED, _MOST_TENSORS
    for part, tree in flat.trees.items():
        kind, held = next(iter(tree.items()))
        sums[part] = 0
        for name in list_tensors(held) if kind in {"stateful", "value"} else ():
            tensor = flat.tensors[name]
            num_bytes = tensor.numel() * tensor.element_size()
            is_plain = type(tensor) in {torch.Tensor, torch.nn.Parameter} and tensor.device.type == "cpu"
            is_models = name in flat.of_modules or name.endswith(_STATISTICS)
            if is_plain and not is_models and num_left and num_bytes <= min(left, _LARGEST_COMPARED):
                left, num_left = left - num_bytes, num_left - 1
                whole = tensor.contiguous()
                sums[part] = zlib.crc32(view_memory(whole.data_ptr(), num_bytes), sums[part])
    return sums


def _check_name(part: object) -> None:
    if not isinstance(part, str) or not part or "@" in part or "." in part:
        raise CheckpointError(
            f"a part of the state is named {part!r}",
            hint="names are strings without '@' and '.': {'model': model}",
        )


def _take_apart(value: Any, encoder: Encoder, names: Mapping[int, str], state: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(value, torch.nn.Module):
        take = getattr(unwrap(value), "sharded_state_dict", None)  # of a pipeline, whose stages are elsewhere
        encoder.has_stand_ins = take is not None
        return {"module": encoder.encode(unwrap(value).state_dict() if take is None else take())}
    if isinstance(value, torch.optim.Optimizer):
        part, pipeline = find_pipeline(state, value)
        if pipeline is not None:
            encoder.has_stand_ins = True
            held, own = pipeline.spread_optimizer(value)
            return {"optimizer": encoder.encode(held), "names": [f"{part}.{name}" for name in own]}
        parameters = [names.get(id(parameter)) for parameter in list_parameters(value)]
        take = getattr(value, "sharded_state_dict", None)
        encoder.has_stand_ins = take is not None
        return {
            "optimizer": encoder.encode(value.state_dict() if take is None else take()),
            "names": parameters if all(parameters) else None,
        }
    if is_stateful(value):
        return {"stateful": encoder.encode(value.state_dict())}
    return {"value": encoder.encode(value)}


# ------------------------------------------------------- what things are


def is_stateful(value: Any) -> bool:
    """Whether an object gives and takes its state."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the user's module inside of DDP and torch.compile: names don't depend on how it was wrapped."""
    while True:
        if isinstance(module, (DistributedDataParallel, torch.nn.DataParallel)):
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), torch.nn.Module):
            module = module._orig_mod
        else:
            return module


def find_pipeline(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> tuple[str, Any]:
    """Return the module whose stages an optimizer trains on this rank, and its part; None if they are all here."""
    trained = {id(one) for one in list_parameters(optimizer)}
    for part, held in state.items():
        value = held.value if isinstance(held, PerRank) else held
        if isinstance(value, torch.nn.Module) and hasattr(unwrap(value), "spread_optimizer"):
            module = unwrap(value)
            if any(id(one) in trained for one in module.parameters()):
                return part, module
    return "", None


def list_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters in the order of its state's numbers."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def name_parameters(state: Mapping[str, Any]) -> dict[int, str]:
    """Name the parameters of all modules in a state, by ``id``: optimizers know them by numbers only."""
    names: dict[int, str] = {}
    for part, held in state.items():
        value = held.value if isinstance(held, PerRank) else held
        if isinstance(value, torch.nn.Module):
            module = unwrap(value)
            canonical: Mapping[str, str] = getattr(module, "canonical_names", {})
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), f"{part}.{clean(canonical.get(name, name))}")
    return names


def clean(name: str) -> str:
    """Take what wrappers have put into a parameter's name out of it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def match_names(own: Sequence[str], saved: Sequence[str]) -> dict[str, str]:
    """Say which saved name each of a module's own has; ``module.`` and other wrappers' words don't matter.

    Args:
        own: As the module has them.
        saved: As they were saved.

    Returns:
        The saved name for each own one that has one.
    """
    if set(own) == set(saved):
        return {name: name for name in own}
    of_saved = {_bare(name, saved): name for name in saved}
    return {name: of_saved[_bare(name, own)] for name in own if _bare(name, own) in of_saved}


def shorten(names: Sequence[str], between: str = ", ") -> str:
    """Return some of the names, and how many more there are."""
    more = f"{between}and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return between.join(names[:_MOST_SHOWN]) + more


def strip_names(names: Sequence[str]) -> list[str]:
    """Take ``module.`` out of parameters' names where a part has it in all of them: ``model.module.weight``."""
    inner: dict[str, list[str]] = {}
    for name in names:
        inner.setdefault(name.partition(".")[0], []).append(name.partition(".")[2])
    return [f"{part}.{_bare(rest, inner[part])}" for part, _, rest in (name.partition(".") for name in names)]


def _bare(name: str, all_names: Sequence[str]) -> str:
    name = clean(name)
    return name.removeprefix("module.") if all(clean(one).startswith("module.") for one in all_names) else name
