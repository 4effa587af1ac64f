"""Which tensors flow between the stages of a model, from one forward without values: no memory, no message, no side effect.

torch's stages take the shapes of the first micro-batch for all, and Gloo aborts the process that receives another size. Here each rank
works out for itself what each micro-batch needs, before anything is sent.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rankwise.parallel.fakes import following_forward, list_held, make_fakes
from rankwise.parallel.pipeline_plan import Plan, make_plan
from rankwise.parallel.pipeline_trace import Tape
from rankwise.parallel.trees import describe, put_tensors, take_tensors

if TYPE_CHECKING:
    from rankwise.parallel.pipeline_layout import Deal, Layout

_log = logging.getLogger("torch._subclasses.fake_tensor")
#: So many kinds of micro-batches are remembered.
_MOST_KEPT = 64


@final
class Shapes:
    """Finds the plans of micro-batches."""

    def __init__(self, model: nn.Module, layout: Layout, device: torch.device) -> None:
        self._layout, self._mode = layout, FakeTensorMode(allow_non_fake_inputs=True)
        #: The copy.
        self.model = _copy_as_fake(model, layout, self._mode, device)
        self._dtype: torch.dtype | None = None
        self._plans: dict[str, Plan] = {}

    def compute_in(self, dtype: torch.dtype | None) -> None:
        """Let the parts compute in another dtype than their own."""
        self._dtype = dtype
        made: dict[int, nn.Parameter] = {}
        for module in self.model.modules() if dtype is not None else ():
            for name, one in module._parameters.items():
                if one is None or not one.is_floating_point():
                    continue
                if id(one) not in made:  # not by to(): fake tensors can't be swapped
                    with self._mode:
                        fake = torch.empty(one.shape, dtype=dtype, device=one.device)
                        made[id(one)] = nn.Parameter(fake, one.requires_grad)
                module._parameters[name] = made[id(one)]
                made[id(made[id(one)])] = made[id(one)]

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any], deal: Deal, *, training: bool) -> Plan:
        """Return the plan of a micro-batch; the same on every rank that has inputs of the same shapes."""
        key = repr((describe((args, kwargs)), training, find_autocast(), self._dtype))
        plan = self._plans.get(key)
        if plan is None:
            while len(self._plans) >= _MOST_KEPT:
                del self._plans[next(iter(self._plans))]
            tape, output = self.trace(args, kwargs, training=training)
            plan = self._plans[key] = make_plan(tape, deal, *take_tensors(output))
        return plan

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> tuple[Tape, Any]:
        """Run a forward without values; return its calls, and what it has returned."""
        self.model.train(training)
        tree, tensors = take_tensors((args, kwargs))
        names = {id(one): name for name, one in self.model.named_parameters()}
        tape = Tape(names, set(map(id, list_held(self.model))))
        units = {name: self.model.get_submodule(name) for name in self._layout.units}
        kind, dtype = find_autocast() or ("cpu", torch.bfloat16)
        _log.disabled, was_disabled = True, _log.disabled  # what goes wrong is an error of ours
        autocast = torch.autocast(kind, dtype, enabled=find_autocast() is not None)
        try:
            with following_forward("cut into stages"), self._mode, torch.enable_grad(), autocast:
                fakes = [
                    torch.empty(one.shape, dtype=self._cast(one.dtype), device=one.device) for one in tensors
                ]
                taken = put_tensors(tree, fakes)
                tape.begin(fakes)
                with tape.watch(units):
                    output = self.model(*taken[0], **taken[1])
            tape.end(take_tensors(output)[1])
        finally:
            _log.disabled = was_disabled
        return tape, output

    def _cast(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype


def find_autocast() -> tuple[str, torch.dtype] | None:
    """Return device and dtype of the autocast around the caller; None: there is none."""
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            return kind, torch.get_autocast_dtype(kind)
    return None


def _copy_as_fake(model: nn.Module, layout: Layout, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """Copy a model without its storage, of split layers this rank's part; without hooks, which may send something.

    Buffers of modules around the parts keep their values: they are constants that the model may look at.
    """
    constants = (one for name in layout.owners for one in model.get_submodule(name).buffers(recurse=False))
    memo: dict[int, Any] = {
        id(one): one.detach().to(device, copy=True) for one in constants if not one.is_meta
    }
    make_fakes(model, mode, memo, device=device)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        for one in (
            getattr(module, name + kind) for module in model.modules() for kind in ("", "_with_kwargs")
        ):
            memo[id(one)] = type(one)()
    return copy.deepcopy(model, memo)
