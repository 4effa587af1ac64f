"""Where the saved values of a part go: into the living module, optimizer or container, or into new tensors for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.base.errors import CheckpointError
from rankwise.checkpoint.parts import (
    PerRank,
    find_pipeline,
    is_stateful,
    list_parameters,
    match_names,
    name_parameters,
    shorten,
    strip_names,
    unwrap,
)
from rankwise.checkpoint.tree import Encoder, decode, list_tensors
from rankwise.checkpoint.writing import warn

if TYPE_CHECKING:
    from rankwise.checkpoint.ranks import Ranks
    from rankwise.checkpoint.sources import Opened

#: Options that schedulers and named parameters add to an optimizer's.
_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "param_names"})
#: What a GradScaler asks an optimizer.
_LEAVES_SCALING = "_step_supports_amp_scaling"


@final
@dataclass(slots=True)
class Part:
    """A part of the state on its way back.

    Attributes:
        targets: By saved name, the tensors to fill.
        finish: Gives the values to their owner, once all tensors are filled.
    """

    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    finish: Callable[[], None] = lambda: None


@final
@dataclass(frozen=True, slots=True)
class Loading:
    """What is being loaded.

    Attributes:
        state: The parts by name, as the caller gave them.
        ranks: Who loads.
        opened: The checkpoint.
        can_pickle: Whether pickled objects may be loaded.
        is_strict: Whether names that only one side has are an error.
    """

    state: Mapping[str, Any]
    ranks: Ranks
    opened: Opened
    can_pickle: bool
    is_strict: bool

    def decode(self, tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Put a value together from a tree and filled tensors."""
        return decode(tree, tensors.__getitem__, can_pickle=self.can_pickle)

    def allocate(self, name: str, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return a new tensor for a saved one; sharded and placed like ``like`` if that has its shape."""
        entry = self.opened.index.tensors[name]
        dtype = getattr(torch, entry.dtype)
        if like is not None and entry.shape and tuple(like.shape) == entry.shape:
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        return torch.empty(entry.shape, dtype=dtype)


def make_part(loading: Loading, name: str) -> Part:
    """Find the targets of one part.

    Raises:
        CheckpointError: The part is not in the checkpoint, or does not fit.
    """
    held = loading.state[name]
    value = held.value if isinstance(held, PerRank) else held
    tree = _find_tree(loading, name, held)
    if tree is None:
        return Part()
    if isinstance(value, torch.nn.Module):
        return _to_module(loading, name, unwrap(value), tree)
    if isinstance(value, torch.optim.Optimizer):
        return _to_optimizer(loading, name, value, tree)
    if is_stateful(value):
        held_tree = next(iter(tree.values()))
        targets = {one: loading.allocate(one) for one in list_tensors(held_tree)}
        return Part(targets, lambda: value.load_state_dict(loading.decode(held_tree, targets)))
    return _to_value(loading, name, held, tree)


def _find_tree(loading: Loading, name: str, held: Any) -> dict[str, Any] | None:
    index, ranks, saved_size = loading.opened.index, loading.ranks, loading.opened.manifest.world_size
    if name in index.trees:
        return dict(index.trees[name])
    owners = {rank: trees[name] for rank, trees in index.rank_trees.items() if name in trees}
    if not owners:
        raise CheckpointError(
            f"the checkpoint has no part {name!r}; it has {', '.join(sorted(loading.opened.manifest.parts))}",
            hint="name the parts as they were saved, or load(..., strict=False) to leave it as it is",
        )
    if saved_size == ranks.world_size and ranks.rank in owners:
        return dict(owners[ranks.rank])
    if isinstance(held, PerRank) and held.at_other_size == "keep":
        return None
    if isinstance(held, PerRank):
        raise CheckpointError(
            f"each of {saved_size} ranks has saved its own {name!r}, but there are {ranks.world_size} ranks now",
            hint="PerRank(..., at_other_size='keep') leaves it as it is",
        )
    raise CheckpointError(
        f"{name!r} differed between the {saved_size} ranks that saved it, but there are {ranks.world_size} ranks now",
        hint="make it equal on all ranks before it is saved, or wrap it in PerRank(..., at_other_size='keep')",
    )


# ------------------------------------------------------------------ modules


def _to_module(loading: Loading, part: str, module: torch.nn.Module, tree: Mapping[str, Any]) -> Part:
    saved = next(iter(tree.values()))
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{part!r} is a module here, but was saved as something else")
    own = module.state_dict()
    # Of a pipeline this rank has some stages; names are compared for all.
    whole: Sequence[str] = getattr(module, "whole_names", list(own))
    matched = match_names(whole, list(saved))
    _compare_names(loading, part, whole, saved, matched)
    matched = {name: found for name, found in matched.items() if name in own}
    targets, problems = {}, []
    for name, found in matched.items():
        tensor, holder = own[name], saved[found]
        if not _is_tensor(name, tensor, holder):
            targets.update({one: loading.allocate(one) for one in list_tensors(holder)})
            continue
        entry = loading.opened.index.tensors[holder["$tensor"]]
        if tuple(tensor.shape) != entry.shape:
            problems.append(f"{name} has shape {list(tensor.shape)} here and {list(entry.shape)} in the checkpoint")
        elif tensor.dtype.is_floating_point != getattr(torch, entry.dtype).is_floating_point:
            problems.append(
                f"{name} is {str(tensor.dtype).removeprefix('torch.')} here and {entry.dtype} in the checkpoint"
            )
        elif tensor.device.type == "meta":
            raise CheckpointError(
                f"{part}.{name} is on the meta device and has no memory to load into",
                hint="call model.to_empty(device=...) first",
            )
        targets[holder["$tensor"]] = tensor
    if problems:
        raise CheckpointError(
            f"{part}: {shorten(problems, '; ')}",
            hint="the model was built with other sizes than the one that was saved",
        )

    def finish() -> None:
        # Values that are no tensors, and whatever hooks the module has: load_state_dict knows. The tensors are its own.
        values = OrderedDict((name, loading.decode(saved[found], targets)) for name, found in matched.items())
        # Without the modules' versions their hooks would take it for a state of old, and convert it.
        values._metadata = getattr(own, "_metadata", {})  # type: ignore[attr-defined]
        module.load_state_dict(values, strict=False)

    return Part(targets, finish)


def _is_tensor(name: str, own: Any, saved: Any) -> bool:
    """Whether a saved value goes into a tensor that the module has; its extra state may be anything, of any size."""
    is_extra = name.rpartition(".")[2] == "_extra_state"
    return isinstance(own, torch.Tensor) and isinstance(saved, Mapping) and "$tensor" in saved and not is_extra


def _compare_names(
    loading: Loading, part: str, own: Sequence[str], saved: Mapping[str, Any], matched: Mapping[str, str]
) -> None:
    missing = [name for name in own if name not in matched]
    unknown = sorted(saved.keys() - set(matched.values()))
    if missing or unknown:
        text = [f"the checkpoint lacks {shorten(missing)}"] if missing else []
        text += [f"the model lacks {shorten(unknown)}"] if unknown else []
        if not loading.is_strict:
            if loading.ranks.rank == 0:
                warn(f"{part}: {' and '.join(text)}; these are left as they are")
            return
        raise CheckpointError(
            f"{part}: {' and '.join(text)}", hint="the model was built differently from the one that was saved"
        )


# --------------------------------------------------------------- optimizers


def _to_optimizer(loading: Loading, part: str, optimizer: torch.optim.Optimizer, tree: Mapping[str, Any]) -> Part:
    saved = tree.get("optimizer", next(iter(tree.values())))
    parameters = list_parameters(optimizer)
    is_part = find_pipeline(loading.state, optimizer)[1] is not None
    number_of = _renumber(loading, part, parameters, tree.get("names"), saved, is_part=is_part)
    targets, wanted = {}, {}
    owns = getattr(optimizer, "owns", None)  # one whose states are sharded takes its own
    for number, entry in _iterate(saved["state"]):
        if number not in number_of and is_part:
            continue  # another stage's
        if number not in number_of:
            raise CheckpointError(
                f"{part}: the checkpoint has a state for parameter {number}, and the optimizer has {len(parameters)} parameters"
            )
        if owns is not None and not owns(parameters[number_of[number]]):
            continue
        wanted[number_of[number]] = entry
        like = parameters[number_of[number]].detach()
        targets.update({name: loading.allocate(name, like) for name in list_tensors(entry)})
    _compare_options(part, optimizer, saved["param_groups"])
    targets.update({name: loading.allocate(name) for name in list_tensors(saved["param_groups"])})

    def finish() -> None:
        groups = loading.decode(saved["param_groups"], targets)
        state = {
            "state": {number: loading.decode(entry, targets) for number, entry in wanted.items()},
            "param_groups": _regroup(part, optimizer, groups, number_of),
        }
        try:
            optimizer.load_state_dict(state)
        except ValueError as error:
            raise CheckpointError(
                f"{part}: {error}", hint="build the optimizer with the same groups of parameters"
            ) from error
        # The state has brought how it runs. torch keeps the word of the constructor, by which a GradScaler leaves the
        # unscaling to a fused optimizer: one that is not fused any more stops at its first step.
        if hasattr(optimizer, _LEAVES_SCALING) and not all(group.get("fused") for group in optimizer.param_groups):
            setattr(optimizer, _LEAVES_SCALING, False)

    return Part(targets, finish)


def _renumber(
    loading: Loading,
    part: str,
    parameters: Sequence[torch.Tensor],
    saved: Sequence[str] | None,
    state: Mapping[str, Any],
    *,
    is_part: bool,
) -> dict[int, int]:
    """Say which number each saved parameter has now: by names where both sides know them, as an order may have changed."""
    num_saved = sum(len(group["params"]) for group in state["param_groups"])
    if num_saved != len(parameters) and not is_part:
        raise CheckpointError(
            f"{part}: the checkpoint's optimizer has {num_saved} parameters, this one {len(parameters)}",
            hint="the model or its frozen parameters have changed",
        )
    names = name_parameters(loading.state)
    named = [names.get(id(parameter)) for parameter in parameters]
    if is_part and saved:
        numbers = {name: number for number, name in enumerate(strip_names(saved))}
        own = strip_names([str(name) for name in named])
        strangers = sorted(set(own) - numbers.keys())
        if not strangers:
            return {numbers[name]: number for number, name in enumerate(own)}
        raise CheckpointError(f"{part}: the checkpoint's optimizer doesn't train {shorten(strangers)}")
    if not saved or not all(named):
        return {number: number for number in range(num_saved)}
    saved, own = strip_names(saved), strip_names([str(name) for name in named])
    if sorted(saved) != sorted(own):
        strangers = sorted(set(saved) ^ set(own))
        raise CheckpointError(
            f"{part}: the checkpoint's optimizer and this one train other parameters: {shorten(strangers)} only in one of them"
        )
    return {number: own.index(name) for number, name in enumerate(saved)}


def _compare_options(part: str, optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """See that it may be the same class: torch would take the saved options for its own, and miss one at the next step (KeyError: 'betas').

    A later torch adds options, and schedulers do; another class has some that this one lacks, and lacks some.
    """
    for group, own in zip(saved, optimizer.param_groups, strict=False):
        lacks = sorted(optimizer.defaults.keys() - group.keys())
        has = sorted(group.keys() - own.keys() - _SCHEDULERS)
        if lacks and has:
            raise CheckpointError(
                f"{part}: this optimizer is {type(optimizer).__name__}, with the options {', '.join(lacks)}; the checkpoint's is of another class, with "
                f"{', '.join(has)}", hint="build the optimizer that was saved, or start again in another folder, with the model's weights only",
            )  # fmt: skip


def _regroup(
    part: str, optimizer: torch.optim.Optimizer, saved: Sequence[dict[str, Any]], number_of: Mapping[int, int]
) -> list[dict[str, Any]]:
    """Put saved groups into the optimizer's own order: ``load_state_dict`` goes by place, whatever the numbers say."""
    waiting = [
        {**group, "params": sorted(number_of[one] for one in group["params"] if one in number_of)} for group in saved
    ]
    ordered, first = [], 0
    for place, group in enumerate(optimizer.param_groups):
        own = list(range(first, first + len(group["params"])))
        found = next((one for one in waiting if one["params"] == own), None)
        if found is None or len(saved) != len(optimizer.param_groups):
            sizes = [[len(one["params"]) for one in groups] for groups in (saved, optimizer.param_groups)]
            raise CheckpointError(
                f"{part}: the checkpoint's optimizer has groups of {sizes[0]} parameters, this one of {sizes[1]}, and group {place} is not in it",
                hint="build the optimizer with the same groups of parameters",
            )
        waiting.remove(found)
        ordered.append(found)
        first += len(own)
    return ordered


def _iterate(encoded: Any) -> Iterable[tuple[Any, Any]]:
    """Go over a dict as it was encoded."""
    if not isinstance(encoded, Mapping):
        return ()
    return encoded["$dict"] if encoded.keys() == {"$dict"} else encoded.items()


# ------------------------------------------------------------------- others


def _to_value(loading: Loading, name: str, held: Any, tree: Mapping[str, Any]) -> Part:
    """Plain values: tensors that the caller has are filled in place, all else takes its place in the caller's dict."""
    value = held.value if isinstance(held, PerRank) else held
    encoder = Encoder(name, can_pickle=True)
    encoder.encode(value)
    saved, targets = next(iter(tree.values())), {}
    of_rank = f"{name}@{loading.ranks.rank}"
    for tensor in list_tensors(saved):
        own = encoder.tensors.get(name + tensor[len(of_rank) :] if tensor.startswith(of_rank) else tensor)
        fits = own is not None and tuple(own.shape) == loading.opened.index.tensors[tensor].shape
        targets[tensor] = own if own is not None and fits else loading.allocate(tensor)
    if isinstance(value, torch.Tensor) and (not targets or next(iter(targets.values())).data_ptr() != value.data_ptr()):
        shapes = [list(loading.opened.index.tensors[tensor].shape) for tensor in targets]
        raise CheckpointError(
            f"{name!r} is a tensor of shape {list(value.shape)} here, and {shapes or 'none'} in the checkpoint"
        )

    def finish() -> None:
        if isinstance(value, torch.Tensor) or not isinstance(loading.state, MutableMapping):
            return
        found = loading.decode(saved, targets)
        loading.state[name] = PerRank(found, held.at_other_size) if isinstance(held, PerRank) else found

    return Part(targets, finish)
