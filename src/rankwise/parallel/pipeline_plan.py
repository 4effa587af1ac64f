"""What the stages of a pipeline send each other for one micro-batch, and how each finds its own part of the model's forward.

It follows from one forward without values: no memory, no message, no side effect. torch's stages take the shapes of the first micro-batch for
all, and Gloo aborts the process that receives another size. Here each rank works out for itself what each micro-batch needs, before anything is sent.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rankwise.base.errors import ModelError
from rankwise.parallel.pipeline_trace import Event, Tape, Value
from rankwise.parallel.tensor_experts import route_evenly
from rankwise.parallel.trees import (
    Form,
    describe,
    following_forward,
    form_of,
    list_held,
    make_fakes,
    put_tensors,
    take_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.parallel.pipeline_layout import Deal, Layout

_log = logging.getLogger("torch._subclasses.fake_tensor")
#: So many kinds of micro-batches are remembered.
_MOST_KEPT = 64
_EXAMPLE = "give apply_pipeline(..., example=batch): it is cut by what the forward calls, and not by the order in which the model holds its modules"


@final
@dataclass(frozen=True, slots=True)
class StagePlan:
    """What a stage does with one micro-batch.

    Attributes:
        begin: Its first call; ``end``: the call behind its last one, of the next stage.
        enters: The numbers of the tensors that it receives; ``forms``: their forms.
        is_watched_before: Whether functions that the model calls before ``begin`` must be kept from running.
        is_watched: Whether tensors of its own calls must be noted, as a later stage needs them.
        is_mutated: Whether what it receives is changed in place.
        attributes: Parameters that it uses and does not call the owner of: the owner's name, the parameter's, and its
            number among the tensors, or None if the stage has it.
    """

    begin: int
    end: int
    enters: tuple[int, ...]
    forms: tuple[Form, ...]
    is_watched_before: bool
    is_watched: bool
    is_mutated: bool
    attributes: tuple[tuple[str, str, int | None], ...]


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """One micro-batch over all stages.

    Attributes:
        stages: What each does.
        events: All calls of the forward.
        calls: For each part the numbers of its calls.
        fakes: For each tensor one without values.
        parameters: The names of parameters, by number.
        output: What the model returns, with slots; ``output_forms``: the forms of the tensors in it.
    """

    stages: tuple[StagePlan, ...]
    events: tuple[Event, ...]
    calls: Mapping[str, tuple[int, ...]]
    fakes: tuple[Tensor, ...]
    parameters: Mapping[int, str]
    output: Any
    output_forms: tuple[Form, ...]

    def enters(self, stage: int) -> tuple[Form, ...]:
        """Return what a stage receives."""
        return self.stages[stage].forms if stage < len(self.stages) else ()


def make_plan(tape: Tape, deal: Deal, output: Any, outputs: tuple[Tensor, ...]) -> Plan:
    """Find out what flows from stage to stage."""
    stages = _assign(tape, deal)
    begins = [next((place for place, one in enumerate(stages) if one >= stage), -1) for stage in range(deal.num_stages)]
    begins[0] = 0
    for stage, begin in enumerate(begins[1:], 1):
        if begin < 0 or stages[begin] != stage:
            raise ModelError(f"the forward calls nothing that stage {stage} has", hint=_EXAMPLE)
    flow = _Flow(tape, deal, stages, begins)
    calls: dict[str, list[int]] = {}
    for number, event in enumerate(tape.events):
        if event.unit is not None:
            calls.setdefault(event.unit, []).append(number)
    return Plan(
        stages=tuple(flow.plan(stage) for stage in range(deal.num_stages)),
        events=tuple(tape.events),
        calls={name: tuple(numbers) for name, numbers in calls.items()},
        fakes=tuple(one.tensor for one in tape.values),
        parameters={number: one.parameter for number, one in enumerate(tape.values) if one.parameter},
        output=output,
        output_forms=tuple(map(form_of, outputs)),
    )


def _assign(tape: Tape, deal: Deal) -> list[int]:
    """Return the stage of each call: what stands between two parts is computed with the first of them."""
    stages, stage, before = [], 0, "the model's first part"
    for event in tape.events:
        if event.unit is not None:
            homes = deal.homes[event.unit]
            found = next((one for one in homes if one >= stage), None)
            if found is None:
                raise ModelError(
                    f"{event.unit!r} of stage {homes[-1]} is called after {before!r} of stage {stage}", hint=_EXAMPLE
                )
            stage, before = found, event.unit
        stages.append(stage)
    return stages


class _Flow:
    """The tensors that cross from stage to stage."""

    def __init__(self, tape: Tape, deal: Deal, stages: list[int], begins: list[int]) -> None:
        self._tape, self._deal, self._stages = tape, deal, stages
        self._begins = [*begins, len(tape.events)]
        last = deal.num_stages - 1
        self._crossing: list[set[int]] = [set() for _ in range(deal.num_stages)]
        self._attributes: list[dict[int, bool]] = [{} for _ in range(deal.num_stages)]
        used: dict[int, set[int]] = {}
        for event, stage in zip(tape.events, stages, strict=True):
            for one in event.inputs:
                used.setdefault(one, set()).add(stage)
        for one in tape.returned:
            used.setdefault(one, set()).add(last)
        for number, at in used.items():
            value = tape.values[number]
            if value.parameter is not None:
                self._lead_parameter(number, value.parameter, at)
            elif not value.is_local:
                self._lead(number, value, max(at))
        self._check_aliases(used)

    def _lead(self, number: int, value: Value, until: int) -> None:
        made = value.made if value.made >= 0 else value.written[0]
        for stage in range(self._stages[made] + 1, until + 1):
            self._crossing[stage].add(number)

    def _lead_parameter(self, number: int, name: str, at: set[int]) -> None:
        holders = self._deal.holders[name]
        for stage in at:
            giver = max((one for one in holders if one <= stage), default=None)
            if giver is None:
                raise ModelError(f"stage {stage} uses {name!r}, which stage {holders[0]} has", hint=_EXAMPLE)
            self._attributes[stage][number] = giver < stage
            for one in range(giver + 1, stage + 1):
                self._crossing[one].add(number)

    def _check_aliases(self, used: dict[int, set[int]]) -> None:
        """See that no stage changes a received tensor whose memory another one shares: it would not see the change."""
        for number, event in enumerate(self._tape.events):
            stage = self._stages[number]
            for one in event.mutated if stage else ():
                for other in self._crossing[stage] - {one}:
                    is_shared = _share_memory(self._tape.values[one].tensor, self._tape.values[other].tensor)
                    if is_shared and one in self._crossing[stage] and max(used.get(other, {0})) >= stage:
                        raise ModelError(
                            f"stage {stage} changes a tensor of shape {tuple(self._tape.values[one].tensor.shape)} in place, and another one that it has received shares its memory",
                            hint="compute it out of place, or cut elsewhere: cut=[...]",
                        )

    def plan(self, stage: int) -> StagePlan:
        """Return what a stage does."""
        events, values = self._tape.events, self._tape.values
        begin, end = self._begins[stage], self._begins[stage + 1]
        enters = tuple(sorted(self._crossing[stage]))
        is_watched_before = any(event.unit is None and not event.is_plain for event in events[:begin])
        leaves = self._crossing[stage + 1] if stage + 1 < self._deal.num_stages else set()
        given = {*enters, *(events[end].inputs if end < len(events) else ())}
        received = [values[one].tensor for one in enters]
        changed = [values[one].tensor for event in events[begin:end] for one in event.mutated]
        return StagePlan(
            begin=begin,
            end=end,
            enters=enters,
            forms=tuple(self._form(one, begin) for one in enters),
            is_watched_before=is_watched_before,
            is_watched=not all(one in given or values[one].parameter for one in leaves),
            is_mutated=any(_share_memory(one, other) for one in changed for other in received),
            attributes=tuple(self._list_attributes(stage)),
        )

    def _form(self, number: int, begin: int) -> Form:
        value = self._tape.values[number]
        form = form_of(value.tensor)
        has_grad = value.has_grad_before(begin) and form.dtype.is_floating_point | form.dtype.is_complex
        return Form(form.shape, form.dtype, has_grad)

    def _list_attributes(self, stage: int) -> list[tuple[str, str, int | None]]:
        """Return the parameters that a stage uses without the part that has them: received, or its own."""
        found = []
        for number, is_received in self._attributes[stage].items():
            owner, _, own = (self._tape.values[number].parameter or "").rpartition(".")
            found.append((owner, own, number if is_received else None))
        return found


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one is other or one.untyped_storage()._cdata == other.untyped_storage()._cdata


# ------------------------------------------------------------------ the forward without values


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
                fakes = [torch.empty(one.shape, dtype=self._cast(one.dtype), device=one.device) for one in tensors]
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
    memo: dict[int, Any] = {id(one): one.detach().to(device, copy=True) for one in constants if not one.is_meta}
    make_fakes(model, mode, memo, device=device)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        for one in (getattr(module, name + kind) for module in model.modules() for kind in ("", "_with_kwargs")):
            memo[id(one)] = type(one)()
    fake = copy.deepcopy(model, memo)
    route_evenly(fake)
    return fake
