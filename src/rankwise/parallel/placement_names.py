"""Read which part of a model goes to which device: names, ranges of numbers, and patterns; every parameter and buffer exactly once."""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rankwise.base.errors import UsageError
from rankwise.parallel.names import find_owner, list_owners, matches, quote

if TYPE_CHECKING:
    from collections.abc import Mapping


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
        raise UsageError(f"device {wanted!r}: {str(error).splitlines()[0]}", hint="a number, 'cpu', 'cuda:1', or a torch.device") from None  # fmt: skip
    if device.type in {"cpu", "meta"}:
        return torch.device(device.type)
    count = torch.accelerator.device_count() if accelerator is not None and accelerator.type == device.type else 0  # fmt: skip
    index = torch.accelerator.current_device_index() if device.index is None and count else device.index or 0
    if not 0 <= index < count:
        raise UsageError(f"device {wanted!r} was requested, but torch {torch.__version__} finds {count} devices of type {device.type!r} here", hint="'cpu', or a number below that")  # fmt: skip
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
                raise UsageError(f"pattern {pattern!r}: the model has no module, parameter or buffer named like {one!r}", hint=f"it has {', '.join(repr(name) for name in list(names)[1 : 1 + _MOST_NAMED])} ...")  # fmt: skip
            for name in matching:
                if name in found:
                    raise UsageError(f"{name or 'the model'!r} is placed twice, by {found[name][0]!r} and by {pattern!r}", hint="each part needs one pattern")  # fmt: skip
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
            raise UsageError(f"{name!r} is placed twice: by {text}", hint="leave one of them out, or name the parts of the larger one")  # fmt: skip
        pattern, device = found[owners[0]]
        other, its_pattern, its_device = first.setdefault(id(tensor), (name, pattern, device))
        if its_device != device:
            raise UsageError(f"{other!r} (on {its_device} by {its_pattern!r}) and {name!r} (on {device} by {pattern!r}) are one tensor, tied", hint="place both on one device: inputs are moved to it")  # fmt: skip
    if unplaced:
        raise UsageError(f"no pattern places {quote(unplaced, _MOST_NAMED)}", hint=f"the patterns are {', '.join(map(repr, dict.fromkeys(pattern for pattern, _ in found.values())))}")  # fmt: skip


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
