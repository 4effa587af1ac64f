"""Collectives that carry gradients: what the other ranks made of our values flows back to us.

The gradient is that of the *sum* of all ranks' losses. One process that holds everything and computes one loss gets
the same gradient if that loss is the sum of the ranks' losses. Where every rank computes the whole loss from gathered
values, as contrastive losses do, the sum counts it once for each rank: divide the loss by the number of ranks.
DistributedDataParallel averages parameter gradients over the ranks: under it, each rank's share of a summed loss
has to be multiplied by the number of ranks, and a whole loss on each rank is right as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rankwise.base.errors import CollectiveError
from rankwise.runtime import serialization
from rankwise.runtime.eager import eager
from rankwise.runtime.groups import Group, choose_carrier, resolve_group
from rankwise.runtime.nested import count_rows, describe_leaf, describe_rows, find_unfit
from rankwise.runtime.signature import agree, format_leaf, locate, naming, show_site

_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What the way back has to know of the way there."""

    name: str
    group: Group
    site: str
    rows: tuple[int, ...] = ()
    scale: float = 1.0


@eager
def all_gather_with_grad(x: Tensor, *, group: Group | None = None, name: str | None = None) -> Tensor:
    """Join the ranks' tensors along dim 0; gradients flow back to the rank that each row came from.

    Args:
        x: Shape (rows, ...), a float dtype; the number of rows may differ between ranks. A 0-d tensor is one row.
        group: The group; None: all ranks.
        name: Compared between the ranks instead of the line of the call.

    Returns:
        Shape (sum of all ranks' rows, ...), in the order of the ranks; its gradient is the sum over the ranks' losses.

    Raises:
        CollectiveError: The ranks call different things; or dtypes or dims after the first differ, or whether it
            requires grad; or ``x`` is not a float tensor.
        CollectiveTimeoutError: Some rank did not call; names it. In the backward pass: its loss does not use the
            result.

    Collective: every rank of the group must call this, in the same order, and use the result in its loss.
    """
    call, counts = _agree(x, "all_gather_with_grad", None, group=resolve_group(group), site=locate(name))
    call = replace(call, rows=tuple(int(row) for row in counts or [count_rows(x)] * call.group.size))
    out: Tensor = _AllGather.apply(x.reshape(1) if x.dim() == 0 else x, call)
    return out


@eager
def all_reduce_with_grad(
    x: Tensor, op: Literal["sum", "mean"] = "sum", *, group: Group | None = None, name: str | None = None
) -> Tensor:
    """Add a tensor over the ranks; gradients flow back to all of them.

    Args:
        x: A float dtype, of equal shape on all ranks; not modified.
        op: ``"sum"`` or ``"mean"``.
        group: The group; None: all ranks.
        name: Compared between the ranks instead of the line of the call.

    Returns:
        The sum or mean; its gradient is the sum over the ranks' losses, divided by their number for the mean.

    Raises:
        CollectiveError: As for ``all_gather_with_grad``; or the shapes differ.
        CollectiveTimeoutError: As for ``all_gather_with_grad``.

    Collective: every rank of the group must call this, in the same order, and use the result in its loss.
    """
    call, _ = _agree(x, "all_reduce_with_grad", op, group=resolve_group(group), site=locate(name))
    out: Tensor = _AllReduce.apply(x, replace(call, scale=1 / call.group.size if op == "mean" else 1.0))
    return out


def _agree(x: Any, name: str, op: str | None, *, group: Group, site: str) -> tuple[_Call, list[Any] | None]:
    fault, is_gather = _find_fault(x, op, reduces=op is not None), op is None
    text = describe_rows(x) if is_gather else describe_leaf(x)
    # Where one rank needs a gradient and another does not, only the first would reach the way back.
    needs_grad = fault is None and bool(x.requires_grad and torch.is_grad_enabled())
    must = {"op": op, "leaves": [["", text]], "requires_grad": needs_grad}
    own = count_rows(x) if is_gather and fault is None else None
    rows = agree(group, name, site=site, must=must, may=own, fault=fault)
    return _Call(name=name, group=group, site=site), rows


def _find_fault(x: Any, op: str | None, *, reduces: bool) -> CollectiveError | None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        text = f"{format_leaf(describe_leaf(x))}{'' if isinstance(x, Tensor) else f' ({x!r:.60})'}"
        hint = "only float tensors have gradients: all_gather and all_reduce take the rest"
        return CollectiveError(f"the value is {text}", hint=hint)
    if reduces and op not in {"sum", "mean"}:
        return CollectiveError(f"there is no gradient through op {op!r}", hint="choose 'sum' or 'mean'")
    return find_unfit(x)


def _sum_over_ranks(x: Tensor, call: _Call) -> Tensor:
    """Return the sum over the ranks as a tensor of its own."""
    total = x.detach().to(choose_carrier(call.group, x.device.type)).clone(memory_format=torch.contiguous_format)
    if call.group.size > 1 and total.numel():
        with naming(call.group.rank, f"{call.name} at {show_site(call.site)}"):
            dist.all_reduce(total, group=call.group.process_group)
    return total.to(x.device)


def _meet_again(call: _Call) -> _Call:
    """Make sure that all ranks are on the same way back."""
    back = replace(call, name=f"the backward pass of {call.name}")
    agree(call.group, back.name, site=call.site, must={"rows": call.rows})
    return back


def _reduce_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _sum_over_ranks(grad, _meet_again(ctx.call)) * ctx.call.scale, None


def _gather_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    """Give each rank the sum of what all ranks' losses say of its own rows."""
    call: _Call = ctx.call
    group = call.group
    if group.size == 1:
        return grad.clone(), None
    back = _meet_again(call)
    start, own = sum(call.rows[: group.position]), call.rows[group.position]
    if len(set(call.rows)) > 1:
        return _sum_over_ranks(grad, back)[start : start + own].clone(), None
    sent = grad.contiguous().to(choose_carrier(group, grad.device.type))
    mine = sent.new_empty(own, *grad.shape[1:])
    if mine.numel():
        with naming(group.rank, f"{back.name} at {show_site(back.site)}"):
            _reduce_scatter_flat(mine, sent, group=group.process_group)
    return mine.to(grad.device), None


class _AllReduce(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        return _sum_over_ranks(x, call) * call.scale

    backward = staticmethod(once_differentiable(_reduce_back))


class _AllGather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        tail, group = x.shape[1:], call.group
        if group.size == 1:
            return x.clone()
        data = x.detach().contiguous().view(-1).to(choose_carrier(group, x.device.type))
        row = tail.numel()
        with naming(group.rank, f"{call.name} at {show_site(call.site)}"):
            out = data.new_empty(sum(call.rows) * row)
            sizes = [n * row * x.element_size() for n in call.rows]
            sent, came = serialization.as_bytes(data), serialization.as_bytes(out)
            serialization.all_gather_into_bytes(came, sent, sizes, group)
        return out.view(sum(call.rows), *tail).to(x.device)

    backward = staticmethod(once_differentiable(_gather_back))
