"""What each unit of a model costs: its time, forward and backward, on a real batch, and the bytes that it holds in training.

``cost_meter.py`` runs the units; here stands what belongs to which unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, final

from torch import nn

from rankwise.base.errors import ModelError
from rankwise.parallel.blocks import Blocks, find_units
from rankwise.parallel.cost_meter import Figures, count_units, time_units
from rankwise.parallel.memory import Memory
from rankwise.parallel.names import find_owner
from rankwise.parallel.plan_measure import find_optimizer, measure_states
from rankwise.parallel.plan_trace import call_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from torch import Tensor

    from rankwise.parallel.plan_measure import OptimizerFactory


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """What one unit costs in a step, for one micro-batch.

    Attributes:
        name: Of its module.
        tensors: Names of its parameters and buffers, and of those that lie directly in a module around it: they go with the first unit
            inside. What several units share is the first one's.
        forward: Seconds, or floating-point operations if they were counted; 0 without a batch, or if the unit was not called.
        backward: The same, of its backward.
        memory: What it holds; activations are those that autograd keeps from its forward to its backward.
        outputs: Bytes of what it returns, and hands on; None without a batch.
    """

    name: str
    tensors: tuple[str, ...]
    forward: float
    backward: float
    memory: Memory
    outputs: int | None

    @property
    def time(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


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
        model: Not wrapped; in training or evaluation, as it stands. On the meta device operations are counted, and not seconds.
        batch: What the model is called with: a tensor, a sequence of arguments, or a mapping of them. None: only bytes are counted.
        loss: From model and batch to the loss; None: the model is called with the batch. What the loss itself takes is not counted.
        blocks: What is not cut: as for ``find_blocks``.
        optimizer: Whose states are counted: a name such as "adamw" or "sgd", or what makes one of parameters. None: the model is
            not trained, and has no gradients.
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
                figures = time_units(model, tuple(units), batch, loss or call_model, device=device, repeats=repeats)  # fmt: skip
        except Exception as error:  # the user's forward may raise anything
            raise ModelError(
                f"the model can't be measured with this batch: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
                hint="is the batch what the model is called with, and on its device? A model on the meta device must not look at values",
            ) from error
    kinds = {name: (one.shape, one.dtype) for name, one in model.named_parameters() if one.requires_grad and optimizer is not None}  # fmt: skip
    states = {} if optimizer is None else measure_states(kinds, find_optimizer(optimizer))
    trained = {one: states.get(one, (0.0, 0)) for one in kinds}
    ordered = _order(units, figures)
    found = figures if batch is None else {name: figures.get(name, Figures()) for name in ordered}
    held = dict(chain(model.named_parameters(), model.named_buffers()))
    owned = list_owned(model, ordered)
    return [_sum_up(name, {one: held[one] for one in owned[name]}, trained, found.get(name)) for name in ordered]  # fmt: skip


def list_owned(model: nn.Module, units: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of the parameters and buffers that go with each unit.

    What lies directly in a module around units goes with the first unit inside, and what several units share with the first of these.
    """
    places = {name: place for place, name in enumerate(units)}
    owned: dict[str, list[str]] = {name: [] for name in units}
    first: dict[int, int] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, one in tensors:
        unit, around = find_owner(name, places), name.rpartition(".")[0]
        inside = (
            [unit]
            if unit is not None
            else [one for one in units if f"{one}.".startswith(f"{around}.") or not around]
        )
        place = min((places[one] for one in inside), default=0)
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


def _sum_up(name: str, held: dict[str, Tensor], states: dict[str, tuple[float, int]], found: Figures | None) -> UnitCost:  # fmt: skip
    trained = {own: one for own, one in held.items() if own in states}
    parameters = sum(one.nbytes for one in held.values() if isinstance(one, nn.Parameter))
    memory = Memory(
        parameters=parameters, buffers=sum(one.nbytes for one in held.values()) - parameters, gradients=sum(one.nbytes for one in trained.values()),
        optimizer=sum(int(one.numel() * states[own][0]) + states[own][1] for own, one in trained.items()),
        activations=found and found.activations,
    )  # fmt: skip
    times = (found.forward, found.backward) if found else (0.0, 0.0)
    return UnitCost(name=name, tensors=tuple(held), forward=times[0], backward=times[1], memory=memory, outputs=found and found.outputs)  # fmt: skip
