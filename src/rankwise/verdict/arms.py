"""Whether two lines of the user's script stand in different arms of one condition: then they are one place, written twice."""

from __future__ import annotations

import ast
from functools import lru_cache


@lru_cache(maxsize=64)
def are_alternatives(text: str, line: int, other: int) -> bool:
    """Tell whether no rank can pass by both lines in one turn: they stand in an ``if`` and its ``else``, or in cases of one ``match``.

    Args:
        text: Of the file that holds both; what is no Python has no arms.
        line: One line, from 1.
        other: The other one.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return any(_parts(node, line, other) for node in ast.walk(tree))


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
