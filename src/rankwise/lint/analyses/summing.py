"""Sums over the ranks, and whether anybody makes a mean of them."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.job_view import text_of
from rankwise.lint.analyses.tensor_text import nodes_in
from rankwise.lint.interpreter.notes import Quotient, is_by_ranks
from rankwise.lint.interpreter.values import Library
from rankwise.lint.library.collective_table import ACTS

if TYPE_CHECKING:
    from rankwise.lint.interpreter.values import Call
    from rankwise.lint.script import Script

_SCALINGS = tuple(
    """div div_ true_divide true_divide_ divide divide_ mul mul_ _foreach_div_ _foreach_mul_""".split()  # noqa: SIM905
)


def is_sum(call: Call) -> bool:
    """Whether a reduction adds up, as it does if it is not told otherwise."""
    at = ACTS[call.name].signature.index("op")
    op, node = call.arg(at, "op"), call.arg_node(at, "op")
    name = op.thing.name if op is not None and isinstance(op.thing, Library) else text_of(node)
    return node is None or name.rpartition(".")[2] == "SUM"


def divides(script: Script, function: ast.AST, besides: str = "") -> bool:
    """Whether something is divided in this function, or anything in the text by the number of ranks.

    Args:
        script: The text.
        function: The function.
        besides: Divisions of what has this word in it do not count.
    """
    found = [one for one in nodes_in(function) if is_division(one)]
    found += by_ranks(script)
    return any(not besides or all(getattr(part, "attr", "") != besides for part in ast.walk(one)) for one in found)


def by_ranks(script: Script) -> list[ast.AST]:
    """Where something is divided by the number of ranks, or multiplied by what was computed from it."""
    calls = (call for call in script.all_calls if call.name.endswith(_SCALINGS))
    notes = (note for note in script.notes if isinstance(note, Quotient))
    return [
        *(call.node for call in calls if any(map(is_by_ranks, call.args))),
        *(note.node for note in notes if is_by_ranks(note.right)),
    ]


def is_division(node: ast.AST) -> bool:
    """Whether something is divided."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return isinstance(node.op, ast.Div)
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _SCALINGS
