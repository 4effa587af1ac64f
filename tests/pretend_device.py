"""A second device on a host that has none: "pretend:0", whose tensors lie apart from the CPU's and are computed there.

torch itself refuses what mixes the two, as it does with a GPU, so a value that nobody has moved is an error. To torch it is an accelerator
of this process, which can't be taken back: only for ranks of tests, which end.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

NAME = "pretend"
aten = torch.ops.aten

needs_pretend = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason=f"torch {torch.__version__} has no backends written in Python",
)


class PretendTensor(Tensor):
    """A tensor on the device, around one of the CPU."""

    raw: Tensor

    @staticmethod
    def __new__(cls: Any, raw: Tensor, device: torch.device) -> PretendTensor:
        made = Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=device,
        )  # fmt: skip
        made.raw = raw
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.raw!r} on {self.device}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices: set[torch.device] = set()

        def unwrap(one: Any) -> Any:
            if isinstance(one, Tensor) and (one.dim() or isinstance(one, PretendTensor)):
                devices.add(one.device)
            return one.raw if isinstance(one, PretendTensor) else one

        plain, options = tree_map(unwrap, (args, kwargs or {}))
        device = options.pop("device", None)
        is_copy = func in {aten._to_copy.default, aten.copy_.default}
        if len(devices) > 1 and not is_copy:
            raise RuntimeError(f"{func}: tensors on {' and '.join(sorted(map(str, devices)))}")
        result = func(*plain, **options)
        if func._schema.name.endswith("_"):
            return args[0]
        home = device or next(one for one in devices if one.type == NAME)
        if home.type != NAME:
            return result
        return tree_map(lambda one: PretendTensor(one, home) if isinstance(one, Tensor) else one, result)


class _Device:
    """What torch asks of an accelerator's module; the device is as fast as the CPU, and never ahead of it."""

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16]

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Its random numbers are the CPU's."""

    @staticmethod
    def get_rng_state(_: Any) -> Tensor:
        return torch.zeros(0)

    @staticmethod
    def set_rng_state(state: Tensor, _: Any) -> None:
        """See manual_seed_all."""


def install() -> None:
    """Add the device to this process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Device())
    torch.accelerator.synchronize = lambda _=None: None

    def make_strided(size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Tensor:  # fmt: skip
        return PretendTensor(torch.empty_strided(size, stride, dtype=dtype), device)

    def make(size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None, memory_format: Any = None) -> Tensor:  # fmt: skip
        return PretendTensor(torch.empty(size, dtype=dtype), device)

    torch.library.impl("aten::empty_strided", "privateuseone")(make_strided)
    torch.library.impl("aten::empty.memory_format", "privateuseone")(make)
