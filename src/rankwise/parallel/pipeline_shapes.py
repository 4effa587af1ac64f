"""Which shapes flow between the blocks of a model, from one forward on fake tensors: no memory, no message, no side effect.

torch's stages take the shapes of the first micro-batch for all, and Gloo aborts the process that receives another size. Here each rank
works out for itself what each micro-batch needs, before anything is sent.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rankwise.base.errors import ModelError, UsageError
from rankwise.parallel.layouts import to_local
from rankwise.parallel.pipeline_layout import find_hidden, put_tensors, take_tensors
from rankwise.runtime.nested import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rankwise.parallel.pipeline_layout import Layout

_log = logging.getLogger("torch._subclasses.fake_tensor")
#: So many kinds of micro-batches are remembered.
_MOST_KEPT = 64


@final
@dataclass(frozen=True, slots=True)
class Form:
    """A tensor without its values.

    Attributes:
        shape: Of the tensor.
        dtype: Of its values.
        has_grad: Whether a gradient comes back for it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_grad: bool = False


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """The shapes of one micro-batch.

    Attributes:
        inputs: For each block what flows into it.
        returned: For each block what it returns, with a slot for the tensor that flows on.
        outside: For each module around the blocks what it returns, and the forms of the tensors in it.
        output: What the model returns.
        output_forms: The forms of the tensors in it.
    """

    inputs: tuple[Form, ...]
    returned: tuple[Any, ...]
    outside: Mapping[str, tuple[Any, tuple[Form, ...]]]
    output: Any
    output_forms: tuple[Form, ...]
    bounds: tuple[int, ...]

    def enters(self, stage: int) -> tuple[Form, ...]:
        """Return what a stage receives."""
        return (self.inputs[self.bounds[stage]],) if 0 < stage < len(self.bounds) - 1 else ()


@final
class Shapes:
    """Finds the plans of micro-batches.

    Args:
        model: The whole model, of which a copy without values is kept.
        layout: Where it can be cut.
    """

    def __init__(self, model: nn.Module, layout: Layout, bounds: Sequence[int]) -> None:
        self._bounds = tuple(bounds)
        self._layout, self._mode = layout, FakeTensorMode(allow_non_fake_inputs=True)
        self._model = _copy_as_fake(model, self._mode)
        self._dtype: torch.dtype | None = None
        self._plans: dict[str, Plan] = {}

    def compute_in(self, dtype: torch.dtype | None) -> None:
        """Let the blocks compute in another dtype than their own."""
        self._dtype = dtype
        made: dict[int, nn.Parameter] = {}
        for module in (
            self._model.modules() if dtype is not None else ()
        ):  # not by to(): fake tensors can't be swapped
            for name, one in module._parameters.items():
                if one is not None and one.is_floating_point():
                    with self._mode:
                        fake = (
                            made[id(one)]
                            if id(one) in made
                            else nn.Parameter(torch.empty(one.shape, dtype=dtype), one.requires_grad)
                        )
                    made[id(one)] = made[id(fake)] = module._parameters[name] = fake

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Plan:
        """Return the plan of a micro-batch; the same on every rank that has inputs of the same shapes.

        Raises:
            ModelError: The model does with its blocks what can't be cut.
        """
        key = repr((describe((args, kwargs)), training, _autocast(), self._dtype))
        plan = self._plans.get(key)
        if plan is None:
            while len(self._plans) >= _MOST_KEPT:
                del self._plans[next(iter(self._plans))]
            plan = self._plans[key] = self._trace(args, kwargs, training=training)
        return plan

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Plan:
        watch = _Watch(self._layout, self._model)
        self._model.train(training)
        tree, tensors = take_tensors((args, kwargs))
        handles = [*watch.register()]
        enabled, dtype = _autocast()
        _log.disabled, was_disabled = True, _log.disabled  # what goes wrong is an error of ours
        try:
            with self._mode, torch.enable_grad(), torch.autocast("cpu", dtype, enabled=enabled):
                fakes = [torch.empty(one.shape, dtype=self._cast(one.dtype)) for one in tensors]
                taken = put_tensors(tree, fakes)
                output, found = take_tensors(self._model(*taken[0], **taken[1]))
        except (ModelError, UsageError):
            raise
        except Exception as error:  # the user's forward may raise anything
            raise ModelError(
                f"the forward pass can't be followed without values: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
                hint="is the batch what the model is called with? A model that looks at values can't be cut into stages",
            ) from error
        finally:
            _log.disabled = was_disabled
            for one in handles:
                one.remove()
        watch.check_end(found)
        return Plan(
            tuple(watch.inputs),
            tuple(watch.returned),
            dict(watch.outside),
            output,
            tuple(map(form_of, found)),
            self._bounds,
        )

    def _cast(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype


def form_of(tensor: Tensor) -> Form:
    """Return a tensor's form."""
    return Form(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def describe(tree: Any) -> list[str]:
    """Return the leaves of a batch as text: tensors by form."""
    return [f"{path} {tuple(one.shape)} {one.dtype}" if isinstance(one, Tensor) else f"{path} {one!r}" for path, one in flatten(tree)]  # fmt: skip


def _autocast() -> tuple[bool, torch.dtype]:
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            return True, torch.get_autocast_dtype(kind)
    return False, torch.bfloat16


@final
@dataclass(slots=True)
class _Watch:
    """One forward, looked at: blocks must be called in order, and each with what the one before has returned.

    What leaves a block is cut off from the graph, as it will be by the pipeline: whatever else reaches the blocks or the output from
    there would be lost.
    """

    layout: Layout
    model: nn.Module
    inputs: list[Form] = field(default_factory=list)
    returned: list[Any] = field(default_factory=list)
    outside: dict[str, tuple[Any, tuple[Form, ...]]] = field(default_factory=dict)
    flowing: Tensor | None = None
    cut_off: dict[int, str] = field(default_factory=dict)
    held: list[Tensor] = field(default_factory=list)

    def register(self) -> list[Any]:
        """Put the hooks in place; return their handles."""
        handles = []
        for number, name in enumerate(self.layout.blocks):
            block = self.model.get_submodule(name)
            handles.append(block.register_forward_pre_hook(self._enter(number), with_kwargs=True))
            handles.append(block.register_forward_hook(self._leave(number)))
        around = (*self.layout.before, *self.layout.behind)
        handles += [self.model.get_submodule(name).register_forward_hook(self._pass(name)) for name in around]
        return handles

    def _enter(self, number: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            name = self.layout.blocks[number]
            if len(self.inputs) != number or len(self.returned) != number:
                expected = self.layout.blocks[len(self.returned)] if len(self.returned) < len(self.layout.blocks) else "the end"  # fmt: skip
                raise ModelError(f"block {name!r} is called where {expected!r} was expected", hint="blocks of a pipeline are called once each, in the order in which the model holds them")  # fmt: skip
            hidden = find_hidden((args, kwargs))
            if number and hidden is not self.flowing:
                raise ModelError(
                    f"block {name!r} takes a tensor of shape {tuple(hidden.shape)} that is not what {self.layout.blocks[number - 1]!r} has returned: a stage receives one tensor, from the stage before",
                    hint="move what is computed between the blocks into them, and hand on one tensor",
                )
            for _, leaf in flatten((args, kwargs)):
                if number and isinstance(leaf, Tensor) and leaf is not hidden and leaf.requires_grad:
                    raise ModelError(
                        f"block {name!r} takes a second input, of shape {tuple(leaf.shape)}, that depends on parameters or other blocks: a stage receives one tensor, from the stage before",
                        hint="concatenate the two, or compute the second one inside of the blocks",
                    )
            self.inputs.append(form_of(hidden))

        return hook

    def _leave(self, number: int) -> Callable[..., Any]:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            tree, tensors = take_tensors(output)
            if len(tensors) != 1:
                raise ModelError(
                    f"block {self.layout.blocks[number]!r} returns {len(tensors)} tensors: a stage sends one",
                    hint="let the blocks hand on one tensor",
                )
            self.returned.append(tree)
            self.flowing = self._cut(tensors[0], self.layout.blocks[number])
            return put_tensors(tree, [self.flowing])

        return hook

    def _pass(self, name: str) -> Callable[..., Any]:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            is_behind = len(self.returned) == len(self.layout.blocks)
            if self.inputs and not is_behind:
                return None  # called by a block
            if is_behind != (name in self.layout.behind):
                side = ("before", "behind")
                raise ModelError(
                    f"{name!r} is computed {side[is_behind]} the blocks, and the model holds it {side[not is_behind]} them",
                    hint="let __init__ make modules in the order in which forward calls them; a head that shares the embedding's weight is a layer of its own",
                )
            tree, tensors = take_tensors(output)
            self.outside[name] = (tree, tuple(map(form_of, tensors)))
            return None if is_behind else put_tensors(tree, [self._cut(one, name) for one in tensors])

        return hook

    def _cut(self, tensor: Tensor, name: str) -> Tensor:
        own = tensor.detach().requires_grad_(tensor.is_floating_point())
        self.cut_off[id(own)] = name
        self.held.append(own)  # an id is good as long as its tensor
        return own

    def check_end(self, outputs: tuple[Tensor, ...]) -> None:
        """See that the output depends on the last block, and on nothing else that another stage has."""
        missing = self.layout.blocks[len(self.returned) :]
        if missing:
            raise ModelError(f"block {missing[0]!r} is not called", hint="leave it out of blocks=, or out of the model")  # fmt: skip
        modules = [self.model.get_submodule(name) for name in self.layout.behind]
        owners = [self.model.get_submodule(name) for name in self.layout.owners]
        behind = {id(one) for module in modules for one in module.parameters()}
        behind |= {id(one) for module in owners for one in module.parameters(recurse=False)}
        names = {id(one): name for name, one in self.model.named_parameters()} | self.cut_off
        for leaf in _list_leaves(outputs):
            if leaf is not self.flowing and id(leaf) in names and id(leaf) not in behind:
                raise ModelError(
                    f"what the model returns depends on {names[id(leaf)]!r} other than through the blocks: another stage has that",
                    hint="a connection around the blocks can't be cut",
                )


def _list_leaves(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the leaves that tensors were computed from."""
    waiting: list[Any] = [one.grad_fn for one in outputs if one.grad_fn is not None]
    found, seen = [one for one in outputs if one.grad_fn is None and one.requires_grad], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [one for one, _ in node.next_functions]
    return found


def _copy_as_fake(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copy a model without its storage, of split layers this rank's part; without hooks, which may send something."""
    held = [*model.parameters(), *model.buffers()]
    held += [one for module in model.modules() for one in vars(module).values() if isinstance(one, Tensor)]
    memo: dict[int, Any] = {}
    hooks = [getattr(module, name) for module in model.modules() for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")]  # fmt: skip
    with mode:
        for one, local in zip(held, to_local(held), strict=True):
            fake = torch.empty(local.shape, dtype=one.dtype, device="cpu")
            memo[id(one)] = nn.Parameter(fake, one.requires_grad) if isinstance(one, nn.Parameter) else fake
        for one in hooks:
            memo[id(one)] = type(one)()
        return copy.deepcopy(model, memo)
