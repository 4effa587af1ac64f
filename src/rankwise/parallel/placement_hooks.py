"""A model whose layers lie on several devices: what moves its inputs and outputs, and where everything is.

Values on their way into a module are moved by hooks, and those that meet in a function between modules by a mode of torch functions:
parameters stay where they are, and autograd's own copies bring the gradients back.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rankwise.parallel.memory import Memory, show_size
from rankwise.parallel.trees import list_tensors, map_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Need(Memory):
    """What a device holds in training, in bytes, and what it has.

    Attributes:
        free: What was free for it before the model was placed; None if unknown or without a bound.
    """

    free: int | None = None

    @property
    def fits(self) -> bool:
        """Whether it is not more than what is free."""
        return self.free is None or self.total <= self.free

    def __str__(self) -> str:
        parts = [
            f"{name} {show_size(getattr(self, name))}"
            for name in ("parameters", "buffers", "gradients", "optimizer", "activations")
            if getattr(self, name)
        ]
        free = "" if self.free is None else f" of {show_size(self.free)} free"
        return f"{show_size(self.total)}{free}" + (f" ({', '.join(parts)})" if parts else "")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a model's parts are; ``print`` it.

    Attributes:
        devices: Of each placed module, parameter and buffer, by name.
        needs: What each device holds in training.
    """

    devices: Mapping[str, torch.device]
    needs: Mapping[torch.device, Need]

    def __str__(self) -> str:
        rows = []
        for device, need in self.needs.items():
            names = [name or "the model" for name, one in self.devices.items() if one == device]
            rows.append(f"{device}: {', '.join(names) or 'nothing'}; needs {need}{'' if need.fits else ', too much'}")
        return "\n".join(rows)


def placement_of(model: nn.Module) -> Placement | None:
    """Return where the parts of a model are, and what each device must hold.

    Args:
        model: Any; without the wrapper that ``apply_ddp`` has put around it.

    Returns:
        The placement, to be printed; None if ``place`` was not called with this model.
    """
    hook = _find_hook(model)
    return None if hook is None else hook.placement


def attach(model: nn.Module, placement: Placement, outputs: str | torch.device) -> None:
    """Let hooks bring each placed module's inputs to its device, and the model's outputs to where ``place`` was asked to; those of an earlier placement are removed."""
    old = _find_hook(model)
    if old is not None:
        for handle in old.handles:
            handle.remove()
    moves = _Moves()
    hooks = _ModelHooks(moves, outputs, placement)
    # Before all others, so that it sees the inputs as the caller gave them.
    hooks.handles.append(model.register_forward_pre_hook(hooks.begin, with_kwargs=True, prepend=True))
    known = dict(model.named_modules(remove_duplicate=False))
    hooked: set[int] = set()
    for name, device in placement.devices.items():
        for module in _list_called(known[name]) if name in known else ():
            if id(module) not in hooked:
                hooked.add(id(module))
                hooks.handles.append(module.register_forward_pre_hook(_InputMover(moves, device), with_kwargs=True))
    hooks.handles.append(model.register_forward_hook(hooks.end, with_kwargs=True, always_call=True))


def _find_hook(model: nn.Module) -> _ModelHooks | None:
    hooks = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return next((one for one in hooks if isinstance(one, _ModelHooks)), None)


def _list_called(module: nn.Module) -> list[nn.Module]:
    """Return the module itself, or of a container, which nobody calls, its children."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [one for child in module.children() for one in _list_called(child)]
    return [module]


@final
@dataclass(slots=True)
class _Moves:
    """Moves tensors; a mask that every layer gets is copied to a device once in a forward, and not for each layer.

    Attributes:
        depth: How many forwards of the model are under way: copies are kept for no longer.
        last: The device of the placed module that was called last.
        copies: By tensor and device: the tensor, so that its id stays its own, its version, and the copy.
    """

    depth: int = 0
    last: torch.device | None = None
    copies: dict[tuple[int, torch.device], tuple[Tensor, int, Tensor]] = field(default_factory=dict)

    def move(self, tree: Any, device: torch.device) -> Any:
        """Return nested containers with all tensors on a device; the very same if they are there."""
        if all(one.device == device for one in list_tensors(tree)):
            return tree
        return map_tensors(tree, lambda one: self._bring(one, device))

    def _bring(self, one: Tensor, device: torch.device) -> Tensor:
        if one.device == device:
            return one
        # What needs gradients is handed from layer to layer, and would be held for nothing; so would all, in
        # evaluation.
        is_kept = self.depth > 0 and torch.is_grad_enabled() and not one.requires_grad and not one.is_inference()
        if is_kept:
            known = self.copies.get((id(one), device))
            if known is not None and known[1] == one._version:
                return known[2]
        # To the CPU a copy that is not waited for would be read before it is complete.
        copy = one.to(device, non_blocking=device.type != "cpu")
        if is_kept:
            self.copies[id(one), device] = one, one._version, copy
        return copy


@final
@dataclass(slots=True)
class _InputMover:
    """The hook of a placed module: brings its inputs."""

    moves: _Moves
    device: torch.device

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        self.moves.last = self.device
        return self.moves.move((args, kwargs), self.device)


@final
class _OperandMover(TorchFunctionMode):  # type: ignore[misc]
    """Lets tensors of several devices meet in a function between modules: a residual over a cut, a mask, a tied weight, a loss.

    torch refuses such a call before it computes anything; it is made again where it belongs: at the parameter among its
    arguments, at what it writes into, or on the device of the module that was called last.
    """

    def __init__(self, moves: _Moves) -> None:
        super().__init__()
        self._moves, self.was_needed = moves, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            leaves = list_tensors((args, kwargs))
            if len({one.device for one in leaves if one.dim()}) < 2:
                raise
            self.was_needed = True
            moved_args, moved_kwargs = self._moves.move((args, kwargs), self._find_place(func, leaves))
            return func(*moved_args, **moved_kwargs)

    def _find_place(self, func: Any, tensors: list[Tensor]) -> torch.device:
        name = getattr(func, "__name__", "")
        if (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__"):
            return tensors[0].device
        held = next((one.device for one in tensors if isinstance(one, nn.Parameter)), None)
        there = {one.device for one in tensors}
        return held or (self._moves.last if self._moves.last in there else tensors[0].device)


@final
@dataclass(slots=True)
class _ModelHooks:
    """The hooks of the whole model: remembers where its inputs are, and brings its outputs."""

    moves: _Moves
    outputs: str | torch.device
    placement: Placement
    handles: list[Any] = field(default_factory=list)
    homes: list[torch.device | None] = field(default_factory=list)
    mode: _OperandMover | None = None
    needs_no_mode: set[bool] = field(default_factory=set)

    def begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Note where the first tensor among the inputs is."""
        found = [one.device for one in list_tensors((args, kwargs))]
        self.homes.append(next(iter(found), None) if isinstance(self.outputs, str) else self.outputs)
        self.moves.depth += 1
        # Each function of torch pays for the mode, so a model whose first forward had no use for it goes on without.
        is_wanted = len(self.placement.needs) > 1 and model.training not in self.needs_no_mode
        if self.moves.depth == 1 and is_wanted and not torch.compiler.is_compiling():
            self.mode = _OperandMover(self.moves)
            self.mode.__enter__()

    def end(self, model: nn.Module, _: Any, __: Any, result: Any) -> Any:
        """Bring the outputs there; called after a forward that has raised, too."""
        home = self.homes.pop()
        self.moves.depth -= 1
        if not self.moves.depth:
            self.moves.copies.clear()
            error = sys.exc_info()[1]
            if self.mode is not None:
                self.mode.__exit__(None, None, None)
                if error is None and not self.mode.was_needed:
                    self.needs_no_mode.add(model.training)
                self.mode = None
            self._explain(error)
        return result if home is None or self.outputs == "last" else self.moves.move(result, home)

    def _explain(self, error: BaseException | None) -> None:
        """Tell whoever meets torch's error about two devices what to do; Python 3.10 has no notes."""
        met = [str(one) for one in self.placement.needs if str(one) in str(error)]
        if not isinstance(error, RuntimeError) or len(met) < 2:
            return
        self.needs_no_mode.clear()  # another path through the model than that of its first forward
        if hasattr(error, "add_note"):
            error.add_note(
                f"rankwise: inputs of placed modules are moved, and this is computed between modules on {' and '.join(met)}:"
                " place together what is added up, or the whole module around it; or call the model again, which now moves these too"
            )
