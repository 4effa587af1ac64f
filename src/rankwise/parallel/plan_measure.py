"""What a model, its optimizer and its forward pass hold, measured without allocating any of it.

Parameters and buffers are counted. Optimizer states are what one step of the optimizer itself makes of fake tensors.
Activations are measured by ``plan_trace``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

from rankwise.base.errors import ModelError, UsageError
from rankwise.parallel.blocks import find_blocks
from rankwise.parallel.names import list_holders
from rankwise.parallel.pipeline_layout import Deal, deal, find_layout
from rankwise.parallel.plan_trace import Activations, ForwardTrace, Work, trace_forward
from rankwise.parallel.trees import cast

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
#: What has another name, or needs a setting; any other is a class of torch.optim.
_OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One parameter, as a plan needs it.

    Attributes:
        shape: Of the whole parameter.
        itemsize: Bytes of an element where it is kept, and of its gradient.
        compute_itemsize: Bytes of an element where FSDP has gathered it for a block's forward and backward.
        is_trained: Whether it has a gradient.
        block: Number of the block that it lies in; None for one outside, or shared between blocks.
        tensor_dim: The dim that tensor parallelism splits: 0 column-wise, 1 row-wise; None if it stays whole.
        states_itemsize: Bytes of the optimizer's states for an element.
        states_bytes: Bytes of states that don't grow with the parameter, as Adam's count of steps.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    compute_itemsize: int
    is_trained: bool
    block: int | None
    tensor_dim: int | None
    states_itemsize: float
    states_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The blocks between which a model can be cut, as ``apply_pipeline`` finds them.

    Attributes:
        blocks: Their names.
        deal: Gives each stage its parts, from the bounds of the stages.
        replicated: What autograd keeps of one forward pass, by block; None without a batch. ``sharded``: the same under
            FSDP.
    """

    blocks: tuple[str, ...]
    deal: Callable[[Sequence[int]], Deal]
    replicated: Activations | None
    sharded: Activations | None

    @property
    def is_traced(self) -> bool:
        """Whether each block was called once, so that it is known what each one keeps."""
        return all(one is not None and len(one.blocks) == len(self.blocks) for one in (self.replicated, self.sharded))


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a model holds at one precision.

    Attributes:
        weights: The parameters, shared ones once.
        buffers: Bytes of all buffers.
        blocks: Names of the blocks: what FSDP gathers at once, and what a checkpoint computes again.
        replicated: Activations where each rank holds the whole model; None without an example batch.
        sharded: Activations under FSDP, which computes in ``compute_itemsize`` and needs no copies for autocast.
        row: Where the model can be cut into stages, or over devices; None if it can't be.
        tensor_degrees: What every split dim can be divided by: the greatest common divisor; 0 if nothing is split.
    """

    weights: tuple[Weight, ...]
    buffers: int
    blocks: tuple[str, ...]
    replicated: Activations | None
    sharded: Activations | None
    row: Row | None
    tensor_degrees: int


def find_optimizer(optimizer: str | OptimizerFactory) -> OptimizerFactory:
    """Return what makes an optimizer of parameters."""
    if not isinstance(optimizer, str):
        return optimizer
    classes = {
        name.lower(): one
        for name, one in vars(torch.optim).items()
        if isinstance(one, type) and issubclass(one, torch.optim.Optimizer) and one is not torch.optim.Optimizer
    }
    made = _OPTIMIZERS.get(optimizer.lower()) or classes.get(optimizer.lower())
    if made is None:
        known = ", ".join(sorted({*_OPTIMIZERS, *classes}))
        raise UsageError(
            f"there is no optimizer {optimizer!r}; there are {known}",
            hint="for another one pass a function in Python: rankwise.plan(..., optimizer=lambda parameters: Mine(parameters))",
        )
    return made


def measure(model: nn.Module, *, precision: str, optimizer: str | OptimizerFactory, work: Work) -> Facts:
    """Return what a model holds at a precision of ``plan``, without allocating any of it.

    Raises:
        ModelError: The model has no parameters, or lazy ones; it can't be copied or run on fake tensors.
        UsageError: There is no such optimizer, or it can't take these parameters.
    """
    lazy = [name for name, one in model.named_parameters() if is_lazy(one)]
    if lazy:
        raise ModelError(
            f"{lazy[0]!r} has no shape yet: lazy layers take it from a first batch",
            hint="call the model once on the CPU, or give the layers their sizes",
        )
    if not any(True for _ in model.parameters()):
        raise ModelError("the model has no parameters, so there is nothing to plan")
    kept = torch.bfloat16 if precision == "bf16-params" else torch.float32
    computed = torch.float32 if precision == "fp32" else torch.bfloat16
    blocks = find_blocks(model)
    whole, sharded = _trace_both(model, blocks, kept, computed, work)
    split = sharded.split if sharded else {}
    kinds = {name: (one.shape, cast(one.dtype, kept)) for name, one in model.named_parameters() if one.requires_grad}
    states = measure_states(kinds, find_optimizer(optimizer))
    numbers = {name: number for number, name in enumerate(blocks)}
    holders = list_holders(model.named_parameters(remove_duplicate=False), blocks)
    weights = []
    for name, one in model.named_parameters():
        per_item, fixed = states.get(name, (0.0, 0))
        weights.append(Weight(
            name=name, shape=tuple(one.shape), itemsize=cast(one.dtype, kept).itemsize, compute_itemsize=cast(one.dtype, computed).itemsize,
            is_trained=one.requires_grad, block=numbers.get(holders[name][0] or "") if len(holders[name]) == 1 else None, tensor_dim=split.get(name), states_itemsize=per_item, states_bytes=fixed,
        ))  # fmt: skip
    buffers = sum(one.numel() * cast(one.dtype, kept).itemsize for one in model.buffers())
    activations = tuple(one and one.summarize() for one in (whole, sharded))
    return Facts(
        weights=tuple(weights), buffers=buffers, blocks=tuple(blocks), replicated=activations[0], sharded=activations[1],
        row=_find_row(model, kept, computed, work, {tuple(blocks): activations}), tensor_degrees=math.gcd(*(one.shape[one.tensor_dim] for one in weights if one.tensor_dim is not None)),
    )  # fmt: skip


def _trace_both(
    model: nn.Module, blocks: Mapping[str, nn.Module], kept: torch.dtype, computed: torch.dtype, work: Work
) -> tuple[ForwardTrace | None, ForwardTrace | None]:
    """Return what a forward keeps where each rank holds the whole model, and under FSDP; None without a batch."""
    if work.batch is None:
        return None, None
    sharded = trace_forward(model, blocks, computed, work, autocast=False)
    whole = trace_forward(model, blocks, kept, work, autocast=True) if kept != computed else sharded
    return whole, sharded


def _find_row(
    model: nn.Module, kept: torch.dtype, computed: torch.dtype, work: Work, known: Mapping[Any, Any]
) -> Row | None:
    """Return the blocks that a pipeline would be cut between; as a rule, but not always, they are those that FSDP gathers."""
    try:
        layout = find_layout(model)
    except UsageError:  # it has no two blocks
        return None
    found = known.get(layout.blocks)
    if found is None:
        blocks = {name: model.get_submodule(name) for name in layout.blocks}
        found = [one and one.summarize() for one in _trace_both(model, blocks, kept, computed, work)]
    return Row(
        blocks=layout.blocks,
        deal=lambda bounds: deal(model, layout, bounds, None),
        replicated=found[0],
        sharded=found[1],
    )


def measure_states(
    kinds: Mapping[str, tuple[torch.Size, torch.dtype]], make: OptimizerFactory
) -> dict[str, tuple[float, int]]:
    """Return the bytes of states for an element, and those beside, of each parameter: what one step has made."""
    with FakeTensorMode():
        fakes = {
            name: nn.Parameter(torch.empty(shape, dtype=dtype, device="cpu")) for name, (shape, dtype) in kinds.items()
        }
        if not fakes:
            return {}
        for fake in fakes.values():
            fake.grad = torch.empty_like(fake)
        try:
            optimizer = make(list(fakes.values()))
        except Exception as error:  # an optimizer of anybody's may raise anything
            raise UsageError(
                f"the optimizer can't be made of this model's parameters: {type(error).__name__}: {error}"
            ) from error
        try:
            optimizer.step()
        except Exception as error:
            # Adafactor looks at values, which fakes have not, but after all states are made.
            if any(fake not in optimizer.state for fake in fakes.values()):
                raise UsageError(
                    f"one step of {type(optimizer).__name__} can't be made without values: {type(error).__name__}: {error}",
                    hint="give another optimizer with as many states, such as adamw",
                ) from error
    found = {}
    for name, fake in fakes.items():
        states = [one for one in optimizer.state.get(fake, {}).values() if isinstance(one, Tensor)]
        grown = sum(one.numel() * one.element_size() for one in states if one.dim())
        fixed = sum(one.element_size() for one in states if not one.dim())
        found[name] = grown / max(1, fake.numel()), fixed
    return found
