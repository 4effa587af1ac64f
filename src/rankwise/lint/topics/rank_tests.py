"""Whether a place in the text is reached by some ranks only, by the words of the tests around it."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import TYPE_CHECKING

from rankwise.lint.library.hints import main_of, role_of
from rankwise.lint.topics.job_view import above, function_of
from rankwise.lint.topics.tensor_text import is_behind, key_of, last_value, nodes_in

if TYPE_CHECKING:
    from collections.abc import Sequence

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@lru_cache(maxsize=16)
def _given_as_rank(tree: ast.Module) -> frozenset[str]:
    """Names that the script passes to init_process_group as the rank."""
    return frozenset(
        keyword.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and key_of(node.func).endswith("init_process_group")
        for keyword in node.keywords
        if keyword.arg == "rank" and isinstance(keyword.value, ast.Name)
    )


def _asks_rank(test: ast.AST, tree: ast.Module) -> bool:
    """Whether a test has to do with which rank this is."""
    names = _given_as_rank(tree)
    return asks_rank(test) or any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(test))


def asks_rank(test: ast.AST) -> bool:
    """Whether a test has to do with which rank this is, by its words."""
    for node in ast.walk(test):
        key = key_of(node.func if isinstance(node, ast.Call) else node)
        if key and (
            role_of(key) not in {None, "world_size"}
            or main_of(key) is not None
            or key.rpartition(".")[2] in {"dst", "src", "root", "me"}
        ):
            return True
    return False


def is_under_rank_test(tree: ast.Module, node: ast.AST) -> bool:
    """Whether a node stands below a test on the rank, or behind one that sends other ranks away."""
    inner = node
    for one in above(tree, node):
        if (
            isinstance(one, (ast.If, ast.IfExp, ast.While))
            and inner is not one.test
            and _asks_rank(_followed(tree, one.test), tree)
        ):
            return True
        if isinstance(one, ast.BoolOp) and any(
            _asks_rank(_followed(tree, value), tree) for value in one.values if value is not inner
        ):
            return True
        if isinstance(one, _FUNCTIONS):
            break
        inner = one
    function = function_of(tree, node)
    return any(
        isinstance(one, ast.If)
        and _asks_rank(_followed(tree, one.test), tree)
        and _leaves(one.body)
        and is_behind(node, one)
        for one in nodes_in(function)
    )


def _followed(tree: ast.Module, test: ast.AST) -> ast.AST:
    if isinstance(test, ast.UnaryOp):
        return _followed(tree, test.operand)
    return last_value(tree, test, test) if isinstance(test, ast.Name) and not asks_rank(test) else test


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], (ast.Return, ast.Continue, ast.Raise, ast.Break))
