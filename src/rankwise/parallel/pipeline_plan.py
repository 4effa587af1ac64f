"""What the stages of a pipeline send each other for one micro-batch, and how each finds its own part of the model's forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from rankwise.base.errors import ModelError
from rankwise.parallel.trees import Form, form_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from rankwise.parallel.pipeline_layout import Deal
    from rankwise.parallel.pipeline_trace import Event, Tape, Value

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
        attributes: Parameters that it uses and does not call the owner of: the owner's name, the parameter's, and its number among the
            tensors, or None if the stage has it.
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
    begins = [next((place for place, one in enumerate(stages) if one >= stage), -1) for stage in range(deal.num_stages)]  # fmt: skip
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
                raise ModelError(f"{event.unit!r} of stage {homes[-1]} is called after {before!r} of stage {stage}", hint=_EXAMPLE)  # fmt: skip
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
