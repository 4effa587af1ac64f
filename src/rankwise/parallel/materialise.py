"""Gives a model that was built on the meta device its values, module by module, so that no rank holds all of it."""

from __future__ import annotations

from operator import methodcaller
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from rankwise.base.errors import ModelError
from rankwise.parallel.names import quote
from rankwise.runtime.rng import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@final
class Materialiser:
    """Makes tensors for those on the meta device, initialises them, and sees that none was forgotten.

    Each module is seeded by its name: the values are the same at any number of ranks, and on every rank.

    Args:
        model: The whole model, for what it says of itself.
        device: Where the values go.
        init: As ``init_weights`` of ``apply_fsdp``. False: until a checkpoint is loaded every weight is NaN. None:
            ``reset_parameters()`` of the module, or of a model of transformers its ``_init_weights``.
        seed: The job's.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        init: Callable[[nn.Module], Any] | bool | None,  # noqa: FBT001 - apply_fsdp's own
        seed: int,
    ) -> None:
        self._device, self._init, self._seed = device, init, seed
        self._foreign = getattr(model, "_init_weights", None)
        self._made: dict[int, Any] = {}  # tied parameters stay tied
        self._kept: list[Tensor] = []  # an id is good as long as its tensor

    def find_complaint(self, model: nn.Module) -> str | None:
        """Say which modules nobody can initialise; None if there are none."""
        if callable(self._init):
            return None
        found = [
            (type(module).__name__, [f"{name}.{own}".removeprefix(".") for own in wanted])
            for name, module in model.named_modules()
            if (wanted := self._find_wanted(module)) and self._find_own(module) is None
        ]
        if not found:
            return None
        kinds = ", ".join(dict.fromkeys(kind for kind, _ in found))
        names = [one for _, wanted in found for one in wanted]
        return (
            f"on the meta device, and nothing initialises {quote(names)}: give {kinds} a reset_parameters()"
            " that fills what it holds itself; or init_weights=function, which is called with each module; or"
            " init_weights=False if a checkpoint will be loaded"
        )

    def fill(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Give values to the tensors that these modules hold themselves.

        Raises:
            ModelError: A parameter or buffer was not initialised; names it.
        """
        for name, module in modules:
            wanted = self._find_wanted(module)
            for own, tensor in _list_meta(module):
                self._replace(module, own, tensor)
            if wanted:
                self._initialise(name, module, wanted)

    def _find_wanted(self, module: nn.Module) -> list[str]:
        """Return the names of what only an initialisation gives: if a checkpoint will be loaded, the buffers that none has."""
        names = [name for name, _ in _list_meta(module)]
        if self._init is not False:
            return names
        return [name for name in names if name in module._non_persistent_buffers_set]

    def _find_own(self, module: nn.Module) -> Callable[[nn.Module], Any] | None:
        """Return how a module is initialised if the user does not say."""
        if self._foreign is not None:
            return self._foreign  # type: ignore[no-any-return]
        for name in ("reset_parameters", "_reset_parameters"):  # the second: nn.MultiheadAttention
            if callable(getattr(type(module), name, None)):
                return methodcaller(name)
        return None

    def _replace(self, module: nn.Module, own: str, tensor: Tensor) -> None:
        made = self._made.get(id(tensor))
        if made is None:
            made = torch.empty_like(tensor, device=self._device)
            made.fill_(_find_mark(made.dtype))
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            self._made[id(tensor)] = made
            self._kept.append(tensor)
        held = module._parameters if own in module._parameters else module._buffers
        held[own] = made

    def _initialise(self, name: str, module: nn.Module, names: list[str]) -> None:
        devices = [] if self._device.type == "cpu" else [self._device]
        with torch.random.fork_rng(devices, device_type=self._device.type), torch.no_grad():
            torch.manual_seed(derive_seed(self._seed, "weights", name))
            initialise = self._init if callable(self._init) else self._find_own(module)
            assert initialise is not None  # noqa: S101 - find_complaint has looked
            initialise(module)
        left = [own for own in names if _is_marked(getattr(module, own))]
        if left:
            full = ", ".join(repr(f"{name}.{own}".removeprefix(".")) for own in left)
            raise ModelError(
                f"{full} of a {type(module).__name__} was built on the meta device, and its initialisation left values unset",
                hint="a buffer that __init__ computes is lost there: compute it in reset_parameters() too, or in init_weights; or build this model on the CPU",
            )


def _list_meta(module: nn.Module) -> list[tuple[str, Tensor]]:
    held = [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]
    return [(name, one) for name, one in held if one.is_meta]


def _find_mark(dtype: torch.dtype) -> Any:
    """Return a value that no initialisation leaves everywhere."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def _is_marked(tensor: Tensor) -> bool:
    if not tensor.numel():
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().any())
    return bool((tensor == _find_mark(tensor.dtype)).all()) and tensor.dtype is not torch.bool
