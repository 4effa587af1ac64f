"""Put a model's layers on several devices of one process: by names, or where they fit and take equally long.

The devices work one after the other on one batch; to let them work at once, cut the model into the stages of a pipeline instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from rankwise.base.errors import ModelError, UsageError
from rankwise.parallel.costs import UnitCost, measure_costs
from rankwise.parallel.materialise import Materialiser
from rankwise.parallel.memory import parse_size
from rankwise.parallel.names import find_owner, list_owners, matches, quote
from rankwise.parallel.partition import balance, list_parts
from rankwise.parallel.placement_hooks import Need, Placement, attach
from rankwise.runtime.context import find_current

if TYPE_CHECKING:
    from rankwise.parallel.blocks import Blocks
    from rankwise.parallel.plan_measure import OptimizerFactory


_MEMINFO, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
#: Of what is free, this part is left so: the allocator's pieces that fit nothing, and workspaces.
_RESERVE_PART = 0.05


def place(  # noqa: PLR0913 - most calls give two
    model: nn.Module,
    where: Mapping[str, Device] | Literal["auto", "balanced"],
    *,
    example: Any = None,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    devices: Sequence[Device] | None = None,
    memory: Mapping[Device, str | int] | None = None,
    optimizer: str | OptimizerFactory | None = "adamw",
    outputs: Literal["inputs", "last"] | Device = "inputs",
    blocks: Blocks = "auto",
    init_weights: Callable[[nn.Module], Any] | bool | None = None,
    seed: int = 0,
) -> nn.Module:
    """Put the parts of a model on several devices of this process, and let hooks move tensors between them.

    ``place(model, {"embed": 0, "blocks.0-11": 0, "blocks.12-23": 1, "head": 1})``. Names and the state dict stay, so a
    checkpoint goes from any placement to any other. Before the optimizer, and after ``apply_checkpointing``;
    ``apply_ddp`` may follow, with the devices of each process its own. What a module computes between its parts must
    find them on one device: place what is added up together.

    Args:
        model: Changed in place: on any device, also on the meta device: then each part gets its values on its own
            device.
        where: From patterns of names to devices: a number is that GPU. A pattern is the name of a module, parameter or
            buffer, ``blocks.0-11`` twelve of them, ``*`` any part of a name up to the next dot, and ``**`` any number
            of parts. Or "balanced": consecutive parts of equal bytes. Or "auto": within each device's memory, parts
            that take equally long, forward and backward, on the example; where devices differ in kind ("cpu" beside
            GPUs), those that take the least time together.
        example: A batch as the model is called with. Its activations are then counted, too; "auto" needs it.
        loss: From model and example to the loss, if the model is not called with the example itself.
        devices: For "auto" and "balanced", in the order of the layers; None: all GPUs of this rank, or the CPU.
        memory: What of a device may be used, ``{0: "20GB", "cpu": "64GB"}``; else what is free, less a twentieth.
        optimizer: Whose states are counted, beside gradients: a name, or what makes one of parameters. None: the model
            is not trained.
        outputs: "inputs": the outputs go where the first input tensor was; "last": they stay on the device that made
            them; or a device.
        blocks: What is not cut; as for ``apply_fsdp``.
        init_weights: For a model on the meta device, as for ``apply_fsdp``; False: a checkpoint will be loaded.
        seed: For that.

    Returns:
        The model.

    Raises:
        UsageError: A pattern matches nothing; a parameter or buffer is placed twice or not at all; tied ones are placed
            apart; there is no such device.
        ModelError: It does not fit: with what every device needs and has. Or the example can't be run.
    """
    if isinstance(where, str) and where not in {"auto", "balanced"}:
        raise UsageError(
            f"where={where!r}",
            hint="'auto', 'balanced', or {'embed': 0, 'blocks.0-11': 0, 'blocks.12-23': 1, 'head': 1}",
        )
    if where == "auto" and example is None:
        raise UsageError(
            "place(model, 'auto') without an example, but time is measured on one",
            hint="place(model, 'auto', example=batch), or 'balanced', which goes by bytes",
        )
    goal = outputs if isinstance(outputs, str) and outputs in {"inputs", "last"} else read_device(outputs)
    if isinstance(where, Mapping):
        found = read_names(model, where)
        chosen = list(dict.fromkeys(found.values()))
    else:
        chosen = list(dict.fromkeys(read_device(one) for one in (devices or _list_devices())))
        found = {}
    bounds = {read_device(one): parse_size(size) for one, size in (memory or {}).items()}
    free = {one: bounds.get(one, _measure_free(model, one)) for one in chosen}
    costs_of = _measure(model, where, chosen, example=example, loss=loss, blocks=blocks, optimizer=optimizer)
    costs = costs_of[chosen[0].type]
    if isinstance(where, str):
        found = read_names(model, _cut_model(model, where, costs_of, free))
    needs = _sum_needs(costs, found, free)
    _check_needs(needs, optimizer)
    complaint = Materialiser(model, chosen[0], init_weights, seed).find_complaint(model)
    if complaint is not None:
        raise ModelError(complaint)
    _move(model, found, init_weights, seed)
    attach(model, Placement(devices=found, needs=needs), goal)
    return model


def _list_devices() -> list[Device]:
    """Return the GPUs of this rank: of its host's, an equal share for each rank there."""
    if not torch.accelerator.is_available():
        return ["cpu"]
    ctx, count = find_current(), torch.accelerator.device_count()
    if ctx is None:
        return list(range(count))
    share = max(1, count // ctx.local_world_size)
    return [one % count for one in range(ctx.local_rank * share, (ctx.local_rank + 1) * share)]


def _measure(
    model: nn.Module,
    where: Any,
    devices: Sequence[torch.device],
    *,
    example: Any,
    optimizer: Any,
    **options: Any,
) -> dict[str, list[UnitCost]]:
    """Return the costs of all units on each type of device; only "auto" needs to know the time on each."""
    kinds = {one.type: one for one in reversed(devices)}
    is_meta = any(one.is_meta for one in (*model.parameters(), *model.buffers()))
    if where == "auto" and is_meta and len(kinds) > 1:
        raise UsageError(
            f"place(model, 'auto') of a model on the meta device over {' and '.join(kinds)}: how much slower one is can't be measured there",
            hint="build the model on the CPU, or restrict devices=... to one kind",
        )
    if where != "auto":
        costs = measure_costs(model, example, optimizer=optimizer, repeats=0, **options)
        return dict.fromkeys(kinds, costs)
    return {
        kind: measure_costs(model, example, optimizer=optimizer, device=None if is_meta else one, **options)
        for kind, one in kinds.items()
    }


def _move(model: nn.Module, found: Mapping[str, torch.device], init_weights: Any, seed: int) -> None:
    """Put every parameter and buffer on its device; one on the meta device gets its values there."""
    makers: dict[torch.device, Materialiser] = {}
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # an id is good as long as its tensor
    for name, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for own, one in held.items():
                if one is None:
                    continue
                device = find_device(f"{name}.{own}".removeprefix("."), found, one.device)
                if one.is_meta and device.type != "meta":
                    makers.setdefault(device, Materialiser(model, device, init_weights, seed))
                elif id(one) in moved:
                    held[own] = moved[id(one)][1]
                else:
                    held[own] = _bring(one, device)
                    moved[id(one)] = one, held[own]
    for device, maker in makers.items():
        maker.fill((name, one) for name, one in model.named_modules() if _goes_to(name, one, found, device))


def _goes_to(name: str, module: nn.Module, found: Mapping[str, torch.device], device: torch.device) -> bool:
    own = [*module._parameters, *module._buffers]
    return bool(own) and find_device(f"{name}.{own[0]}".removeprefix("."), found, device) == device


def _bring(one: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; the same object, where torch can change it in place: an optimizer may hold it."""
    if one.device == device:
        return one
    with torch.no_grad():
        there = one.to(device)
        if torch._has_compatible_shallow_copy_type(one, there):
            one.data = there
            if one.grad is not None:
                one.grad.data = one.grad.to(device)
            return one
    return nn.Parameter(there, one.requires_grad) if isinstance(one, nn.Parameter) else there


# ------------------------------------------------------------------ memory, and the cut that fits


def _measure_free(model: nn.Module, device: torch.device) -> int | None:
    """Return the bytes that a device has for a model, with those that the model holds there already; None if unknown or without a bound."""
    if device.type == "meta":
        return None
    free = _read_host_memory() if device.type == "cpu" else _read_device_memory(device)
    if free is None:
        return None
    tensors = {id(one): one for one in (*model.parameters(), *model.buffers())}
    held: int = sum(one.nbytes for one in tensors.values() if one.device == device)
    return int(free * (1 - _RESERVE_PART)) + held


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
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + unused)


def _sum_needs(
    costs: Sequence[UnitCost], devices: Mapping[str, torch.device], free: Mapping[torch.device, int | None]
) -> dict[torch.device, Need]:
    """Return what each device will hold."""
    needs = {device: Need(free=size) for device, size in free.items()}
    last = next(iter(needs))
    for one in costs:
        # A unit whose parts lie on several devices counts for that of its first tensor; one without tensors works where
        # its inputs are.
        last = find_device(one.tensors[0] if one.tensors else one.name, devices, default=last)
        needs[last] = needs[last].add(one.memory)
    return needs


def _check_needs(needs: Mapping[torch.device, Need], optimizer: Any) -> None:
    """Refuse a placement that does not fit."""
    if all(need.fits for need in needs.values()):
        return
    text = "; ".join(f"{device} needs {need}{'' if need.fits else ', TOO MUCH'}" for device, need in needs.items())
    what = "" if optimizer is None else f" with {optimizer!r}" if isinstance(optimizer, str) else " with this optimizer"
    raise ModelError(
        f"the model does not fit where it would be placed: {text}",
        hint=f"counted{what}; place less there, pass optimizer='sgd' or another if that is what you train with, or None for a model that is not trained",
    )


def _cut_model(
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
        # Devices of one process work one after the other: between equal ones time is spread, a slower one is used if it
        # must be.
        total=how == "auto" and len(costs_of) > 1,
    )
    where = {
        one.name: device
        for device, units in zip(free, list_parts(begins, len(first)), strict=True)
        for unit in units
        for one in first[unit]
    }
    owners = _find_owners(model, costs_of[next(iter(free)).type])
    return where | {name: where[owned[0]] for name, owned in owners.items() if find_owner(name, where) is None}


def _find_owners(model: nn.Module, costs: Sequence[UnitCost]) -> dict[str, list[str]]:
    """Return the units that hold the tensor of each name, under any of its names; first the one that it is counted for."""
    names = {one.name for one in costs}
    counted = {tensor: one.name for one in costs for tensor in one.tensors}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    units: dict[int, dict[str, None]] = {}
    for name, one in sorted(tensors, key=lambda pair: pair[0] not in counted):
        inside = (owner for owner in list_owners(name) if owner in names)
        units.setdefault(id(one), {}).update(dict.fromkeys([*([counted[name]] if name in counted else []), *inside]))
    return {name: list(units[id(one)]) for name, one in tensors}


def _merge_tied(model: nn.Module, costs: Sequence[UnitCost]) -> list[list[UnitCost]]:
    """Return the units in groups, in the order of their calls: those that share a tensor together, at the place of the first."""
    groups = [[one] for one in costs]
    for owned in _find_owners(model, costs).values():
        tied = [group for group in groups if any(one.name in owned for one in group)] if owned[1:] else []
        for group in tied[1:]:
            tied[0].extend(group)
            groups.remove(group)
    return groups


# ---------------- which part goes where: names, ranges of numbers, and patterns; every parameter and buffer exactly
# once


#: What a caller may say: a number of an accelerator, "cpu", "cuda:1", or torch.device.
Device = Any
_RANGE = re.compile(r"(\d+)-(\d+)")
_MOST_NAMED = 4


def read_device(wanted: Device) -> torch.device:
    """Return a device that is here, with its index if it is no CPU; a number is that accelerator of this host."""
    accelerator = torch.accelerator.current_accelerator()
    try:
        if isinstance(wanted, int) and not isinstance(wanted, bool):
            device = torch.device("cuda" if accelerator is None else accelerator.type, wanted)
        else:
            device = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"device {wanted!r}: {str(error).splitlines()[0]}", hint="a number, 'cpu', 'cuda:1', or a torch.device"
        ) from None
    if device.type in {"cpu", "meta"}:
        return torch.device(device.type)
    count = torch.accelerator.device_count() if accelerator is not None and accelerator.type == device.type else 0
    index = torch.accelerator.current_device_index() if device.index is None and count else device.index or 0
    if not 0 <= index < count:
        raise UsageError(
            f"device {wanted!r} was requested, but torch {torch.__version__} finds {count} devices of type {device.type!r} here",
            hint="'cpu', or a number below that",
        )
    return torch.device(device.type, index)


def read_names(model: nn.Module, where: Mapping[str, Device]) -> dict[str, torch.device]:
    """Return the device of each module, parameter or buffer that a pattern of ``place`` names; what lies in a named module is not listed."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = dict.fromkeys([*dict(model.named_modules(remove_duplicate=False)), *dict(tensors)])
    found: dict[str, tuple[str, torch.device]] = {}
    for pattern, wanted in where.items():
        device = read_device(wanted)
        for one in _expand(pattern):
            matching = [name for name in names if matches(one, name) and bool(name) == bool(one)]
            if not matching:
                raise UsageError(
                    f"pattern {pattern!r}: the model has no module, parameter or buffer named like {one!r}",
                    hint=f"it has {', '.join(repr(name) for name in list(names)[1 : 1 + _MOST_NAMED])} ...",
                )
            for name in matching:
                if name in found:
                    raise UsageError(
                        f"{name or 'the model'!r} is placed twice, by {found[name][0]!r} and by {pattern!r}",
                        hint="each part needs one pattern",
                    )
                found[name] = pattern, device
    _check_all(tensors, found)
    return {name: device for name, (_, device) in found.items()}


def _check_all(tensors: list[tuple[str, Tensor]], found: Mapping[str, tuple[str, torch.device]]) -> None:
    """See that every parameter and buffer is placed once, and what is tied on one device."""
    unplaced: list[str] = []
    first: dict[int, tuple[str, str, torch.device]] = {}
    for name, tensor in tensors:
        owners = [owner for owner in list_owners(name) if owner in found]
        if not owners:
            unplaced.append(name)
            continue
        if len(owners) > 1:
            text = " and by ".join(f"{found[one][0]!r}, which names {one or 'the model'!r}" for one in owners)
            raise UsageError(
                f"{name!r} is placed twice: by {text}",
                hint="leave one of them out, or name the parts of the larger one",
            )
        pattern, device = found[owners[0]]
        other, its_pattern, its_device = first.setdefault(id(tensor), (name, pattern, device))
        if its_device != device:
            raise UsageError(
                f"{other!r} (on {its_device} by {its_pattern!r}) and {name!r} (on {device} by {pattern!r}) are one tensor, tied",
                hint="place both on one device: inputs are moved to it",
            )
    if unplaced:
        raise UsageError(
            f"no pattern places {quote(unplaced, _MOST_NAMED)}",
            hint=f"the patterns are {', '.join(map(repr, dict.fromkeys(pattern for pattern, _ in found.values())))}",
        )


def find_device(name: str, devices: Mapping[str, torch.device], default: torch.device) -> torch.device:
    """Return where a part goes: by its own name, or that of a module around it."""
    owner = find_owner(name, devices)
    return default if owner is None else devices[owner]


def _expand(pattern: str) -> list[str]:
    """Return a pattern for each number of each range, so that one that is missing is found."""
    choices: list[list[str]] = []
    for part in pattern.split("."):
        numbers = _RANGE.fullmatch(part)
        if numbers is None:
            choices.append([part])
            continue
        low, high = int(numbers[1]), int(numbers[2])
        if low > high:
            raise UsageError(f"pattern {pattern!r}: the range {part} is empty", hint=f"write {high}-{low}")
        choices.append([str(one) for one in range(low, high + 1)])
    return [".".join(parts) for parts in product(*choices)]
