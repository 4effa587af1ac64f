"""Finds the parts of a model that are gathered, or computed again, one at a time: its repeated layers, as a rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from rankwise.base.errors import UsageError
from rankwise.parallel.names import matches

#: What a caller may say: "auto", classes, name patterns, or how many parameters a block has at least.
Blocks = Any
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_blocks(model: nn.Module, blocks: Blocks = "auto", *, rank: int | None = None) -> dict[str, nn.Module]:
    """Return the blocks of a model by name, in its order; none is inside another.

    For "auto" there are none if nothing is repeated.

    "auto" are the children of containers (ModuleList, Sequential, ModuleDict) of which at least two are of one class,
    outermost first; of a model of transformers the classes in ``_no_split_modules``. For the rest see ``apply_fsdp``.

    Raises:
        UsageError: What was asked for is not there.
    """
    if blocks == "auto":
        return _outermost(_find_repeated(model))
    if isinstance(blocks, int) and not isinstance(blocks, bool):
        if not (found := _find_large(model, blocks)):
            total = sum(one.numel() for one in model.parameters())
            what = f"no module below the model has {blocks:,} parameters"
            raise UsageError(what, rank=rank, hint=f"it has {total:,} in all")
        return found
    wanted = [blocks] if isinstance(blocks, (str, type)) else blocks
    if not (isinstance(wanted, Sequence) and wanted and all(isinstance(one, (str, type)) for one in wanted)):
        raise UsageError(
            f"blocks={blocks!r}",
            rank=rank,
            hint="'auto', classes of modules, name patterns like 'layers.*', or the least number of parameters",
        )
    chosen = set[str]()
    for one in wanted:
        matching = {name for name, module in model.named_modules() if name and _fits(module, name, one)}
        if not matching:
            kind = f"of class {one.__name__}" if isinstance(one, type) else f"named like {one!r}"
            raise UsageError(f"the model has no module {kind}", rank=rank, hint=f"it has {_list_some(model)}")
        chosen |= matching
    return _outermost({name: one for name, one in model.named_modules() if name in chosen})


def _fits(module: nn.Module, name: str, wanted: str | type) -> bool:
    return isinstance(module, wanted) if isinstance(wanted, type) else matches(wanted, name)


def _find_repeated(model: nn.Module) -> dict[str, nn.Module]:
    names = getattr(model, "_no_split_modules", None)
    if names:
        found = {name: one for name, one in model.named_modules() if type(one).__name__ in names}
        if found:
            return found
    found = {}
    for owner, module in model.named_modules():
        if not isinstance(module, _CONTAINERS):
            continue
        children = {
            f"{owner}.{name}".removeprefix("."): child
            for name, child in module.named_children()
            if next(child.parameters(), None) is not None
        }
        numbers = Counter(type(child) for child in children.values())
        found |= {name: child for name, child in children.items() if numbers[type(child)] > 1}
    return {name: one for name, one in model.named_modules() if name in found}


def _find_large(model: nn.Module, least: int) -> dict[str, nn.Module]:
    """Return each module of that size which has no smaller one of that size inside."""
    large = {
        name: one
        for name, one in model.named_modules()
        if name
        and sum(parameter.numel() for parameter in one.parameters()) >= least
        and type(one).forward is not nn.Module.forward
    }
    return {name: large[name] for name in large if not any(one.startswith(f"{name}.") for one in large)}


def _outermost(found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    # A container has no forward of its own: what is in it is called.
    called = {name: one for name, one in found.items() if not isinstance(one, (nn.ModuleList, nn.ModuleDict))}
    return {name: called[name] for name in called if not any(name.startswith(f"{one}.") for one in called)}


def _list_some(model: nn.Module) -> str:
    kinds = Counter(type(one).__name__ for name, one in model.named_modules() if name)
    names = [name for name, _ in model.named_modules() if name][:6]
    return f"{', '.join(f'{number} x {kind}' for kind, number in kinds.most_common(6))}; names like {', '.join(names)}"


def find_units(model: nn.Module, blocks: Blocks = "auto") -> dict[str, nn.Module]:
    """Return what a model can be cut between, by name, in its order; none is inside another.

    Each block, and before, between and after them each largest module that holds none. A Sequential without blocks is
    cut between its children. A model without children is one unit, named "".
    """
    found = find_blocks(model, blocks)

    def walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            path = prefix + name
            is_open = isinstance(child, _CONTAINERS) and any(child.children())
            if path not in found and (is_open or any(one.startswith(f"{path}.") for one in found)):
                yield from walk(f"{path}.", child)
            else:
                yield path, child

    return dict(walk("", model)) or {"": model}
