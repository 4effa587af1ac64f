"""Runs each unit of a model by itself, forward and backward, on the inputs that it gets in the model, and measures it.

One forward pass of the model runs without gradients, and each unit on its way is run with gradients, too, from copies of its inputs. So no
more than one unit's activations are held at a time, and a model can be measured that can't be trained on one device.
"""

from __future__ import annotations

import copy
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from rankwise.parallel.plan_trace import copy_as_fake, make_fake_batch
from rankwise.parallel.trees import list_tensors, map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    #: Runs something; returns what that returns, and what it took.
    Gauge = Callable[[Callable[[], Any]], tuple[Any, float]]
    Call = Callable[[nn.Module, Any], Any]


@final
@dataclass(slots=True)
class Figures:
    """What was measured of one unit, over all its calls: seconds or operations, and bytes."""

    forward: float = 0.0
    backward: float = 0.0
    activations: int = 0
    outputs: int = 0


def time_units(model: nn.Module, units: Sequence[str], batch: Any, call: Call, *, device: torch.device | None, repeats: int) -> dict[str, Figures]:  # fmt: skip
    """Run a model once, and return the seconds that each unit takes, in the order of their first calls.

    The shortest of ``repeats`` runs counts, after one to warm up; buffers and random generators are restored.
    """
    buffers = [(one, one.clone()) for one in model.buffers()]
    devices = {one.device for one in (*model.parameters(), *model.buffers())} | (
        {device} if device else set()
    )
    others = sorted((one for one in devices if one.type != "cpu"), key=str)

    def gauge(work: Callable[[], Any]) -> tuple[Any, float]:
        for one in others:
            torch.accelerator.synchronize(one)
        begin = time.perf_counter()
        result = work()
        for one in others:
            torch.accelerator.synchronize(one)
        return result, time.perf_counter() - begin

    kind = others[0].type if others else "cuda"  # which generators there are besides the CPU's
    with torch.random.fork_rng([one.index or 0 for one in others], device_type=kind):
        try:
            return _run(model, units, batch, call, _Meter(gauge, device=device, repeats=repeats))
        finally:
            with torch.no_grad():
                for one, value in buffers:
                    one.copy_(value)


def count_units(model: nn.Module, units: Sequence[str], batch: Any, call: Call) -> dict[str, Figures]:
    """Run a model once on fake tensors, and return the floating-point operations of each unit's matrix products."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)
    fake = copy_as_fake(model, mode, dtype)

    def gauge(work: Callable[[], Any]) -> tuple[Any, float]:
        with FlopCounterMode(display=False) as counter:
            result = work()
        return result, float(counter.get_total_flops())

    with mode:
        return _run(fake, units, make_fake_batch(batch, None, dtype), call, _Meter(gauge))


def _run(model: nn.Module, units: Sequence[str], batch: Any, call: Call, meter: _Meter) -> dict[str, Figures]:
    meter.given = {one.untyped_storage()._cdata for one in list_tensors(batch)}
    with torch.no_grad(), ExitStack() as stack:
        for name in units:
            stack.enter_context(meter.watching(name, model.get_submodule(name)))
        call(model, batch)
    return meter.figures


@final
@dataclass(slots=True)
class _Meter:
    """Stands in the place of units' forwards.

    Attributes:
        gauge: Measures a piece of work.
        device: Where units are run; None: where they lie.
        repeats: How often after the first run, whose time then doesn't count; 0: the first run counts.
        given: Storages of the batch: nobody asks for their gradients.
        figures: Of each unit.
        counted: Storages that are counted as a unit's activations, and may be the next one's inputs; held, so that addresses stay their own.
    """

    gauge: Gauge
    device: torch.device | None = None
    repeats: int = 0
    given: set[int] = field(default_factory=set)
    figures: dict[str, Figures] = field(default_factory=dict)
    counted: dict[int, Any] = field(default_factory=dict)

    @contextmanager
    def watching(self, name: str, unit: nn.Module) -> Iterator[None]:
        """Measure each call of a unit."""
        own = unit.__dict__.get("forward")

        def restore() -> None:
            unit.__dict__.pop("forward", None)
            if own is not None:
                unit.__dict__["forward"] = own

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            restore()
            try:
                return self.measure(name, unit, args, kwargs)
            finally:
                unit.__dict__["forward"] = stand_in

        unit.__dict__["forward"] = stand_in
        try:
            yield
        finally:
            restore()

    def measure(self, name: str, unit: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run one call of a unit, and return what it returns, where the inputs are."""
        homes = [one.device for one in list_tensors((args, kwargs))]
        twin = unit if self.device is None else copy.deepcopy(unit).to(self.device)
        found = self.figures.setdefault(name, Figures())
        trial = _Trial(self, twin, args, kwargs)
        saved: dict[int, Any] = {}

        def pack(one: Tensor) -> Tensor:
            storage = one.untyped_storage()
            saved[storage._cdata] = storage
            return one

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            forward = trial.run_forward()
        result = trial.result
        backward = trial.run_backward()
        own = {one.untyped_storage()._cdata for one in (*twin.parameters(), *twin.buffers())}
        held = {key: one for key, one in saved.items() if key not in own}
        found.activations += sum(one.nbytes() for key, one in held.items() if trial.origins.get(key) not in self.counted)  # fmt: skip
        found.outputs += sum(one.nbytes for one in list_tensors(result))
        if self.repeats:
            forward, backward = inf, inf
        for _ in range(self.repeats):
            forward = min(forward, trial.run_forward())
            backward = min(backward, trial.run_backward())
        found.forward += forward
        found.backward += backward

        def hand_on(one: Tensor) -> Tensor:
            given = one.detach() if self.device is None or not homes else one.detach().to(homes[0])
            if one.untyped_storage()._cdata in held:
                self.hold(given)
            return given

        for one in list_tensors((args, kwargs)):
            if any(origin == one.untyped_storage()._cdata for key, origin in trial.origins.items() if key in held):  # fmt: skip
                self.hold(one)
        return map_tensors(result, hand_on)

    def hold(self, one: Tensor) -> None:
        """Remember that a storage is counted."""
        storage = one.untyped_storage()
        self.counted[storage._cdata] = storage


@final
class _Trial:
    """One call of a unit, repeated.

    Attributes:
        origins: From the storage of an input's copy to the storage of that input.
        result: What the forward has returned.
    """

    def __init__(self, meter: _Meter, unit: nn.Module, args: Any, kwargs: Any) -> None:
        self._meter, self._unit, self._args, self._kwargs = meter, unit, args, kwargs
        self._leaves: list[Tensor] = []
        self.origins: dict[int, int] = {}
        self.result: Any = None

    def run_forward(self) -> float:
        """Run it on fresh copies of the inputs; return what it took."""
        self._leaves, self.result = [], None
        args, kwargs = map_tensors((self._args, self._kwargs), self._copy)
        with torch.enable_grad():
            self.result, took = self._meter.gauge(lambda: self._unit.forward(*args, **kwargs))
        return took

    def run_backward(self) -> float:
        """Differentiate what the last forward has returned, leaving ``grad`` alone; return what it took."""
        outputs = [one for one in list_tensors(self.result) if one.requires_grad]
        inputs = [*self._leaves, *(one for one in self._unit.parameters() if one.requires_grad)]
        self.result = None
        if not outputs or not inputs:
            return 0.0
        seeds = [torch.ones_like(one) for one in outputs]
        _, took = self._meter.gauge(lambda: torch.autograd.grad(outputs, inputs, seeds, allow_unused=True))
        return took

    def _copy(self, one: Tensor) -> Tensor:
        storage = one.untyped_storage()._cdata
        with torch.enable_grad():
            twin = one.detach().to(self._meter.device or one.device)
            if one.is_floating_point() and storage not in self._meter.given:
                twin = twin.requires_grad_()
                self._leaves.append(twin)
            # Not the leaf itself: a unit may write into its input.
            twin = twin.clone()
        self.origins[twin.untyped_storage()._cdata] = storage
        return twin
