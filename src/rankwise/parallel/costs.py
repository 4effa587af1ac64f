"""What each unit of a model costs: its time, forward and backward, on a real batch, and the bytes that it holds in training.

One forward pass of the model runs without gradients, and each unit on its way is run with gradients, too, from copies of its inputs. So no
more than one unit's activations are held at a time, and a model can be measured that can't be trained on one device.
"""

from __future__ import annotations

import copy
import time
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from rankwise.base.errors import ModelError
from rankwise.parallel.blocks import Blocks, find_units
from rankwise.parallel.memory import Memory
from rankwise.parallel.names import find_owner
from rankwise.parallel.plan_measure import OptimizerFactory, find_optimizer, measure_states
from rankwise.parallel.plan_trace import call_model, copy_as_fake, make_fake_batch
from rankwise.parallel.trees import list_tensors, map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    #: Runs something; returns what that returns, and what it took.
    Gauge = Callable[[Callable[[], Any]], tuple[Any, float]]
    Call = Callable[[nn.Module, Any], Any]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """What one unit costs in a step, for one micro-batch.

    Attributes:
        name: Of its module.
        tensors: Names of its parameters and buffers, and of those that lie directly in a module around it: they go with
            the first unit inside. What several units share is the first one's.
        time: Seconds of forward and backward, or floating-point operations if they were counted; 0 without a batch, or
            if it was not called.
        memory: What it holds; activations are those that autograd keeps from its forward to its backward.
    """

    name: str
    tensors: tuple[str, ...]
    time: float
    memory: Memory


def measure_costs(
    model: nn.Module,
    batch: Any = None,
    *,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    blocks: Blocks = "auto",
    optimizer: str | OptimizerFactory | None = "adamw",
    device: torch.device | None = None,
    repeats: int = 3,
) -> list[UnitCost]:
    """Measure what each unit of a model costs, in the order in which they are called.

    The model, its buffers, its gradients and the state of the random generators are afterwards what they were.

    Args:
        model: Not wrapped; in training or evaluation, as it stands. On the meta device operations are counted, and not
            seconds.
        batch: As for ``place``; None: only bytes are counted.
        loss: As for ``place``. What the loss itself takes is not counted.
        blocks: What is not cut, said as for ``apply_fsdp``.
        optimizer: As for ``place``.
        device: Where each unit is run, if elsewhere than it lies: one after the other, as copies.
        repeats: How often each is timed, after one run to warm up; the shortest counts.

    Returns:
        One for each unit; those that were not called stand where the model holds them.

    Raises:
        ModelError: The model can't be run with this batch, or without values if it is on the meta device.
        UsageError: There are no such blocks or optimizer.
    """
    units = find_units(model, blocks)
    figures: dict[str, Figures] = {}
    if batch is not None:
        is_meta = any(one.is_meta for one in chain(model.parameters(), model.buffers()))
        try:
            if is_meta:
                figures = count_units(model, tuple(units), batch, loss or call_model)
            else:
                figures = time_units(model, tuple(units), batch, loss or call_model, device=device, repeats=repeats)
        except Exception as error:  # the user's forward may raise anything
            raise ModelError(
                f"the model can't be measured with this batch: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
                hint="is the batch what the model is called with, and on its device? A model on the meta device must not look at values",
            ) from error
    kinds = {
        name: (one.shape, one.dtype)
        for name, one in model.named_parameters()
        if one.requires_grad and optimizer is not None
    }
    states = {} if optimizer is None else measure_states(kinds, find_optimizer(optimizer))
    trained = {one: states.get(one, (0.0, 0)) for one in kinds}
    ordered = _order(units, figures)
    found = figures if batch is None else {name: figures.get(name, Figures()) for name in ordered}
    held = dict(chain(model.named_parameters(), model.named_buffers()))
    owned = list_owned(model, ordered)
    return [_sum_up(name, {one: held[one] for one in owned[name]}, trained, found.get(name)) for name in ordered]


def list_owned(model: nn.Module, units: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of the parameters and buffers that go with each unit.

    What lies directly in a module around units goes with the first unit inside, and what several units share with the
    first of these.
    """
    places = {name: place for place, name in enumerate(units)}
    owned: dict[str, list[str]] = {name: [] for name in units}
    first: dict[int, int] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, one in tensors:
        unit, around = find_owner(name, places), name.rpartition(".")[0]
        inside = [one for one in units if f"{one}.".startswith(f"{around}.") or not around]
        place = min((places[one] for one in inside), default=0) if unit is None else places[unit]
        first[id(one)] = min(place, first.get(id(one), place))
    for name, one in chain(model.named_parameters(), model.named_buffers()):
        owned[units[first[id(one)]]].append(name)
    return owned


def _order(units: Iterable[str], called: Iterable[str]) -> list[str]:
    """Return the units in the order of their first calls; one that was not called comes after its neighbour in the model."""
    ordered, before = list(called), ""
    for name in units:
        if name not in ordered:
            ordered.insert(ordered.index(before) + 1 if before else 0, name)
        before = name
    return ordered


def _sum_up(
    name: str, held: dict[str, Tensor], states: dict[str, tuple[float, int]], found: Figures | None
) -> UnitCost:
    trained = {own: one for own, one in held.items() if own in states}
    parameters = sum(one.nbytes for one in held.values() if isinstance(one, nn.Parameter))
    memory = Memory(
        parameters=parameters, buffers=sum(one.nbytes for one in held.values()) - parameters, gradients=sum(one.nbytes for one in trained.values()),
        optimizer=sum(int(one.numel() * states[own][0]) + states[own][1] for own, one in trained.items()),
        activations=found and found.activations,
    )  # fmt: skip
    return UnitCost(name=name, tensors=tuple(held), time=found.time if found else 0.0, memory=memory)


# ------------------------------------------------------------------ measuring


@final
@dataclass(slots=True)
class Figures:
    """What was measured of one unit, over all its calls: seconds or operations, and bytes."""

    time: float = 0.0
    activations: int = 0


def time_units(
    model: nn.Module, units: Sequence[str], batch: Any, call: Call, *, device: torch.device | None, repeats: int
) -> dict[str, Figures]:
    """Run a model once, and return the seconds that each unit takes, in the order of their first calls.

    The shortest of ``repeats`` runs counts, after one to warm up; buffers and random generators are restored.
    """
    buffers = [(one, one.clone()) for one in model.buffers()]
    devices = {one.device for one in (*model.parameters(), *model.buffers())} | {device}
    others = sorted((one for one in devices if one is not None and one.type != "cpu"), key=str)

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


@contextmanager
def _replacing_forward(unit: nn.Module, forward: Callable[..., Any] | None) -> Iterator[None]:
    """Let a module have another forward of its own in this block; None: that of its class."""
    before = unit.__dict__.pop("forward", None)
    unit.__dict__.update({} if forward is None else {"forward": forward})
    try:
        yield
    finally:
        unit.__dict__.pop("forward", None)
        unit.__dict__.update({} if before is None else {"forward": before})


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
        counted: Storages that are counted as a unit's activations, and may be the next one's inputs; held, so that
            addresses stay their own.
    """

    gauge: Gauge
    device: torch.device | None = None
    repeats: int = 0
    given: set[int] = field(default_factory=set)
    figures: dict[str, Figures] = field(default_factory=dict)
    counted: dict[int, Any] = field(default_factory=dict)

    def watching(self, name: str, unit: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which each call of a unit is measured."""
        own = unit.__dict__.get("forward")

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            with _replacing_forward(unit, own):
                return self.measure(name, unit, (args, kwargs))

        return _replacing_forward(unit, stand_in)

    def measure(self, name: str, unit: nn.Module, call: tuple[Any, Any]) -> Any:
        """Run one call of a unit, and return what it returns, where the inputs are."""
        homes = [one.device for one in list_tensors(call)]
        twin = unit if self.device is None else copy.deepcopy(unit).to(self.device)
        found = self.figures.setdefault(name, Figures())
        saved: dict[int, Any] = {}

        def pack(one: Tensor) -> Tensor:
            storage = one.untyped_storage()
            saved[storage._cdata] = storage
            return one

        saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one)
        result, origins, taken = self._run(twin, call, saving)
        own = {one.untyped_storage()._cdata for one in (*twin.parameters(), *twin.buffers())}
        held = {key: one for key, one in saved.items() if key not in own}
        found.activations += sum(one.nbytes() for key, one in held.items() if origins.get(key) not in self.counted)
        found.time += min((self._run(twin, call, nullcontext())[2] for _ in range(self.repeats)), default=taken)

        def hand_on(one: Tensor) -> Tensor:
            given = one.detach() if self.device is None or not homes else one.detach().to(homes[0])
            if one.untyped_storage()._cdata in held:
                self._hold(given)
            return given

        kept = {origin for key, origin in origins.items() if key in held}
        for one in list_tensors(call):
            if one.untyped_storage()._cdata in kept:
                self._hold(one)
        return map_tensors(result, hand_on)

    def _hold(self, one: Tensor) -> None:
        """Remember that a storage is counted."""
        storage = one.untyped_storage()
        self.counted[storage._cdata] = storage

    def _run(self, unit: nn.Module, call: tuple[Any, Any], saving: Any) -> tuple[Any, dict[int, int], float]:
        """Run a unit on fresh copies of its inputs, and differentiate that, leaving ``grad`` alone.

        Returns:
            What the forward has returned; from the storage of each input's copy to that of the input; and what forward
            and backward took.
        """
        leaves: list[Tensor] = []
        origins: dict[int, int] = {}

        def renew(one: Tensor) -> Tensor:
            storage = one.untyped_storage()._cdata
            with torch.enable_grad():
                twin = one.detach().to(self.device or one.device)
                if one.is_floating_point() and storage not in self.given:
                    twin = twin.requires_grad_()
                    leaves.append(twin)
                # Not the leaf itself: a unit may write into its input.
                twin = twin.clone()
            origins[twin.untyped_storage()._cdata] = storage
            return twin

        args, kwargs = map_tensors(call, renew)
        with torch.enable_grad(), saving:
            result, forward = self.gauge(lambda: unit.forward(*args, **kwargs))
        outputs = [one for one in list_tensors(result) if one.requires_grad]
        inputs = [*leaves, *(one for one in unit.parameters() if one.requires_grad)]
        if not outputs or not inputs:
            return result, origins, forward
        seeds = [torch.ones_like(one) for one in outputs]
        _, backward = self.gauge(lambda: torch.autograd.grad(outputs, inputs, seeds, allow_unused=True))
        return result, origins, forward + backward
