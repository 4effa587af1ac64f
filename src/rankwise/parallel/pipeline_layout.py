"""Where a model can be cut into stages, which stage has which of its parts and parameters, and what a rank keeps of it.

What a forward calls is known from an example, else by the order in which the model holds its modules: that of most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, final

from torch import nn

from rankwise.base.errors import ModelError, UsageError
from rankwise.parallel.blocks import Blocks, find_blocks, find_units
from rankwise.parallel.names import find_owner

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: What a forward calls, in order: a part by name, or None and the parameters that the code between them uses.
Calls = list[tuple[str | None, list[str]]]


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Where a model can be cut.

    Attributes:
        blocks: Names, in the order in which they are called.
        around: The parts that stand around the blocks and have parameters, or buffers that a checkpoint has, in the
            model's order; for each how many blocks stand before it.
        owners: The modules around these parts, outermost first: the model is "".
    """

    blocks: tuple[str, ...]
    around: Mapping[str, int]
    owners: tuple[str, ...]

    @property
    def units(self) -> tuple[str, ...]:
        """All parts that are called as a whole."""
        return (*self.blocks, *self.around)

    def follow(self, calls: Calls) -> Layout:
        """Return the same with blocks, and what is around them, in the order in which a forward calls them."""
        order = list(dict.fromkeys(unit for unit, _ in calls if unit is not None))
        missing = next((one for one in self.blocks if one not in order), None)
        if missing is not None:
            raise UsageError(f"block {missing!r} is not called", hint="leave it out of blocks=, or the model")
        known = set(self.blocks)
        blocks = tuple(one for one in order if one in known)
        number = {unit: sum(one in known for one in order[:place]) for place, unit in enumerate(order)}
        around = {name: number.get(name, place) for name, place in self.around.items()}
        return replace(self, blocks=blocks, around=around)


def find_layout(model: nn.Module, blocks: Blocks = "auto", *, least: int = 2, rank: int | None = None) -> Layout:
    """Find the blocks of a model, and what stands around them by the order in which the model holds its modules.

    "auto" are, of a Sequential, its layers; of a model that repeats fewer than ``least`` parts, all that have
    parameters.
    """
    is_auto = isinstance(blocks, str) and blocks == "auto"
    if is_auto and isinstance(model, nn.Sequential):
        found = [name for name, _ in model.named_children()]
    else:
        found = list(find_blocks(model, blocks, rank=rank))
    if is_auto and len(found) < least:
        units = find_units(model)
        found = [name for name, one in units.items() if name and next(one.parameters(), None) is not None]
    if len(found) < 2:
        raise UsageError(
            f"this {type(model).__name__} has {len(found)} blocks that a pipeline could be cut between",
            rank=rank,
            hint="name them: blocks='layers.*', blocks=Block, or pass nn.Sequential(...)",
        )
    parents = {""}
    for name in found:
        steps = name.split(".")
        parents |= {".".join(steps[:depth]) for depth in range(1, len(steps))}
    owners = tuple(name for name, _ in model.named_modules() if name in parents)
    around: dict[str, int] = {}
    number = 0
    for name, module in model.named_modules():
        number += name in found
        is_outside = name and name not in parents and name not in found and name.rpartition(".")[0] in parents
        if is_outside and (next(module.parameters(), None) is not None or module.state_dict()):
            around[name] = number
    return Layout(tuple(found), around, owners)


def list_bounds(names: Sequence[str], num_stages: int, cut: Any, *, rank: int | None = None) -> list[int]:
    """Return with which block each stage begins, and at the end their number; ``cut`` is that of ``apply_pipeline``."""
    if len(names) < num_stages:
        raise UsageError(
            f"{len(names)} blocks can't be cut into {num_stages} stages",
            rank=rank,
            hint="fewer ranks on the pipeline axis, fewer stages_per_rank, or smaller blocks",
        )
    if cut is None:
        return [number * len(names) // num_stages for number in range(num_stages + 1)]
    given = list(cut)
    if given and all(isinstance(one, int) for one in given):
        bounds = [0]
        for one in given:
            bounds.append(bounds[-1] + one)
    else:
        missing = [one for one in given if one not in names]
        if missing:
            raise UsageError(
                f"cut={given}: there is no block {missing[0]!r}", rank=rank, hint=f"blocks are {', '.join(names[:8])}"
            )
        bounds = [0, *(names.index(one) for one in given), len(names)]
    is_fine = len(bounds) == num_stages + 1 and bounds[-1] == len(names) and all(a < b for a, b in pairwise(bounds))
    if not is_fine:
        raise UsageError(
            f"cut={given} does not make {num_stages} stages of {len(names)} blocks, each with one at least",
            rank=rank,
            hint=f"name the {num_stages - 1} blocks that begin a stage, in order; or how many blocks each has",
        )
    return bounds


@final
@dataclass(frozen=True, slots=True)
class Deal:
    """What each stage has.

    Attributes:
        num_stages: How many there are.
        homes: For each part the stages that call it, in order.
        holders: For each parameter, by all of its names, the stages that have it.
        names: For each of its names all of them.
    """

    num_stages: int
    homes: Mapping[str, tuple[int, ...]]
    holders: Mapping[str, tuple[int, ...]]
    names: Mapping[str, tuple[str, ...]]


def deal(model: nn.Module, layout: Layout, bounds: Sequence[int], calls: Calls | None) -> Deal:
    """Give each stage its parts and parameters; ``bounds`` says with which block each begins.

    Where it is not known what a forward calls, what a module around the parts holds itself goes to the first and the
    last stage.
    """
    last = len(bounds) - 2
    stage_of = {name: stage for stage, (begin, end) in enumerate(pairwise(bounds)) for name in layout.blocks[begin:end]}
    homes: dict[str, set[int]] = {}
    loose: dict[str, set[int]] = {}
    stage = 0
    for unit, names in calls or ():
        if unit is not None:
            stage = max(stage, stage_of.get(unit, stage))
            homes.setdefault(unit, set()).add(stage)
        for name in names:
            loose.setdefault(name, set()).add(stage)
    beside = {name: layout.blocks[max(number, 1) - 1] for name, number in layout.around.items()}
    for name in layout.units:
        homes.setdefault(name, {stage_of[beside.get(name, name)]})
    names_of: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(one), []).append(name)
    called = None if calls is None else {unit for unit, _ in calls if unit is not None}
    holders: dict[str, tuple[int, ...]] = {}
    for names in names_of.values():
        held: set[int] = set()
        for name in names:
            unit = find_owner(name, homes)
            held |= loose.get(name, set())
            if called is None or unit in called:
                held |= {0, last} if unit is None else homes[unit]
        if not held:  # no call uses it
            unit = find_owner(names[0], homes)
            held = {0} if unit is None else homes[unit]
        holders |= dict.fromkeys(names, tuple(sorted(held)))
    tied = {name: tuple(names) for names in names_of.values() for name in names}
    return Deal(last + 1, {name: tuple(sorted(one)) for name, one in homes.items()}, holders, tied)


class Kept(nn.Module):  # type: ignore[misc]
    """Stands in a pruned model for a part that other ranks have; holds the parameters of it that this rank needs as well."""

    def forward(self, *_: Any, **__: Any) -> Any:
        """Never called: the stages are."""
        raise ModelError(
            "a part of the model that another stage has was called",
            hint="pipe.step(batch), or pipe(inputs) in evaluation",
        )


def prune(model: nn.Module, layout: Layout, deal: Deal, own: Sequence[int]) -> None:
    """Drop from a model, in place, what none of this rank's stages has; the names of what stays are kept."""
    stages = set(own)
    kept = {name for name, holders in deal.holders.items() if not stages.isdisjoint(holders)}
    parts = [model.get_submodule(name) for name in layout.units if not stages.isdisjoint(deal.homes[name])]
    called = {id(one) for part in parts for one in part.parameters()}
    for name in layout.owners:
        module = model.get_submodule(name)
        module._parameters = {
            one: held
            for one, held in module._parameters.items()
            if f"{name}.{one}".removeprefix(".") in kept or held is None
        }
    for name in layout.units:
        if stages.isdisjoint(deal.homes[name]):
            part = model.get_submodule(name)
            parent, _, last = name.rpartition(".")
            made = _keep(name, part, kept, called)
            model.get_submodule(parent)._modules[last] = made


def _keep(name: str, part: nn.Module, kept: set[str], called: set[int]) -> nn.Module:
    """Return the parameters of a part that are kept, under their names; not those that a part of this rank has as well."""
    made = Kept()
    names: Mapping[str, Any] = dict(part.named_parameters(remove_duplicate=False))
    for own, one in names.items():
        if f"{name}.{own}" in kept and id(one) not in called:
            *path, last = own.split(".")
            module: nn.Module = made
            for step in path:
                module._modules.setdefault(step, nn.Module())
                module = module._modules[step]
            module.register_parameter(last, one)
    return made
