"""Gradients that are missing, or not averaged."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import Found
from rankwise.lint.model.values import Spread
from rankwise.lint.rule import rule
from rankwise.lint.topics.collective_calls import collectives, filled_node, word_of
from rankwise.lint.topics.job_view import above, function_of, is_distributed, statement_of, text_of
from rankwise.lint.topics.summing import divides, is_sum
from rankwise.lint.topics.tensor_text import (
    backward_of,
    bindings,
    is_in,
    key_of,
    last_value,
    loads,
    mention,
    own_parts,
    root_of,
    statements_in,
    targets_of,
)
from rankwise.lint.topics.wrapping import OFF

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Entry, Script

_CONSTANTS = frozenset({"torch.tensor", "torch.zeros", "torch.zeros_like", "torch.as_tensor", "torch.full"})
_ASKS_DATA = frozenset({"len", "sum", "any", "all", "numel", "size", "nonzero", "isnan", "item", "count_nonzero", "isfinite", "isinf", "max", "min",
                        "is_empty"})  # fmt: skip


@rule("RW403", "error", "D3", "for some batches the loss is a constant without a graph")
def loss_without_graph(script: Script) -> Iterator[Found]:
    reported: set[int] = set()
    for entry in script.entries:
        if not is_distributed(entry):
            continue
        for call in entry.histories[0].calls:
            if (
                not _is_constant(call)
                or OFF & set(call.contexts)
                or _is_input(call, entry.histories[0].calls)
            ):
                continue
            back = _back(call)
            node = call.node if is_in(script.tree, call.node) else back
            if back is None or node is None or not is_in(script.tree, node) or id(node) in reported:
                continue
            reported.add(id(node))
            yield Found(
                node,
                "for some batches the loss is this constant, which has no graph: this rank reduces no gradients while the others wait",
                "keep the graph: use `prediction.sum() * 0.0` as the loss of such a batch",
                also=mention(script, "the backward pass", back),
            )


def _is_constant(call: Call) -> bool:
    word = call.name.rpartition(".")[2]
    if call.name in _CONSTANTS:
        first = call.arg_node(0)
        if word in {"zeros_like", "zeros"}:
            return True
        if word == "full":
            return False
        return isinstance(first, ast.Constant) or (
            isinstance(first, ast.List) and all(isinstance(one, ast.Constant) for one in first.elts)
        )
    return word == "new_zeros" or (word == "new_tensor" and isinstance(call.arg_node(0), ast.Constant))


def _is_input(call: Call, calls: list[Call]) -> bool:
    """Whether a model is called on the constant: it replaces a batch, and the output has a graph."""
    statement = statement_of(call.module.tree, call.node)
    if not isinstance(statement, ast.Assign):
        return False
    keys = {key_of(one) for one in statement.targets}
    return any(
        key_of(argument) in keys
        for one in calls
        if one.name.endswith(("Parallel.__call__", "nn.Module.__call__")) and one.function is call.function
        for argument in getattr(one.node, "args", ())
    )


def _back(call: Call) -> ast.Call | None:
    tree = call.module.tree
    statement = statement_of(tree, call.node)
    parent = next(above(tree, call.node), None)
    if statement is None or not isinstance(parent, (ast.stmt, ast.IfExp, ast.Call, ast.Attribute)):
        return None
    if _is_in_data_branch(call, statement):
        return _follow(call)
    if isinstance(statement, ast.Assign) and _grows_only_sometimes(call, statement):
        return _follow(call)
    return None


def _follow(call: Call) -> ast.Call | None:
    def stops(statement: ast.AST, key: str) -> bool:
        """`loss = loss + more` for every batch."""
        if isinstance(statement, ast.AugAssign) and key_of(statement.target) == key:
            return not isinstance(statement.value, ast.Constant) and not _is_in_branch(
                call.module.tree, statement
            )
        if not isinstance(statement, ast.Assign) or key not in {key_of(one) for one in statement.targets}:
            return False
        others = {key_of(one) for one in ast.walk(statement.value) if isinstance(one, ast.Name)} - {key}
        return (
            isinstance(statement.value, ast.BinOp)
            and isinstance(statement.value.op, ast.Add)
            and bool(others)
            and not _is_in_branch(call.module.tree, statement)
        )

    return backward_of(call.module, call.node, "", call.stack, stops=stops)


def _is_in_branch(tree: ast.Module, node: ast.AST) -> bool:
    for one in above(tree, node):
        if isinstance(one, (ast.If, ast.ExceptHandler, ast.IfExp)):
            return True
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
    return False


def _is_in_data_branch(call: Call, statement: ast.stmt) -> bool:
    """Whether the nearest branch around it tests the data: the number of targets, whether all is finite."""
    tree = call.module.tree
    for one in above(tree, call.node):
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.For, ast.While)):
            return False
        if isinstance(one, (ast.If, ast.IfExp)):
            return _asks_data(call, one.test)
        if isinstance(one, ast.ExceptHandler):
            return isinstance(statement, (ast.Return, ast.Assign))
    return False


def _asks_data(call: Call, test: ast.AST) -> bool:
    value = next((value for node, value, _ in call.tests if node is test), None)
    if value is not None and value.spread is Spread.LOCAL:
        return True
    words = {
        key_of(one.func).rpartition(".")[2] or getattr(one.func, "attr", "")
        for one in ast.walk(test)
        if isinstance(one, ast.Call)
    }
    shaped = any(
        isinstance(one, ast.Attribute) and one.attr in {"shape", "nelement"} for one in ast.walk(test)
    )
    return bool(words & _ASKS_DATA) or shaped


def _grows_only_sometimes(call: Call, statement: ast.Assign) -> bool:
    """`loss = torch.zeros(1)` to which only some batches add, below a test on the data."""
    tree, key = call.module.tree, key_of(statement.targets[0])
    grows = [
        one
        for one in statements_in(function_of(tree, statement))
        if one is not statement and isinstance(one, (ast.Assign, ast.AugAssign)) and key in {key_of(part) for part in targets_of(one)}
        and one.lineno > statement.lineno and (isinstance(one, ast.AugAssign) or loads(list(own_parts(one)), key))
    ]  # fmt: skip
    return bool(key) and bool(grows) and all(_is_below_data_test(call, one) for one in grows)


def _is_below_data_test(call: Call, node: ast.AST) -> bool:
    for one in above(call.module.tree, node):
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        if isinstance(one, ast.If):
            return _asks_data(call, one.test) or any(
                isinstance(part, ast.Compare) and isinstance(part.left, ast.Subscript)
                for part in ast.walk(one.test)
            )
    return False


_CONTEXTS = frozenset({"no_sync", "no_backward_sync"})


@rule("RW408", "error", "D23", "every backward pass is inside no_sync, or no_sync has no effect")
def no_sync_too_wide(script: Script) -> Iterator[Found]:
    for entry in script.entries:
        calls = entry.histories[0].calls
        backs = [call for call in calls if call.name.endswith(".backward")]
        yield from _without_forward(script, calls, backs)
        inside = [call for call in backs if _in_context(call)]
        if not inside:
            continue
        node = _with_of(script, inside[0])
        if node is None:
            continue
        if len(inside) == len(backs) and not _shares(calls) and _steps(calls, entry):
            yield Found(
                node,
                "every backward pass is inside no_sync, so gradients are never averaged: each rank steps with its own",
                "run the last micro-batch before `optimizer.step()` outside: `with contextlib.nullcontext() if is_last else model.no_sync():`",
            )


def _without_forward(script: Script, calls: list[Call], backs: list[Call]) -> Iterator[Found]:
    """`no_sync` around the backward pass, while the forward pass is outside."""
    for call in backs:
        block = next(
            (
                one
                for one in above(script.tree, call.node)
                if isinstance(one, ast.With) and _leads_to_no_sync(script.tree, one)
            ),
            None,
        )
        if block is None:
            continue
        inside = {id(one) for one in ast.walk(block)}
        forwards = [one for one in calls if _is_forward(one)]
        if forwards and not any(
            id(node) in inside for one in forwards for node in (one.node, *(site.node for site in one.stack))
        ):
            yield Found(
                block.items[0].context_expr,
                "no_sync has no effect here: whether gradients are reduced is decided in the forward pass, which is outside",
                "move the forward pass into the same `with`",
                severity="warning",
            )


def _leads_to_no_sync(tree: ast.Module, block: ast.With) -> bool:
    return any(_calls_no_sync(last_value(tree, item.context_expr, block)) for item in block.items)


def _in_context(call: Call) -> bool:
    return bool(_CONTEXTS & set(call.contexts))


def _is_forward(call: Call) -> bool:
    return call.name.endswith(".__call__") and (
        "DistributedDataParallel" in call.name or "FullyShardedDataParallel" in call.name
    )


def _shares(calls: list[Call]) -> bool:
    return any(call.name.startswith("torch.distributed.") and "reduce" in call.name for call in calls)


def _steps(calls: list[Call], entry: Entry) -> bool:
    return any(call.name.endswith(".step") for call in calls) and bool(entry.name)


def _with_of(script: Script, call: Call) -> ast.AST | None:
    """The `no_sync()` that encloses a call, in this file; None if it is chosen by a test."""
    for node in (call.node, *(site.node for site in reversed(call.stack))):
        if not is_in(script.tree, node):
            continue
        for one in above(script.tree, node):
            if (
                isinstance(one, ast.If)
                and any(_calls_no_sync(part) for part in one.body if isinstance(part, ast.With))
                and one.orelse
            ):
                return None
            if isinstance(one, ast.With):
                item = next(
                    (item.context_expr for item in one.items if _calls_no_sync(item.context_expr)), None
                )
                if item is not None:
                    return None if _is_switched(item) else item
    return None


def _is_switched(item: ast.AST) -> bool:
    """`fabric.no_backward_sync(model, enabled=is_accumulating)`."""
    given = [one.value for one in item.keywords if one.arg == "enabled"] if isinstance(item, ast.Call) else []
    given += item.args[1:2] if isinstance(item, ast.Call) else []
    return isinstance(item, ast.IfExp) or any(not isinstance(one, ast.Constant) for one in given)


def _calls_no_sync(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr in _CONTEXTS for one in ast.walk(node))


_HOOKS = frozenset({"register_hook", "register_comm_hook", "register_post_accumulate_grad_hook"})


@rule("RW409", "error", "D25", "gradients are summed over the ranks and never divided")
def gradients_not_divided(script: Script) -> Iterator[Found]:
    for place in collectives(script, "all_reduce", "all_reduce_coalesced"):
        call = place.last
        node = filled_node(call) if word_of(call) == "all_reduce" else call.arg_node(0, "tensors")
        if node is None or not is_sum(call):
            continue
        function = function_of(script.tree, call.node)
        if not (_is_gradient(script.tree, node, call.node, 0) or _is_hook(script.tree, function)):
            continue
        if divides(script, function) or not _is_whole(script, function):
            continue
        yield Found(
            call.node,
            f"`{text_of(node)}` becomes the sum over all ranks and is never divided, so each step is too large by the number of ranks",
            f"divide afterwards, `{text_of(root_of(node) or node)} /= dist.get_world_size()`, or reduce with `op=dist.ReduceOp.AVG`",
        )


def _is_gradient(tree: ast.Module, node: ast.AST, at: ast.AST, depth: int) -> bool:
    if any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in ast.walk(node)):
        return True
    if any(
        isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr in {"gradients", "buffer"}
        for one in ast.walk(node)
    ):
        return "bucket" in ast.unparse(node)
    keys = (
        {key for one in ast.walk(node) if (key := key_of(one)) and isinstance(one, ast.Name)}
        if depth < 4
        else set()
    )
    for statement, value in (one for key in keys for one in bindings(tree, key, at)[-2:]):
        source = value if value is not None else getattr(statement, "iter", None)
        if source is not None and _is_gradient(tree, source, statement, depth + 1):
            return True
    return False


def _is_hook(tree: ast.Module, function: ast.AST) -> bool:
    """Whether a function is registered as a hook that changes gradients."""
    name = getattr(function, "name", "")
    return bool(name) and any(
        isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr in _HOOKS
        and any(
            key_of(part).rpartition(".")[2] == name
            for part in (*one.args, *(word.value for word in one.keywords))
        )
        for one in ast.walk(tree)
    )


def _is_whole(script: Script, function: ast.AST) -> bool:
    """Whether the callers of the function are in this file too: they may divide."""
    return function is script.tree or any(
        isinstance(one, (ast.Name, ast.Attribute))
        and isinstance(one.ctx, ast.Load)
        and key_of(one).rpartition(".")[2] == getattr(function, "name", "")
        for one in ast.walk(script.tree)
    )
