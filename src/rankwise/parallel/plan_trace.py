"""What autograd keeps of a forward pass, measured on fake tensors: shapes and storages, but no memory.

Activations are what is saved for backward, by ``torch.autograd.graph.saved_tensors_hooks``: distinct storages, less those of
parameters and buffers. Why not ``torch.distributed._tools.mem_tracker.MemTracker``: it is private, needs a backward, and gives
one peak, where a plan needs to know what lies in a block that is checkpointed, and what tensor parallelism splits.

Why fake tensors that call themselves "cpu", and not the meta device: attention on meta takes the path that keeps the whole
matrix of scores, on the CPU the one that does not, as on a GPU. Fake "cuda" tensors can't be differentiated without CUDA.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rankwise.base.errors import ModelError, UsageError
from rankwise.parallel.tensor_experts import count_experts, route_evenly
from rankwise.parallel.trees import cast, following_forward, list_tensors, make_fakes, map_tensors


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """What autograd keeps between forward and backward, in bytes.

    Attributes:
        outside: What is saved outside of blocks.
        blocks: For each call of a block: what is saved in it and stays whole, and what tensor parallelism splits.
        outside_split: What is saved outside of blocks and split by tensor parallelism.
        inputs: What a checkpoint at each block keeps: the blocks' inputs, each once, as far as they aren't saved
            outside.
        inputs_inside: For each call, how much of what it saves is its own input.
        largest: The largest floating-point tensor among all: backward makes a gradient as large.
        before: How much of ``outside`` and ``outside_split`` is saved before the first block is called.
        received: For each call of a block, the first tensor that it is given: what the block before hands on.
        output: What the model returns.
    """

    outside: int
    outside_split: int
    blocks: tuple[tuple[int, int], ...]
    inputs: int
    inputs_inside: tuple[int, ...]
    largest: int
    before: int = 0
    received: tuple[int, ...] = ()
    output: int = 0

    def saved(self, *, tensor: int = 1, checkpointing: bool = False) -> int:
        """Return the bytes that are held when backward begins; with checkpoints (Chen et al., arXiv:1604.06174), when it has the largest block anew."""
        outside = self.outside + -(-self.outside_split // tensor)
        inside = [whole + -(-split // tensor) for whole, split in self.blocks]
        if not checkpointing:
            return outside + sum(inside)
        anew = (held - own for held, own in zip(inside, self.inputs_inside, strict=True))
        return outside + self.inputs + max(anew, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a rank does in a step, as given to ``plan``."""

    batch: Any
    loss: Callable[[nn.Module, Any], Any] | None
    micro_batch: int | None


@final
@dataclass(slots=True)
class _Saved:
    """A storage that autograd has saved; held, so that its address stays its own."""

    storage: Any
    size: int
    call: int | None
    is_float: bool
    is_split: bool


@final
@dataclass(slots=True)
class ForwardTrace:
    """One forward pass, watched: which storage is saved where, and which Linear layers form pairs.

    Tensor parallelism (Shoeybi et al., arXiv:1909.08053) splits the first layers of a pair by columns and the last one
    by rows, and so all that is saved between them. Layers with the same input come first together: query, key and
    value; gate and up.
    """

    own: set[int]
    names: Mapping[int, str]
    is_across: bool
    saved: dict[int, _Saved] = field(default_factory=dict)
    inputs: list[dict[int, int]] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    before: set[int] = field(default_factory=set)
    output: int = 0
    split: dict[str, int] = field(default_factory=dict)
    call: int | None = None
    pair_input: int | None = None
    first: list[nn.Linear] = field(default_factory=list)
    between: list[int] = field(default_factory=list)

    def keep(self, one: Tensor) -> Tensor:
        """Note the storage of a tensor that autograd saves, once, with where the forward pass is; return the tensor."""
        storage = one.untyped_storage()
        key = storage._cdata
        if key in self.own or key in self.saved:
            return one
        is_between = self.pair_input is not None and key != self.pair_input
        if not self.inputs:
            self.before.add(key)
        self.saved[key] = _Saved(storage, storage.nbytes(), self.call, one.is_floating_point(), is_between)
        if is_between:
            self.between.append(key)
        return one

    def enter_block(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a call of a block; a checkpoint would keep its inputs."""
        self.call = len(self.inputs)
        given = list_tensors((args, list(kwargs.values())))  # in the caller's order
        storages = [one.untyped_storage() for one in given]
        self.received.append(given[0].nbytes if given else 0)
        self.inputs.append({one._cdata: one.nbytes() for one in storages if one._cdata not in self.own})
        if not self.is_across:
            self.drop_pair()

    def leave_block(self, *_: Any) -> None:
        """End it."""
        self.call = None
        if not self.is_across:
            self.drop_pair()

    def leave_model(self, _: nn.Module, __: Any, result: Any) -> None:
        """Note what the model returns."""
        self.output = sum(one.nbytes for one in list_tensors(result))

    def enter_linear(self, layer: nn.Module, args: Any) -> None:
        """Begin a pair, or continue with its first layers."""
        if not isinstance(layer, nn.Linear) or not args or not (self.is_across or self.call is not None):
            return
        key = args[0].untyped_storage()._cdata
        if self.pair_input is None or key == self.pair_input:
            self.pair_input = key
            self.first.append(layer)

    def leave_linear(self, layer: nn.Module, *_: Any) -> None:
        """End a pair with its last layer: what is between can be split."""
        if self.pair_input is None or layer in self.first:
            return
        for one in self.first:
            self.split |= {self.names[id(held)]: 0 for held in one.parameters()}
        self.split[self.names[id(layer.weight)]] = 1
        self.pair_input, self.first, self.between = None, [], []

    def drop_pair(self) -> None:
        """Forget a first layer that no second one has followed: it stays whole, and so does what came of it."""
        for key in self.between:
            self.saved[key].is_split = False
        self.pair_input, self.first, self.between = None, [], []

    def summarize(self) -> Activations:
        """Return the sums."""
        num_calls = len(self.inputs)
        whole, split, own = [0] * num_calls, [0] * num_calls, [0] * num_calls
        outside = {False: 0, True: 0}
        for key, one in self.saved.items():
            if one.call is None:
                outside[one.is_split] += one.size
                continue
            (split if one.is_split else whole)[one.call] += one.size
            own[one.call] += one.size if key in self.inputs[one.call] and not one.is_split else 0
        inputs = {
            key: size
            for each in self.inputs
            for key, size in each.items()
            if key not in self.saved or self.saved[key].call is not None
        }
        return Activations(
            outside=outside[False], outside_split=outside[True], blocks=tuple(zip(whole, split, strict=True)), inputs=sum(inputs.values()),
            inputs_inside=tuple(own), largest=max((one.size for one in self.saved.values() if one.is_float), default=0),
            before=sum(self.saved[key].size for key in self.before), received=tuple(self.received), output=self.output,
        )  # fmt: skip


def trace_forward(
    model: nn.Module, blocks: Mapping[str, nn.Module], dtype: torch.dtype, work: Work, *, autocast: bool
) -> ForwardTrace:
    """Run one forward pass on fake tensors and return what it saved; pairs of layers are sought in blocks, then in all."""
    traced = _trace_once(model, blocks, dtype, work, autocast=autocast, is_across=not blocks)
    if not traced.split and blocks:
        return _trace_once(model, blocks, dtype, work, autocast=autocast, is_across=True)
    return traced


def _trace_once(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    dtype: torch.dtype,
    work: Work,
    *,
    autocast: bool,
    is_across: bool,
) -> ForwardTrace:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        fake = copy_as_fake(model, mode, dtype)
    except Exception as error:  # a module may hold what can't be copied, and raise anything
        raise ModelError(
            f"the model can't be copied, which its forward pass without values needs: {type(error).__name__}: {error}",
            hint="leave the batch out: weights are counted without it",
        ) from error
    tensors = [*fake.parameters(), *fake.buffers()]
    trace = ForwardTrace(
        {one.untyped_storage()._cdata for one in tensors},
        {id(one): name for name, one in fake.named_parameters()},
        is_across,
    )
    fake.register_forward_hook(trace.leave_model)
    for name, module in fake.named_modules():
        if name in blocks:
            module.register_forward_pre_hook(trace.enter_block, with_kwargs=True)
            module.register_forward_hook(trace.leave_block)
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(trace.enter_linear)
            module.register_forward_hook(trace.leave_linear)
    with mode:
        batch = make_fake_batch(work.batch, work.micro_batch, dtype)
    computing = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext()
    saving = torch.autograd.graph.saved_tensors_hooks(trace.keep, lambda one: one)
    with following_forward("followed: leave the batch out"), mode, computing, saving:
        result = work.loss(fake, batch) if work.loss is not None else call_model(fake, batch)
    for one in list_tensors(result):
        trace.keep(one)
    trace.drop_pair()
    for name, module in model.named_modules():
        if count_experts(module):
            trace.split |= {f"{name}.{own}": 0 for own, _ in module.named_parameters()}
    return trace


def read_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that a batch stands for: a mapping of them, a sequence of them, or the only one."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch."""
    args, kwargs = read_call(batch)
    return model(*args, **kwargs)


def copy_as_fake(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> nn.Module:
    """Copy a model without its storage."""
    memo: dict[int, Any] = {}
    make_fakes(model, mode, memo, dtype=dtype)
    with mode:
        fake = copy.deepcopy(model, memo)
    route_evenly(fake)
    return fake


def make_fake_batch(batch: Any, micro_batch: int | None, dtype: torch.dtype) -> Any:
    """Return the batch as fakes, with as many samples as asked for; floating-point inputs as FSDP casts them."""
    counts = sorted({one.shape[0] for one in list_tensors(batch) if one.dim()})
    if micro_batch is not None and len(counts) > 1:
        raise UsageError(
            f"micro_batch={micro_batch} needs tensors that begin with the same dim, and those of the batch begin with {' and '.join(map(str, counts))}",
            hint="give a batch of the right size, and micro_batch=None",
        )

    def fake(one: Tensor) -> Tensor:
        shape = (micro_batch, *one.shape[1:]) if micro_batch is not None and one.dim() else one.shape
        return torch.empty(shape, dtype=cast(one.dtype, dtype), device="cpu", requires_grad=one.requires_grad)

    return map_tensors(batch, fake)
