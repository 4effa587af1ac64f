"""Sums over the ranks, and whether anybody makes a mean of them."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.acts import ACTS
from rankwise.lint.library.hints import role_of
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.tensor_text import key_of, last_value, nodes_in

if TYPE_CHECKING:
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

_DIVISIONS = frozenset({"div", "div_", "true_divide", "true_divide_", "divide", "divide_", "floor_divide"})
_SCALINGS = frozenset(
    {"mul", "mul_", "multiply", "multiply_", "_foreach_div_", "_foreach_mul_", "_foreach_div"}
)
_SIZES = frozenset({"size", "world", "n_gpus", "num_gpus", "ngpus", "n_ranks", "num_workers", "num_nodes", "nranks", "ws", "w", "n_workers"})  # fmt: skip


def is_sum(call: Call) -> bool:
    """Whether a reduction adds up, as it does if it is not told otherwise."""
    op = call.arg_node(ACTS[call.name].signature.index("op"), "op")
    return op is None or text_of(op).rpartition(".")[2] == "SUM"


def divides(script: Script, function: ast.AST, besides: str = "") -> bool:
    """Whether something is divided in this function, or anything in the text by the number of ranks.

    Args:
        script: The text.
        function: The function.
        besides: Divisions of what has this word in it do not count.
    """
    if any(_is_division(one) and not _names(one, besides) for one in nodes_in(function)):
        return True
    return any(
        _is_division(one) and _divides_by_world(script.tree, one) and not _names(one, besides)
        for one in ast.walk(script.tree)
    )


def _names(node: ast.AST, word: str) -> bool:
    return bool(word) and any(getattr(part, "attr", "") == word for part in ast.walk(node))


def _is_division(node: ast.AST) -> bool:
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return isinstance(node.op, ast.Div)
    if not isinstance(node, ast.Call):
        return False
    word = getattr(node.func, "attr", "") or key_of(node.func)
    return word in _DIVISIONS | _SCALINGS


def _divides_by_world(tree: ast.Module, node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        parts: list[ast.AST] = [node.right]
    elif isinstance(node, ast.AugAssign):
        parts = [node.value]
    else:
        parts = [*getattr(node, "args", ()), *(one.value for one in getattr(node, "keywords", ()))]
    return any(is_world_size(tree, inner) for part in parts for inner in ast.walk(part))


def is_world_size(tree: ast.Module, node: ast.AST) -> bool:
    """Whether an expression is the number of ranks, by its name or by what it was given."""
    if isinstance(node, ast.Call):
        return role_of(key_of(node.func)) == "world_size"
    key = key_of(node)
    if not key:
        return False
    last = key.rpartition(".")[2]
    if role_of(key) == "world_size" or last in _SIZES:
        return True
    value = last_value(tree, node, node)
    return isinstance(value, ast.Call) and role_of(key_of(value.func)) == "world_size"
