"""A stage of a pipeline as a module: it runs the model's own forward, of which other stages compute the rest.

Why not a chain of blocks: what a model computes around its blocks (positions, masks, a skip connection, a head on the last token) is code, which
only its own forward has. A stage runs it with its own parts. What comes before them gives out what was received, or tensors without values where
nothing of this stage depends on them; the first call of the next stage leaves the forward.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _get_current_function_mode

from rankwise.base.errors import ModelError
from rankwise.parallel.pipeline_layout import Deal, Kept, Layout
from rankwise.parallel.pipeline_trace import Intercept, is_getter, is_random
from rankwise.parallel.trees import list_tensors, put_tensors, take_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rankwise.parallel.pipeline_batches import Call
    from rankwise.parallel.pipeline_plan import Plan, StagePlan


class _LeftError(BaseException):
    """Leaves the model's forward where the next stage begins; no Exception, which a forward might catch."""


@final
class Turn:
    """A stage's forward at hand: which call comes next, and the tensors that it has so far."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.plan: Any = None
        self.own: Any = None
        self.live: dict[int, Tensor] = {}
        self._known: dict[int, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._position = 0
        self._mode = Intercept(self.see)
        #: Arguments of the model, for the micro-batch at hand.
        self.inputs: Call = ((), {})
        #: What the model has returned, with slots for tensors.
        self.returned: Any = None
        #: Whether the forward is under way.
        self.is_running = False
        self._is_on = False

    def begin(self, plan: Plan, own: StagePlan, received: Sequence[Tensor]) -> None:
        """Begin a forward."""
        self.plan, self.own = plan, own
        self.live = dict(zip(own.enters, received, strict=True))
        self._known = {id(one): one for one in received}
        self._counts.clear()
        self._position, self.is_running = 0, True
        if own.is_watched_before or (own.is_watched and not own.begin):
            self._watch()

    def end(self) -> None:
        """End it."""
        self.is_running, self._known = False, {}
        self.rest()

    def _watch(self) -> None:
        if not self._is_on:
            self._mode.__enter__()
            self._is_on = True

    def rest(self) -> None:
        """Let functions run unseen."""
        if self._is_on and _get_current_function_mode() is self._mode:
            self._mode.__exit__(None, None, None)
            self._is_on = False

    def find(self, unit: str) -> int:
        """Return which call of the forward that of a part is."""
        count = self._counts.get(unit, 0)
        self._counts[unit] = count + 1
        calls = self.plan.calls.get(unit, ())
        if count >= len(calls):
            raise _differ(f"calls {unit!r} once more")
        self._position = calls[count] + 1
        return int(calls[count])

    def is_own(self, number: int) -> bool:
        """Whether this stage computes a call."""
        return bool(self.own.begin <= number < self.own.end)

    def leave(self, number: int, given: Any) -> None:
        """Leave the forward, if a call is the next stage's."""
        if number >= self.own.end:
            for one, tensor in zip(self.plan.events[number].inputs, list_tensors(given), strict=True):
                self.live.setdefault(one, tensor)
            raise _LeftError

    def give(self, number: int, given: Any) -> Any:
        """Return what a call of another stage has returned: received, or without values."""
        event = self.plan.events[number]
        for one, tensor in zip(event.inputs, list_tensors(given), strict=True) if event.mutated else ():
            # Something computed here, a row of zeros, into which another stage has written.
            if one in event.mutated and one in self.live and self.live[one] is not tensor:
                tensor.copy_(self.live[one])
                self.live[one] = tensor
            self._known[id(tensor)] = tensor
        return put_tensors(event.returned, [self.live.get(one, self.plan.fakes[one]) for one in event.outputs])

    def keep(self, number: int, given: Any, result: Any) -> None:
        """Note what a call of this stage has returned or changed, if a later stage may need it; and watch what comes behind it."""
        if not self.own.is_watched:
            return
        event = self.plan.events[number]
        changed = (
            [pair for pair in zip(event.inputs, list_tensors(given), strict=True) if pair[0] in event.mutated]
            if event.mutated
            else []
        )
        for one, tensor in (*changed, *zip(event.outputs, list_tensors(result), strict=True)):
            self.live[one] = self._known[id(tensor)] = tensor
        self._watch()

    def see(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a function that the model's own code calls, or give what another stage has computed there."""
        given = list_tensors((args, kwargs))
        if not is_random(function) and not any(map(self._is_recorded, given)):
            return function(*args, **kwargs)
        if is_getter(function) and not isinstance(read := function(*args, **kwargs), Tensor):
            return read
        number, self._position = self._position, self._position + 1
        event = self.plan.events[number] if number < len(self.plan.events) else None
        if event is None or event.function != function:
            raise _differ(
                f"calls {getattr(function, '__name__', function)}, where {event and (event.unit or event.function)} was expected"
            )
        if number < self.own.begin and not event.is_plain:
            return self.give(number, (args, kwargs))
        result = function(*args, **kwargs)
        if not event.is_plain:
            self.keep(number, (args, kwargs), result)
        return result

    def _is_recorded(self, tensor: Tensor) -> bool:
        """Whether a tensor does not follow from the model's inputs and constants alone."""
        return isinstance(tensor, (FakeTensor, nn.Parameter)) or id(tensor) in self._known


def _differ(what: str) -> ModelError:
    return ModelError(
        f"the model's forward takes another path on this stage than it took without values: it {what}",
        hint="a model whose forward looks at values, or counts its calls, can't be cut into stages",
    )


class Part(nn.Module):  # type: ignore[misc]
    """Stands in the model's forward for a part of it: computes its own calls, and gives what was received for those of other stages.

    What is asked of it besides, an attribute or a child, is asked of the part, or of one without values.
    """

    def __init__(self, name: str, turn: Turn, like: nn.Module, *, is_own: bool) -> None:
        nn.Module.__init__(self)
        del self.__dict__["training"]
        self.__dict__.update({"_part": name, "_turn": turn, "_like": like, "_is_own": is_own})
        if is_own:
            self._modules["part"] = like

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute it, pass it by, or leave the forward."""
        turn = self._turn
        if not turn.is_running and self._is_own:
            return self._like(*args, **kwargs)  # computed again by a checkpoint, in the backward
        number = turn.find(self._part)
        turn.leave(number, (args, kwargs))
        if not turn.is_own(number):
            return turn.give(number, (args, kwargs))
        if not self._is_own:
            raise _differ(f"calls {self._part!r}, which another stage has")
        turn.rest()
        result = self._like(*args, **kwargs)
        turn.keep(number, (args, kwargs), result)
        return result

    def __getattr__(self, name: str) -> Any:
        with suppress(AttributeError):
            return nn.Module.__getattr__(self, name)
        return getattr(self.__dict__["_like"], name)


def _make_part(name: str, turn: Turn, like: nn.Module, *, is_own: bool) -> Part:
    """Return a stand-in that is an instance of the part's class, too."""
    kind = type(like)
    asked = {one: _hand_on(one) for one in ("__len__", "__iter__", "__getitem__", "__contains__") if hasattr(kind, one)}
    try:
        made: Any = type(kind.__name__, (Part, kind), asked)
        return made(name, turn, like, is_own=is_own)  # type: ignore[no-any-return]
    except TypeError:  # a class that can't be derived from
        return Part(name, turn, like, is_own=is_own)


def _hand_on(name: str) -> Any:
    return lambda self, *args: getattr(self.__dict__["_like"], name)(*args)


class _Own(torch.autograd.Function):  # type: ignore[misc]
    """Gives a tensor as one that is no leaf, and no view of one: it may be changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # noqa: ARG004 - autograd's signature
        return tensor.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004 - autograd's signature
        return gradient


@final
class StageModule(nn.Module):  # type: ignore[misc]
    """One stage as a module: its parameters are the stage's, its forward takes what the stage before has sent."""

    def __init__(self, model: nn.Module, fake: nn.Module, layout: Layout, deal: Deal, number: int) -> None:
        super().__init__()
        self.is_first, self.is_last = number == 0, number == deal.num_stages - 1
        self.number, self.turn = number, Turn(number)
        self.__dict__.update({"_model": model, "_fake_model": fake, "_names": deal.names})
        self._pairs: list[Any] = []
        self._owners: dict[str, nn.Module] = {}
        #: Parameters of parts that other stages call: registered, so that they are this stage's.
        self.held = nn.ModuleList()
        self.shell = self._clone(model, layout, deal)
        #: Whether the schedule's backward has two halves.
        self.has_halves = False
        #: To which floating-point inputs are cast: by FSDP, which does not see them.
        self.dtype: torch.dtype | None = None

    def take(self, plan: Plan, call: Call) -> None:
        """Take the shapes of the micro-batch at hand, and the model's arguments for it."""
        self.turn.plan, self.turn.inputs = plan, call

    def forward(self, *received: Tensor) -> Any:
        """Compute the stage; of the last one return all tensors that the model does."""
        plan: Plan = self.turn.plan
        own = plan.stages[self.number]
        if own.is_mutated:
            received = tuple(_Own.apply(one) for one in received)
        self.turn.begin(plan, own, received)
        for clone, original in self._pairs:
            clone.training = original.training
        args, kwargs = self._read_inputs()
        with self._lending(own):
            try:
                returned = self.shell(*args, **kwargs)
            except _LeftError:
                returned = None
            finally:
                self.turn.end()
        live, self.turn.live = self.turn.live, {}
        if not self.is_last:
            return self._list_sent(plan, live)
        self.turn.returned, tensors = take_tensors(returned)
        return tensors[0] if len(tensors) == 1 else tensors

    def _read_inputs(self) -> Call:
        if self.dtype is None:
            return self.turn.inputs
        tree, tensors = take_tensors(self.turn.inputs)
        cast = [one.to(self.dtype) if one.is_floating_point() else one for one in tensors]
        return put_tensors(tree, cast)  # type: ignore[no-any-return]

    @contextmanager
    def _lending(self, own: StagePlan) -> Iterator[None]:
        """Let the forward find parameters, which the stage uses without calling the part that has them, where it looks for them."""
        lent = []
        for owner, name, number in own.attributes:
            if number is None and owner in self._owners:
                continue
            module = self._owners.get(owner) or self._fake_model.get_submodule(owner)
            value = self.turn.live[number] if number is not None else self._find(f"{owner}.{name}".removeprefix("."))
            lent.append((module, name))
            module.__dict__[name] = value
        try:
            yield
        finally:
            for module, name in lent:
                del module.__dict__[name]

    def _list_sent(self, plan: Plan, live: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
        """Return what the next stage receives."""
        sent = []
        for number, form in zip(plan.stages[self.number + 1].enters, plan.enters(self.number + 1), strict=True):
            one = live.get(number)
            if one is None:
                one = self._find(plan.parameters[number])
            if not form.has_grad:
                one = one.detach()
            # In a backward of two halves torch detaches what was sent in place, and a function may have saved it.
            elif self.has_halves or one.is_leaf:
                one = _Own.apply(one)
            sent.append(one.contiguous())
        return tuple(sent)

    def _find(self, name: str) -> Any:
        """Return a parameter that this rank has, by any of its names."""
        for one in self._names[name]:
            owner, _, own = one.rpartition(".")
            with suppress(AttributeError):
                held = self._model.get_submodule(owner)._parameters.get(own)
                if held is not None:
                    return held
        raise AssertionError(name)

    def _clone(self, model: nn.Module, layout: Layout, deal: Deal) -> nn.Module:
        """Return a copy of the modules around the parts, which shares with the model all that this rank has."""
        number = self.number
        for name in layout.owners:
            original, fake = model.get_submodule(name), self._fake_model.get_submodule(name)
            clone = original.__class__.__new__(original.__class__)
            clone.__dict__ = {**original.__dict__, "_modules": dict(original._modules)}
            held = {
                own: one
                for own, one in original._parameters.items()
                if one is None or number in deal.holders[f"{name}.{own}".removeprefix(".")]
            }
            # Else FSDP, which puts others in their place, does it for both.
            if len(held) < len(original._parameters):
                clone.__dict__["_parameters"] = held
            clone.__dict__.update((own, one) for own, one in fake._parameters.items() if own not in held)
            self._owners[name] = clone
            self._pairs.append((clone, original))
            if name:
                self._put(name, clone)
        for name in layout.units:
            is_own = self.number in deal.homes[name]
            like = (model if is_own else self._fake_model).get_submodule(name)
            self._put(name, _make_part(name, self.turn, like, is_own=is_own))
            kept = model.get_submodule(name)
            names = [f"{name}.{one}" for one, _ in kept.named_parameters()] if isinstance(kept, Kept) else []
            if any(number in deal.holders[one] for one in names):
                self.held.append(kept)
        return self._owners[""]

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, own = name.rpartition(".")
        self._owners[parent]._modules[own] = module
