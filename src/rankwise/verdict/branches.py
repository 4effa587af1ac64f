"""Whether two lines of the user's script stand in different arms of one condition: then they are one place, written twice."""

from __future__ import annotations

import ast
from functools import lru_cache

from rankwise.verdict.guards import name_of_call


@lru_cache(maxsize=64)
def are_alternatives(text: str, line: int, other: int) -> bool:
    """Tell whether no rank can pass by both lines in one turn: they stand in an ``if`` and its ``else``, or in cases of one ``match``.

    So do those of two functions that are called only there.

    Args:
        text: Of the file that holds both; what is no Python has no arms.
        line: One line, from 1.
        other: The other one.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    if any(_parts(node, line, other) for node in ast.walk(tree)):
        return True
    calls = [_find_calls(tree, number) for number in (line, other)]
    return all(calls) and all(
        any(_parts(node, one, two) for node in ast.walk(tree)) for one in calls[0] for two in calls[1]
    )


def _find_calls(tree: ast.Module, line: int) -> set[int]:
    """Return the lines that call the function that a line stands in by its name."""
    scopes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and line in _span(node.body)
    ]
    name = max(scopes, key=lambda node: node.lineno).name if scopes else None
    return {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and name is not None and name_of_call(node) == name
    }


def _parts(node: ast.AST, line: int, other: int) -> bool:
    match node:
        case ast.If(body=body, orelse=orelse):
            arms = [_span(body), _span(orelse)]
        case ast.IfExp(body=one, orelse=two):
            arms = [_span([one]), _span([two])]
        case ast.Match(cases=cases):
            arms = [_span(each.body) for each in cases]
        case _:
            return False
    places = [next((at for at, arm in enumerate(arms) if number in arm), None) for number in (line, other)]
    return None not in places and places[0] != places[1]


def _span(block: list[ast.stmt] | list[ast.expr]) -> range:
    if not block:
        return range(0)
    return range(block[0].lineno, (block[-1].end_lineno or block[-1].lineno) + 1)
