"""What each device must hold of a placed model, what it has, and the cut that fits."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rankwise.base.errors import ModelError
from rankwise.parallel.names import find_owner, list_owners
from rankwise.parallel.partition import balance, list_parts
from rankwise.parallel.placement_hooks import Need
from rankwise.parallel.placement_names import find_device

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from rankwise.parallel.costs import UnitCost

_MEMINFO, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
#: Of what is free, this part is left so: the allocator's pieces that fit nothing, and workspaces.
_RESERVE_PART = 0.05


def measure_free(model: nn.Module, device: torch.device) -> int | None:
    """Return the bytes that a device has for a model, with those that the model holds there already; None if unknown or without a bound."""
    if device.type == "meta":
        return None
    free = _read_host_memory() if device.type == "cpu" else _read_device_memory(device)
    if free is None:
        return None
    held: dict[int, int] = {
        id(one): one.nbytes for one in (*model.parameters(), *model.buffers()) if one.device == device
    }
    return int(free * (1 - _RESERVE_PART)) + sum(held.values())


def _read_host_memory() -> int | None:
    """Return what the host has, or the control group of this container if that is less."""
    try:
        rows = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None  # not Linux
    try:
        room = int((_GROUP / "memory.max").read_text()) - int((_GROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free  # no group, or no bound: "max"
    return max(0, min(free, room))


def _read_device_memory(device: torch.device) -> int | None:
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    # What the allocator has taken and not given out is free for us, too.
    return int(
        module.mem_get_info(device)[0] + module.memory_reserved(device) - module.memory_allocated(device)
    )


def sum_needs(
    costs: Sequence[UnitCost], devices: Mapping[str, torch.device], free: Mapping[torch.device, int | None]
) -> dict[torch.device, Need]:
    """Return what each device will hold."""
    needs = {device: Need(free=size) for device, size in free.items()}
    last = next(iter(needs))
    for one in costs:
        # A unit whose parts lie on several devices counts for that of its first tensor; one without tensors works where its inputs are.
        last = find_device(one.tensors[0] if one.tensors else one.name, devices, default=last)
        needs[last] = needs[last].add(one.memory)
    return needs


def check_needs(needs: Mapping[torch.device, Need], optimizer: Any) -> None:
    """Refuse a placement that does not fit."""
    if all(need.fits for need in needs.values()):
        return
    text = "; ".join(f"{device} needs {need}{'' if need.fits else ', TOO MUCH'}" for device, need in needs.items())  # fmt: skip
    what = "" if optimizer is None else f" with {optimizer!r}" if isinstance(optimizer, str) else " with this optimizer"  # fmt: skip
    raise ModelError(
        f"the model does not fit where it would be placed: {text}",
        hint=f"counted{what}; place less there, pass optimizer='sgd' or another if that is what you train with, or None for a model that is not trained",
    )


def cut_model(
    model: nn.Module,
    how: str,
    costs_of: Mapping[str, Sequence[UnitCost]],
    free: Mapping[torch.device, int | None],
) -> dict[str, torch.device]:
    """Return the device of each unit, and of each tensor outside of units; devices in the order of the cut, with what they have free."""
    rows = [_merge_tied(model, costs_of[device.type]) for device in free]
    first = rows[0]
    sizes = [sum(one.memory.total for one in group) for group in first]
    times = [[sum(one.time for one in group) for group in row] for row in rows]
    begins = balance(
        sizes if how == "balanced" else times,
        len(free),
        [inf if size is None else size for size in free.values()],
        sizes=sizes,
        names=[str(one) for one in free],
        may_be_empty=True,
        # Devices of one process work one after the other: between equal ones time is spread, a slower one is used if it must be.
        total=how == "auto" and len(costs_of) > 1,
    )
    where = {one.name: device for device, units in zip(free, list_parts(begins, len(first)), strict=True)
             for unit in units for one in first[unit]}  # fmt: skip
    owners = _find_owners(model, costs_of[next(iter(free)).type])
    return where | {name: where[owned[0]] for name, owned in owners.items() if find_owner(name, where) is None}  # fmt: skip


def _find_owners(model: nn.Module, costs: Sequence[UnitCost]) -> dict[str, list[str]]:
    """Return the units that hold the tensor of each name, under any of its names; first the one that it is counted for."""
    names = {one.name for one in costs}
    counted = {tensor: one.name for one in costs for tensor in one.tensors}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    units: dict[int, dict[str, None]] = {}
    for name, one in sorted(tensors, key=lambda pair: pair[0] not in counted):
        inside = (owner for owner in list_owners(name) if owner in names)
        units.setdefault(id(one), {}).update(dict.fromkeys([*([counted[name]] if name in counted else []), *inside]))  # fmt: skip
    return {name: list(units[id(one)]) for name, one in tensors}


def _merge_tied(model: nn.Module, costs: Sequence[UnitCost]) -> list[list[UnitCost]]:
    """Return the units in groups, in the order of their calls: those that share a tensor together, at the place of the first."""
    root = {one.name: one.name for one in costs}

    def find(name: str) -> str:
        while root[name] != name:
            name = root[name]
        return name

    place = {one.name: number for number, one in enumerate(costs)}
    for owned in _find_owners(model, costs).values():
        first, *rest = sorted({find(one) for one in owned}, key=place.__getitem__)
        root |= dict.fromkeys(rest, first)
    groups: dict[str, list[UnitCost]] = {}
    for one in costs:
        groups.setdefault(find(one.name), []).append(one)
    return list(groups.values())
