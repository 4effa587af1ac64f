"""Computes activations again in backward, and does not keep them (Chen et al., arXiv:1604.06174)."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rankwise.base.errors import UsageError
from rankwise.parallel.blocks import Blocks, find_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_aten = torch.ops.aten
#: What takes longest to compute again: products of matrices, attention, and what was sent (torchtitan keeps the same).
_EXPENSIVE = {
    getattr(_aten, name).default
    for name in (
        "mm", "bmm", "addmm", "convolution", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(_aten, name)
}  # fmt: skip


def apply_checkpointing(
    model: nn.Module,
    mode: Literal["full", "selective"] | int = "full",
    *,
    blocks: Blocks = "auto",
    context_fn: Callable[[], Any] | None = None,
) -> nn.Module:
    """Keep only the inputs of a model's blocks, and recompute what is inside in backward: less memory for a third more time.

    The model's structure and names stay as they are. Call it after ``apply_tensor_parallel`` and before ``apply_fsdp``
    or ``apply_ddp``.

    Args:
        model: Changed in place.
        mode: "full": every block. A number n: every n-th. "selective": in every block what is expensive to compute,
            products of matrices and attention, is kept.
        blocks: Which parts; as for ``apply_fsdp``.
        context_fn: As for ``torch.utils.checkpoint.checkpoint``; not with "selective".

    Returns:
        The model.

    Raises:
        UsageError: An unknown mode, or the model has no such blocks.
    """
    is_number = isinstance(mode, int) and not isinstance(mode, bool) and mode > 0
    if not is_number and mode not in ("full", "selective"):
        raise UsageError(f"mode={mode!r}", hint="'full', 'selective', or a number: every n-th block")
    if mode == "selective":
        if context_fn is not None:
            raise UsageError("context_fn with mode='selective', which has its own", hint="leave one of them out")
        context_fn = partial(create_selective_checkpoint_contexts, _choose)
    found = find_blocks(model, blocks)
    if not found:
        raise UsageError(
            f"nothing in this {type(model).__name__} is repeated, so no block was found",
            hint="name the parts: blocks=['encoder', 'decoder'], or a class",
        )
    every = mode if isinstance(mode, int) else 1
    options = {} if context_fn is None else {"context_fn": context_fn}
    for block in list(found.values())[::every]:
        # In the place of forward, so that hooks on the block run once. A method, so that a copy of the block calls its
        # own.
        own = block.__dict__.get("forward")  # put there by adapters and fused kernels
        if getattr(own, "__func__", None) is not _forward:
            block._checkpointed_forward = own
        block._checkpoint_options = options
        block.forward = MethodType(_forward, block)
    return model


def _forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward: Any = block._checkpointed_forward or type(block).forward.__get__(block)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    options: Any = block._checkpoint_options
    if next(block.buffers(), None) is not None and not torch.compiler.is_compiling():
        options = {"context_fn": partial(_make_contexts, block, options.get("context_fn"))}
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _make_contexts(block: nn.Module, context_fn: Callable[[], Any] | None) -> tuple[Any, Any]:
    first, again = (nullcontext(), nullcontext()) if context_fn is None else context_fn()
    return first, _going_back(block, _keep_buffers(block), again)


@final
class _Kept(NamedTuple):
    """A buffer as the first forward found it; ``value`` is a copy, None where it is not known to change."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    value: Tensor | None

    @property
    def is_changed(self) -> bool:
        """Whether a forward has written it since.

        BatchNorm's kernels write without a new version, so values count, too.
        """
        if self.module._buffers.get(self.name) is not self.buffer or _read_version(self.buffer) != self.version:
            return True
        try:
            return self.value is not None and not torch.equal(self.value, self.buffer)
        except RuntimeError:  # without values, or of a layout that can't be compared
            return True


def _keep_buffers(block: nn.Module) -> list[_Kept]:
    # Which ones change is learned in the first backward of each mode, and only these are copied from then on.
    known = block.__dict__.setdefault("_checkpoint_changing", {}).get(block.training)
    return [
        _Kept(module, name, one, _read_version(one), one.detach().clone() if known is None or (path, name) in known else None)
        for path, module in block.named_modules()
        for name, one in module._buffers.items()
        if one is not None
    ]  # fmt: skip


def _read_version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


@contextmanager
def _going_back(block: nn.Module, kept: list[_Kept], inside: Any) -> Iterator[None]:
    """Give a forward that is made again the buffers that the first one found, and leave the block's as they are.

    Else BatchNorm would count each batch twice, and what a block computes from a buffer that it updates would be
    something else. A buffer that changes for the first time in a later step has no copy then: in that one step the
    second forward begins from what stands there.
    """
    learned: dict[bool, set[tuple[str, str]]] = block.__dict__["_checkpoint_changing"]
    paths = {module: path for path, module in block.named_modules()}
    known = learned.get(block.training, set())
    changed = [one for one in kept if (paths.get(one.module), one.name) in known or one.is_changed]
    learned[block.training] = known | {(paths[one.module], one.name) for one in changed if one.module in paths}
    stood = [(one, one.module._buffers[one.name]) for one in changed if one.name in one.module._buffers]
    copies: dict[int, Tensor] = {}  # a buffer of two modules stays one
    for one, _ in stood:
        value = one.buffer.detach() if one.value is None else one.value
        # Others in its place, not other values in it: backward reads what the second forward has saved.
        one.module._buffers[one.name] = copies.setdefault(id(one.buffer), value.clone())
    try:
        with inside:
            yield
    finally:
        for one, buffer in stood:
            one.module._buffers[one.name] = buffer


def _choose(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE
