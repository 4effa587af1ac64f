"""Follows one forward of a model without values: what it calls, which tensor each call takes and gives, and which parameters are used where.

The parts of a model that are called as a whole (blocks, and the modules around them that have parameters) are one call each; whatever the
model's own code does between them is recorded function by function. That is all that a cut needs to know: any tensor that a later stage uses
must be sent to it, be it the output of the last block, a skip connection, or the second of two inputs. What follows from the model's inputs and
constants alone, as masks and positions do, is not recorded: every stage computes it for itself.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from rankwise.base.errors import ModelError
from rankwise.parallel.trees import list_tensors, take_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@final
@dataclass(frozen=True, slots=True)
class Event:
    """One call of a forward.

    Attributes:
        unit: The name of the part that was called; None: a function.
        function: Which; None for a part.
        inputs: The numbers of the tensors that it takes.
        outputs: Those of the tensors in what it returns, in order.
        mutated: Those that it changes in place.
        returned: What it returns, with slots for tensors.
        is_plain: Returns and changes no tensor: a size.
    """

    unit: str | None
    function: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    mutated: tuple[int, ...]
    returned: Any
    is_plain: bool


@final
@dataclass(slots=True)
class Value:
    """A tensor of a forward: the object, whose values may change in place.

    Attributes:
        tensor: Without values, or a constant.
        made: By which call; -1: by none that was recorded.
        parameter: Its name, if it is one.
        is_local: Follows from the model's inputs and constants alone, until something else is written into it.
        grads: From which call on it needs a gradient, or none any more.
        written: By which calls, in place.
    """

    tensor: Tensor
    made: int
    parameter: str | None = None
    is_local: bool = True
    grads: list[tuple[int, bool]] = field(default_factory=list)
    written: list[int] = field(default_factory=list)

    def has_grad_before(self, event: int) -> bool:
        """Whether it needs a gradient when that call begins."""
        return next((needs for at, needs in reversed(self.grads) if at < event), False)


#: What draws random numbers is computed by one stage, whatever it is given.
_RANDOM = frozenset((
    "alpha_dropout", "bernoulli", "bernoulli_", "cauchy_", "dropout", "dropout1d", "dropout2d", "dropout3d", "exponential_",
    "feature_alpha_dropout", "feature_dropout", "fractional_max_pool2d", "fractional_max_pool3d", "geometric_", "gumbel_softmax",
    "log_normal_", "multi_head_attention_forward", "multinomial", "native_dropout", "normal", "normal_", "poisson", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "random_", "randperm", "rrelu", "rrelu_", "scaled_dot_product_attention",
    "uniform_",
))  # fmt: skip


def is_random(function: Any) -> bool:
    """Whether a function of torch may draw random numbers."""
    return getattr(function, "__name__", "") in _RANDOM


@final
class Tape:
    """The calls of one forward."""

    def __init__(self, parameters: Mapping[int, str], known: set[int]) -> None:
        self.events: list[Event] = []
        self.values: list[Value] = []
        self.returned: tuple[int, ...] = ()
        self.depth = 0
        self._parameters, self._known, self._numbers = parameters, known, dict[int, int]()

    def begin(self, arguments: Sequence[Tensor]) -> None:
        """Note what the model is called with."""
        for one in arguments:
            if id(one) not in self._numbers:
                self._add(one, -1)

    def end(self, outputs: Sequence[Tensor]) -> None:
        """Note what the model returns."""
        self.returned = tuple(map(self._find, outputs))

    def _add(self, tensor: Tensor, made: int, *, is_local: bool = True) -> Value:
        self._numbers[id(tensor)] = len(self.values)  # good as long as the tensor, which is kept
        value = Value(tensor, made, is_local=is_local, grads=[(made, tensor.requires_grad)])
        self.values.append(value)
        return value

    def _find(self, tensor: Tensor) -> int:
        found = self._numbers.get(id(tensor))
        if found is not None:
            return found
        name = self._parameters.get(id(tensor))
        if name is None and isinstance(tensor, FakeTensor) and id(tensor) not in self._known:
            raise ModelError(
                f"the forward uses a tensor of shape {tuple(tensor.shape)} that no block and no function of torch has returned: an attribute that a block sets, or the output of an autograd.Function",
                hint="return it from the block, or call the function inside of a block",
            )
        self._add(tensor, -1, is_local=name is None).parameter = name
        return self._numbers[id(tensor)]

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch that the model's own code calls; return what it does."""
        if self.depth:
            return function(*args, **kwargs)
        given = list_tensors((args, kwargs))
        numbers, versions = tuple(map(self._find, given)), [one._version for one in given]
        if not is_random(function) and all(self.values[one].is_local for one in numbers):
            # Constants have values, so that a model may look at them: at a mask of its own, for one.
            is_constant = not any(isinstance(one, FakeTensor) for one in given)
            with unset_fake_temporarily() if is_constant else nullcontext():
                result = function(*args, **kwargs)
            for one in take_tensors(result)[1]:
                if id(one) not in self._numbers and id(one) not in self._known:
                    self._add(one, -1)
            return result
        result = function(*args, **kwargs)
        if is_getter(function) and not isinstance(result, Tensor):
            return result
        self._note(None, function, numbers, self._list_changed(numbers, given, versions), result)
        return result

    def _list_changed(
        self, numbers: Sequence[int], given: Sequence[Tensor], versions: Sequence[int]
    ) -> tuple[int, ...]:
        pairs = zip(numbers, given, versions, strict=True)
        return tuple(number for number, one, version in pairs if one._version != version)

    def _note(
        self, unit: str | None, function: Any, inputs: tuple[int, ...], changed: tuple[int, ...], result: Any
    ) -> None:
        number = len(self.events)
        returned, tensors = take_tensors(result)
        for one in tensors:
            if id(one) not in self._numbers:
                self._add(one, number, is_local=False)
        for one in changed:
            value = self.values[one]
            value.grads.append((number, value.tensor.requires_grad))
            value.is_local = False
            value.written.append(number)
        is_plain = unit is None and not tensors and not changed
        outputs = tuple(self._numbers[id(one)] for one in tensors)
        # A size is known without the values.
        self.events.append(Event(unit, function, () if is_plain else inputs, outputs, changed, returned, is_plain))

    def watch(self, units: Mapping[str, nn.Module]) -> ExitStack:
        """Return a context in which a forward is recorded."""
        stack = ExitStack()
        for name, module in units.items():
            entered: list[Any] = []

            def enter(_: nn.Module, args: Any, kwargs: Any, *, name: str = name, entered: list[Any] = entered) -> None:
                if self.depth:
                    raise ModelError(
                        f"{name!r} is called inside of another part of the model",
                        hint="name the outer one: blocks=[...]",
                    )
                self.depth += 1
                given = list_tensors((args, kwargs))
                entered[:] = tuple(map(self._find, given)), given, [one._version for one in given]

            def leave(_: nn.Module, __: Any, output: Any, *, name: str = name, entered: list[Any] = entered) -> None:
                numbers, given, versions = entered
                self._note(name, None, numbers, self._list_changed(numbers, given, versions), output)
                self.depth -= 1  # last, as what is done here is not the model's

            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        stack.enter_context(Intercept(self.run))
        return stack


@final
class Intercept(TorchFunctionMode):  # type: ignore[misc]
    """Gives each function of torch that is called, with its arguments, to another, which runs it."""

    def __init__(self, run: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # An iterator can be run through once: what it gives, a tuple of tensors, is what counts.
        if func is Tensor.__iter__:
            return iter(self._run(Tensor.unbind, args, {}))
        return self._run(func, args, kwargs or {})


def is_getter(function: Any) -> bool:
    """Whether a function reads an attribute.

    Of those that are no tensors not all are seen: a tensor without values has its own device.
    """
    return getattr(function, "__name__", "") == "__get__"


def find_calls(tape: Tape) -> list[tuple[str | None, list[str]]]:
    """Return what a forward calls, in order: parts by name, and of the code between them the parameters that it uses."""
    found: list[tuple[str | None, list[str]]] = []
    for event in tape.events:
        held = [tape.values[one].parameter for one in event.inputs]
        names = [sys.intern(name) for name in held if name is not None]
        if event.unit is not None or names:
            found.append((event.unit, names))
    names = [name for one in tape.returned if (name := tape.values[one].parameter) is not None]
    return [*found, (None, names)] if names else found
