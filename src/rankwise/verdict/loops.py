"""How one rank alone can skip a step of a loop, or leave it, read from the script's text: a continue, or a break under a test of its own."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, final

from rankwise.verdict.guards import asks_rank, find_rank_names
from rankwise.verdict.lanes import KNOWN_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: "not finite", "exception": the step is skipped for such a loss, or in an except. "empty": there is nothing in the batch. "stop": the loop is
#: left early, for a measure of the rank's own.
Reason = Literal["not finite", "exception", "empty", "stop"]

_NOT_FINITE = re.compile(
    r"^(isnan|isinf|isfinite|is_?nan|is_?finite|.*_nan|nan_.*|found_inf)$", re.IGNORECASE
)
_STOPPING = re.compile(
    r"early|patience|patient|no_improve|not_improved|worse|plateau|converged|should_stop|stop_training|(^|_)(bad|best|loss|acc|accuracy|score|metric)(_|$)",
    re.IGNORECASE,
)
#: Functions beside torch.distributed's own that make one value of all ranks'.
_SHARED = KNOWN_NAMES | {
    "all_gather_object", "gather_object", "broadcast_object_list", "gather", "reduce", "gather_for_metrics", "set_trigger", "check_trigger",
    "agree", "all_reduce_mean", "strategy_reduce", "reduce_boolean_decision",
}  # fmt: skip


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """A statement by which one rank alone can skip a step, or leave a loop.

    Attributes:
        reason: What it asks for.
        line: Where the ``continue`` or ``break`` stands.
        loop: First and last line of the loop.
    """

    reason: Reason
    line: int
    loop: tuple[int, int]


@lru_cache(maxsize=64)
def find_ways_out(text: str, line: int) -> tuple[WayOut, ...]:
    """Return the ways in which one rank alone may not come to a line of a loop.

    Args:
        text: Of the file; what is no Python has none.
        line: A line in the body of the loop, as of a backward pass. What skips a step stands before it.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    shared, ranks = _find_shared(tree), find_rank_names(tree)
    found = [way for loop in _find_loops(tree, line) for way in _list_ways(loop, line, shared, ranks)]
    return tuple(sorted(found, key=lambda way: way.line))


def _find_loops(tree: ast.Module, line: int) -> Iterator[ast.For | ast.AsyncFor | ast.While]:
    """Yield the loops around a line, as far as the function that it stands in."""
    scope = max(
        (
            node
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and _spans(node, line)
        ),
        key=lambda node: node.lineno,
        default=None,
    )
    for node in ast.walk(tree if scope is None else scope):
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) and _spans(node, line):
            yield node


def _spans(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _list_ways(
    loop: ast.For | ast.AsyncFor | ast.While, line: int, shared: frozenset[str], ranks: frozenset[str]
) -> Iterator[WayOut]:
    span = (loop.lineno, loop.end_lineno or loop.lineno)
    own = _find_own_names(loop)
    for node, tests, is_handled in _walk(loop.body, (), is_handled=False):
        names = frozenset(name for test in tests for name in _list_names(test))
        if names & shared:
            continue  # all ranks have agreed on it
        reason: Reason | None = None
        if isinstance(node, ast.Continue) and node.lineno < line:
            reason = _find_skip(tests, names, own, is_handled=is_handled)
        elif isinstance(node, (ast.Break, ast.Return)) and not is_handled:
            is_local = any(_STOPPING.search(name) for name in names) or any(
                asks_rank(test, ranks) for test in tests
            )
            reason = "stop" if is_local else None
        if reason is not None:
            yield WayOut(reason=reason, line=node.lineno, loop=span)


def _find_skip(
    tests: tuple[ast.expr, ...], names: frozenset[str], own: frozenset[str], *, is_handled: bool
) -> Reason | None:
    if any(_NOT_FINITE.search(name) for name in names):
        return "not finite"
    if any(_is_empty(test, own) for test in tests):
        return "empty"
    return "exception" if is_handled else None


def _is_empty(test: ast.expr, own: frozenset[str]) -> bool:
    """Tell whether a test asks if something of this step is there at all: ``not x``, ``x is None``, ``len(x) == 0``."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=ast.Name(id=name)):
            return name in own
        case ast.Compare(left=ast.Name(id=name), ops=[ast.Is()], comparators=[ast.Constant(value=None)]):
            return name in own
        case (
            ast.Compare(left=left, ops=[_], comparators=[ast.Constant(value=int())])
            | ast.UnaryOp(op=ast.Not(), operand=left)
        ):
            asked = {*_list_names(left)}
            return bool(asked & {"len", "numel", "shape", "size", "nelement"}) and bool(asked & own)
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(_is_empty(value, own) for value in values)
        case _:
            return False


def _walk(
    block: Iterable[ast.stmt], tests: tuple[ast.expr, ...], *, is_handled: bool
) -> Iterator[tuple[ast.stmt, tuple[ast.expr, ...], bool]]:
    """Yield the statements of a loop, without those of loops and functions inside it: with the tests around each, and whether it is in an except."""
    for node in block:
        yield node, tests, is_handled
        match node:
            case ast.If(test=test, body=body, orelse=orelse):
                yield from _walk((*body, *orelse), (*tests, test), is_handled=is_handled)
            case ast.With(body=body) | ast.AsyncWith(body=body):
                yield from _walk(body, tests, is_handled=is_handled)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=finalbody):
                yield from _walk((*body, *orelse, *finalbody), tests, is_handled=is_handled)
                for handler in handlers:
                    yield from _walk(handler.body, tests, is_handled=True)
            case ast.Match(cases=cases):
                for case in cases:
                    yield from _walk(case.body, tests, is_handled=is_handled)
            case _:
                continue


def _find_own_names(loop: ast.For | ast.AsyncFor | ast.While) -> frozenset[str]:
    """Return the names that get a new value in each turn."""
    return frozenset(
        node.id for node in ast.walk(loop) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )


def _find_shared(tree: ast.Module) -> frozenset[str]:
    """Return the names that a collective is given, or whose value comes from one."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name_of(node.func) in _SHARED:
            found |= {name for one in (*node.args, *node.keywords) for name in _list_names(one)}
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) or node.value is None:
            continue
        if {*_list_names(node.value)} & _SHARED:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name for target in targets for name in _list_names(target)}
    return frozenset(found)


def _name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _list_names(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            yield one.id
        elif isinstance(one, ast.Attribute):
            yield one.attr
