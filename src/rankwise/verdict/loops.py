"""How one rank alone can skip a step of a loop, or leave it, read from the script's text: a continue, a break under a test of its own, an except that goes on."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, final

from rankwise.verdict.group_sequences import KNOWN_NAMES
from rankwise.verdict.guards import asks_for_none, asks_rank, find_rank_names
from rankwise.verdict.handlers import ends_rank
from rankwise.verdict.source_text import (
    Loop,
    find_path_inside,
    lines_of,
    list_loops,
    list_names,
    name_of,
    parse,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rankwise.verdict.source_text import Step

#: "not finite", "exception": the step is skipped for such a loss, or in an except. "empty": there is nothing in the
#: batch. "no loss": the step before has made none. "stop": the loop is left early, for a measure of the rank's own.
#: "swallowed": an except around the step goes on. "own": either of both for the rank, or for another value that the
#: loop has read or computed, which may differ between ranks.
Reason = Literal["not finite", "exception", "empty", "no loss", "stop", "swallowed", "own"]

_NOT_FINITE = re.compile(r"^(isinf|is_?nan|is_?finite|.*_nan|nan_.*|found_inf)$", re.IGNORECASE)
_STOPPING = re.compile(
    r"^(stop|stopper|stopped|stopping)$|early|patience|patient|no_improve|not_improved|worse|plateau|converged|should_stop|stop_training|(^|_)(bad|best|loss|acc|accuracy|score|metric)(_|$)",
    re.IGNORECASE,
)
_NO_FAILURE = {
    "KeyboardInterrupt",
    "SystemExit",
    "GeneratorExit",
    "StopIteration",
    "StopAsyncIteration",
    "ImportError",
    "ModuleNotFoundError",
    "Empty",
}
#: Iterators whose items are the same on all ranks.
_COUNTS = {"range", "trange", "count"}
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
        line: Where the statement stands.
        loop: First and last line of the loop; of what is swallowed those of the block that an exception ends.
        word: The statement: "continue", "break", "return", "except", or "suppress" of contextlib.
        is_in_loop: Whether a loop stands around it in its function.
    """

    reason: Reason
    line: int
    loop: tuple[int, int]
    word: str = "continue"
    is_in_loop: bool = True


@lru_cache(maxsize=64)
def find_ways_out(text: str, line: int) -> tuple[WayOut, ...]:
    """Return the ways in which one rank alone may not reach a line of a loop.

    Args:
        text: Of the file; what is no Python has none.
        line: A line in the body of the loop, as of a backward pass. What skips a step stands before it.
    """
    shared, ranks = _find_shared(text), find_rank_names(text)
    found = [way for loop in list_loops(text, line) for way in _list_ways(loop, line, shared, ranks)]
    return tuple(sorted(found, key=lambda way: way.line))


@lru_cache(maxsize=64)
def find_swallows(text: str, line: int) -> tuple[WayOut, ...]:
    """Return what takes an exception of a line and goes on, the innermost first: an ``except`` that raises nothing, or ``suppress``."""
    found: list[WayOut] = []
    is_in_loop = False
    for step in find_path_inside(text, line):
        node = step.node
        if isinstance(node, ast.Try | ast.With) and (first := _find_taker(node, step)) is not None:
            guarded = [*node.body, *node.orelse] if isinstance(node, ast.Try) else node.body
            span = (guarded[0].lineno, guarded[-1].end_lineno or node.lineno)
            word = "except" if isinstance(node, ast.Try) else "suppress"
            found.append(WayOut(reason="swallowed", line=first, loop=span, word=word, is_in_loop=is_in_loop))
        is_in_loop = is_in_loop or isinstance(node, Loop)
    return tuple(reversed(found))


def _find_taker(node: ast.Try | ast.With, step: Step) -> int | None:
    """Return the line of what takes an exception and goes on; None if there is nothing of the kind."""
    if isinstance(node, ast.With):
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        suppressing = (call.lineno for call in calls if name_of(call) == "suppress")
        return next(suppressing, None) if step.part == "body" else None
    for handler in node.handlers if step.part in {"body", "orelse"} else ():
        named = {*list_names(handler.type)} if handler.type is not None else set()
        # These end what they interrupt, and are no failure of a step.
        if not (named and named <= _NO_FAILURE) and not ends_rank(handler.body):
            return handler.lineno
    return None


def _list_ways(loop: Loop, line: int, shared: frozenset[str], ranks: frozenset[str]) -> Iterator[WayOut]:
    own = _find_own_names(loop)
    data = _find_data_names(loop, own)
    for node, tests, is_handled in _walk(loop.body, (), is_handled=False):
        names = frozenset(name for test in tests for name in list_names(test))
        if names & shared:
            continue  # all ranks have agreed on it
        is_for_some = any(asks_rank(test, ranks) and not asks_for_none(test) for test in tests)
        reason: Reason | None = None
        if isinstance(node, ast.Continue) and node.lineno < line:
            reason = _find_skip(tests, names, own, is_handled=is_handled)
        elif isinstance(node, (ast.Break, ast.Return)) and not is_handled:
            reason = "stop" if is_for_some or any(_STOPPING.search(name) for name in names) else None
        else:
            continue
        is_own = is_for_some or any(_is_data(test, own, data) for test in tests)
        if reason is None and not is_handled and is_own:
            reason = "own"
        if reason is not None:
            word = type(node).__name__.lower()
            yield WayOut(reason=reason, line=node.lineno, loop=lines_of(loop), word=word)


def _find_skip(
    tests: tuple[ast.expr, ...], names: frozenset[str], own: frozenset[str], *, is_handled: bool
) -> Reason | None:
    if any(_NOT_FINITE.search(name) for name in names):
        return "not finite"
    if any(_is_empty(test, own) for test in tests):
        return "no loss" if any("loss" in name.lower() for name in names) else "empty"
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
            asked = {*list_names(left)}
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


def _find_own_names(loop: Loop) -> frozenset[str]:
    """Return the names that get a new value in each turn."""
    names = (node for node in ast.walk(loop) if isinstance(node, ast.Name))
    return frozenset(node.id for node in names if isinstance(node.ctx, ast.Store))


def _find_data_names(loop: Loop, stored: frozenset[str]) -> set[str]:
    """Return the names whose value in a turn comes from what the loop reads or draws: not from a count of turns alone."""
    found: set[str] = set()
    if not isinstance(loop, ast.While) and not (asked := {*list_names(loop.iter)}) & _COUNTS:
        is_numbered = "enumerate" in asked and isinstance(loop.target, ast.Tuple)
        for target in loop.target.elts[1:] if is_numbered else [loop.target]:  # type: ignore[attr-defined]
            found |= {*list_names(target)}
    given = [
        (target, node.value)
        for node in ast.walk(loop)
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    before = -1
    while len(found) > before:  # as far as a value is handed on
        before = len(found)
        for target, value in given:
            if _is_data(value, stored, found):
                found |= {*list_names(target)} & stored
    return found


def _is_data(value: ast.expr, stored: frozenset[str], data: set[str]) -> bool:
    """Tell whether a value is made of data, or by a call that is given nothing of the loop's: it reads, draws, or asks a clock."""
    names = {*list_names(value)}
    calls = any(isinstance(node, (ast.Call, ast.Await)) for node in ast.walk(value))
    return bool(names & data) or (calls and not names & stored)


@lru_cache(maxsize=32)
def _find_shared(text: str) -> frozenset[str]:
    """Return the names that a collective is given, or whose value comes from one."""
    found: set[str] = set()
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Call) and name_of(node) in _SHARED:
            found |= {name for one in (*node.args, *node.keywords) for name in list_names(one)}
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) or node.value is None:
            continue
        if {*list_names(node.value)} & _SHARED:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name for target in targets for name in list_names(target)}
    return frozenset(found)
