"""Gradients that are missing, or not averaged."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.collective_calls import collectives, filled_node
from rankwise.lint.analyses.job_view import above, function_of, is_distributed, text_of
from rankwise.lint.analyses.summing import divides, is_sum
from rankwise.lint.analyses.tensor_text import is_in, key_of, mention, root_of
from rankwise.lint.analyses.tensors import backward_passes, sources_of
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.notes import Quotient
from rankwise.lint.interpreter.values import ANY, Items, Method
from rankwise.lint.library.names import DDP, FSDP
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Script


@rule("RW403", "error", "D3", "for some batches the loss is a constant without a graph")
def loss_without_graph(script: Script) -> Iterator[Found]:
    for entry in script.entries:
        for back, loss in backward_passes(entry.histories[0].calls) if is_distributed(entry) else ():
            for constant in _chosen(loss):
                node = constant.node if is_in(script.tree, constant.node) else back.node
                if is_in(script.tree, node):
                    yield Found(
                        node,
                        "for some batches the loss is this constant, which has no graph: this rank reduces no gradients while the others wait",
                        "keep the graph: use `prediction.sum() * 0.0` as the loss of such a batch",
                        also=mention(script, "the backward pass", back.node),
                    )


def _chosen(loss: Value) -> Iterator[Call]:
    """Constants that a test on the data chooses in the place of what a gradient goes through."""
    for choice in (one.made for one in sources_of(loss, until=_has_other_graph)):
        if choice is not None and choice.name == "either" and choice.receiver.origin & {"data", "random", "exception"}:
            constants = [one.made for one in choice.args if one.made is not None and _is_constant(one.made)]
            if len(constants) == 1:
                yield from constants


def _has_other_graph(value: Value) -> bool:
    """Whether it is a sum of several things that were computed: one may be a constant."""
    parts = [one.made for one in value.made.args] if value.made is not None else []
    is_sum = value.made is not None and value.made.name in {"operator.Add", "operator.Sub"}
    return is_sum and not any(one is None or _is_constant(one) for one in parts)


def _is_constant(made: Call) -> bool:
    """Whether a call makes a tensor of nothing but numbers that stand in the text, or zeros."""
    word = made.name.rpartition(".")[2]
    first = made.args[0] if made.args else ANY
    parts = first.thing.values if isinstance(first.thing, Items) else [first]
    is_plain = word in {"tensor", "as_tensor", "new_tensor"} and all(one.is_known for one in parts)
    return is_plain or word in {"zeros", "zeros_like", "new_zeros"}


_CONTEXTS = frozenset({"no_sync", "no_backward_sync"})


@rule("RW408", "error", "D23", "every backward pass is inside no_sync, or no_sync has no effect")
def no_sync_too_wide(script: Script) -> Iterator[Found]:
    for entry in script.entries:
        calls = entry.histories[0].calls
        backs = list(backward_passes(calls))
        inside = [call for call, _ in backs if _is_local(call)]
        for call, loss in backs:
            forwards = [one.made for one in sources_of(loss) if one.made is not None and _is_forward(one.made)]
            at = _with_of(script, call) if _may_be_local(call) else None
            if at is not None and forwards and not any(map(_may_be_local, forwards)):
                yield Found(
                    at,
                    "no_sync has no effect here: whether gradients are reduced is decided in the forward pass, which is outside",
                    "move the forward pass into the same `with`",
                    severity="warning",
                )
        at = _with_of(script, inside[0]) if inside and len(inside) == len(backs) else None
        if at is not None and not _shares(calls) and any(call.name.endswith(".step") for call in calls):
            yield Found(
                at,
                "every backward pass is inside no_sync, so gradients are never averaged: each rank steps with its own",
                "run the last micro-batch before `optimizer.step()` outside: `with contextlib.nullcontext() if is_last else model.no_sync():`",
            )


def _is_local(call: Call) -> bool:
    return bool(_CONTEXTS & set(call.contexts))


def _may_be_local(call: Call) -> bool:
    return any(one.rstrip("?") in _CONTEXTS for one in call.contexts)


def _is_forward(call: Call) -> bool:
    return call.name in {f"{DDP}.__call__", f"{FSDP}.__call__"}


def _shares(calls: list[Call]) -> bool:
    return any(call.name.startswith("torch.distributed.") and "reduce" in call.name for call in calls)


def _with_of(script: Script, call: Call) -> ast.AST | None:
    """What the `with` around a call enters, in this file; None where ``enabled`` may switch it off."""
    sites = [node for node in (call.node, *(site.node for site in call.stack[::-1])) if is_in(script.tree, node)]
    blocks = (one for node in sites for one in above(script.tree, node) if isinstance(one, ast.With))
    for item in (item.context_expr for block in blocks for item in block.items):
        if isinstance(item, ast.Call) and getattr(item.func, "attr", "") not in _CONTEXTS:
            continue
        given = [*item.args[1:], *(one.value for one in item.keywords)] if isinstance(item, ast.Call) else []
        return None if any(not isinstance(one, ast.Constant) for one in given) else item
    return None


_HOOKS = ("register_hook", "register_comm_hook", "register_post_accumulate_grad_hook")


@rule("RW409", "error", "D25", "gradients are divided by the number of ranks never, or twice")
def gradients_not_divided(script: Script) -> Iterator[Found]:
    for place in collectives(script, "all_reduce", "all_reduce_coalesced"):
        call = place.last
        node, value = filled_node(call), call.arg(0, "tensor", "tensors")
        if node is None or value is None or not is_sum(call):
            continue
        function = function_of(script.tree, call.node)
        if not (_is_gradient(value) or _is_hook(script, function)):
            continue
        if divides(script, function) or not _is_whole(script, function):
            continue
        yield Found(
            call.node,
            f"`{text_of(node)}` becomes the sum over all ranks and is never divided, so each step is too large by the number of ranks",
            f"divide afterwards, `{text_of(root_of(node) or node)} /= dist.get_world_size()`, or reduce with `op=dist.ReduceOp.AVG`",
        )
    yield from _divided_again(script)


def _divided_again(script: Script) -> Iterator[Found]:
    """A loss that is divided by the number of ranks before a backward pass which averages over them."""
    if any(call.name.endswith("register_comm_hook") for call in script.all_calls):
        return  # which may sum
    notes = (note for note in script.notes if isinstance(note, Quotient) and note.module is script.module)
    divisions = {
        note.node
        for note in notes
        if note.left.via and getattr(note.right.thing, "name", "") == "world_size" and not _sums_backward(note.left)
    }
    losses = [loss for entry in script.entries for _, loss in backward_passes(entry.histories[0].calls)]
    made = {one.made.node for loss in losses for one in sources_of(loss) if one.made is not None}
    for node in divisions & made:
        yield Found(
            node,
            f"`{text_of(node)}` divides the loss by the number of ranks, and the wrapped model averages its gradients: each step is too small by that number",
            "leave the loss as it is on each rank",
            severity="warning",
        )


def _sums_backward(value: Value) -> bool:
    """Whether a collective made it whose backward pass adds up the gradients of all ranks."""
    return any(
        one.made is not None and one.made.name.startswith("torch.distributed.nn.")
        for one in sources_of(value, cuts=False)
    )


def _is_gradient(value: Value) -> bool:
    """Whether it is ``p.grad``, or was put together from such, or is a bucket of DDP's."""
    words = (
        one.thing.name if isinstance(one.thing, Method) else getattr(one.made, "name", "")
        for one in sources_of(value, cuts=False)
    )
    return any(word.rpartition(".")[2] in {"grad", "buffer", "gradients"} for word in words)


def _is_hook(script: Script, function: ast.AST) -> bool:
    """Whether a function is registered as a hook that changes gradients."""
    given = (
        value
        for call in script.all_calls
        if call.name.endswith(_HOOKS)
        for value in (*call.args, *call.kwargs.values())
    )
    things = (getattr(value.thing, "function", value.thing) for value in given)
    return any(getattr(thing, "node", None) is function for thing in things)


def _is_whole(script: Script, function: ast.AST) -> bool:
    """Whether the callers of the function are in this file too: they may divide."""
    return function is script.tree or any(
        isinstance(one, (ast.Name, ast.Attribute))
        and isinstance(one.ctx, ast.Load)
        and key_of(one).rpartition(".")[2] == getattr(function, "name", "")
        for one in ast.walk(script.tree)
    )
