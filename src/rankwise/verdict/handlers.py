"""What a script does about the exception that torch raises where a member of the group is gone: end by it, or go on."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Literal

from rankwise.verdict.source_text import Loop, find_path_inside, name_of, split_site

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.verdict.source_text import Step

#: How a block of lines is left. "done": the process ends with exit code 0, by its own order.
Way = Literal["raise", "exit", "done", "return", "break", "continue", "fall"]

_TAKES = frozenset(
    {
        "RuntimeError",
        "Exception",
        "BaseException",
        "DistError",
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
    }
)
_EXITS = frozenset({"exit", "_exit", "quit", "abort", "kill"})
#: What ends a step for good, whatever the exception: a test's own failure, too.
_ENDINGS = _EXITS | {"interrupt_main", "fail"}
#: What a script calls when nothing more is to come.
_LAST_CALLS = re.compile(
    r"_?(destroy|clean|shut|close|finish|finali[sz]e|tear|flush|print|log|debug|info|warn|error|exception|critical|exit|abort|kill|quit|barrier|write)",
    re.IGNORECASE,
)
_FALL: frozenset[Way] = frozenset({"fall"})
_JUMPS: tuple[tuple[type[ast.stmt], Way], ...] = (
    (ast.Raise, "raise"), (ast.Return, "return"), (ast.Break, "break"), (ast.Continue, "continue"),
)  # fmt: skip
_NO_WORK = (ast.Pass, ast.Raise, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
#: What such an exception says, in one text or the other: a handler that asks for other words does not mean it.
_SAID = (
    "runtimeerror distbackenderror distnetworkerror: [rank 0] [../third_party/gloo/gloo/transport/tcp/pair.cc:547] connection closed by peer "
    "connection reset by peer connection refused broken pipe socket timeout timed out waiting 1000ms for recv operation to complete "
    "application timeout caused pair closure nccl error remote process exited store communicator was aborted"
)


def goes_on(texts: Mapping[str, str], sites: Sequence[str]) -> bool:
    """Tell whether a script goes on with its work when the innermost of its lines raises what torch raises.

    Not if nobody catches it, if it is raised again, or if nothing is left to be done behind it: then the rank ends by
        it.

    Args:
        texts: The user's files, by path.
        sites: ``file.py:LINE`` of the user's lines on a rank's stack, innermost first.
    """
    return _travels(texts, tuple(sites), _TAKES)


def leaves_its_loop(texts: Mapping[str, str], site: str | None) -> bool:
    """Tell whether a line's own handler leaves the only loop around it: what has failed there is not used."""
    steps = _steps_at(texts, site)
    for number, step in enumerate(steps):
        ways = _ways_of(step, _TAKES)
        if ways is not None:
            loops = sum(map(_is_loop, steps[number + 1 :]))
            return loops > 0 and ways <= {"break", "return"} and (loops == 1 or ways == {"return"})
    return False


def _travels(texts: Mapping[str, str], sites: tuple[str, ...], names: frozenset[str]) -> bool:
    """Follow an exception from the innermost line outwards."""
    for depth, site in enumerate(sites):
        steps = _steps_at(texts, site)
        for number, step in enumerate(steps):
            ways = _ways_of(step, names)
            if ways is None:
                continue
            if ways & {"break", "continue", "done"}:
                return True
            outer = steps[number + 1 :]
            if ways & {"return", "fall"}:
                if any(map(_is_loop, outer)):
                    return True
                if "fall" in ways and _is_work_left((step, *outer)):
                    return True
                if _is_work_left_behind(texts, sites[depth + 1 :]):
                    return True
            if "raise" not in ways:
                return False
            names = names | _raised_by(step)
    return False


def _is_work_left_behind(texts: Mapping[str, str], sites: Sequence[str]) -> bool:
    """Tell whether a call that comes back finds work in any of its callers."""
    for site in sites:
        steps = _steps_at(texts, site)
        if any(map(_is_loop, steps)) or _is_work_left(steps):
            return True
    return False


def _is_loop(step: Step) -> bool:
    return isinstance(step.node, Loop) and step.part in {"body", ""}


def _is_work_left(steps: Sequence[Step]) -> bool:
    """Tell whether anything but the last words of a script follows, up to the end of the function."""
    for step in steps:
        for node in step.block[step.at + 1 :]:
            if not _is_last_word(node):
                return True
            if isinstance(node, (ast.Return, ast.Raise)):
                return False
    return False


def _is_last_word(node: ast.stmt) -> bool:
    match node:
        case ast.Return(value=None | ast.Constant() | ast.Name()) | ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=func)):
            return _LAST_CALLS.match(name_of(func)) is not None
        case ast.If(body=body, orelse=orelse):
            return all(map(_is_last_word, (*body, *orelse)))
        case ast.Try(body=body, finalbody=finalbody):
            return all(map(_is_last_word, (*body, *finalbody)))
        case _:
            return isinstance(node, _NO_WORK)


# ------------------------------------------------------------ who takes it


def _ways_of(step: Step, names: frozenset[str]) -> frozenset[Way] | None:
    """Return how the handler of a statement that takes the exception is left; None if it lets it pass."""
    if step.part != "body":
        return None
    node = step.node
    if isinstance(node, ast.Try):
        for handler in node.handlers:
            if _may_take(handler.type, names):
                return _leave(handler.body)
    if isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            call = item.context_expr
            is_suppress = isinstance(call, ast.Call) and name_of(call) == "suppress"
            if isinstance(call, ast.Call) and is_suppress and any(_may_take(one, names) for one in call.args):
                return frozenset({"fall"})
    return None


def _may_take(kind: ast.expr | None, names: frozenset[str]) -> bool:
    if kind is None:
        return True
    if isinstance(kind, ast.Tuple):
        return any(_may_take(one, names) for one in kind.elts)
    name = name_of(kind)
    # A name that no class bears, as a tuple of classes that is made elsewhere: it may hold any.
    return name in names or not re.search(r"[a-z]", name) or not name[:1].isupper()


def _raised_by(step: Step) -> frozenset[str]:
    """Return the names of what the handlers of a ``try`` raise instead."""
    handlers = getattr(step.node, "handlers", ())
    raised = [node.exc for handler in handlers for node in ast.walk(handler) if isinstance(node, ast.Raise)]
    return frozenset(name_of(one) for one in raised if one is not None)


# ------------------------------------------------------- how it is left


def ends_rank(block: Sequence[ast.stmt]) -> bool:
    """Tell whether nothing goes on behind a block, whatever exception it handles: its last line raises, or ends the process."""
    match block[-1]:
        case ast.Raise():
            return True
        case ast.Expr(value=ast.Call(func=func)):
            return name_of(func) in _ENDINGS
        case ast.If(body=body, orelse=orelse):
            return bool(orelse) and ends_rank(body) and ends_rank(orelse)
        case ast.With(body=body):
            return ends_rank(body)
        case ast.Try(body=body, handlers=handlers, finalbody=finalbody):
            is_end = ends_rank(body) and all(ends_rank(one.body) for one in handlers)
            return is_end or (bool(finalbody) and ends_rank(finalbody))
        case _:
            return False


def _leave(body: Sequence[ast.stmt]) -> frozenset[Way]:
    """Return the ways in which a block may be left."""
    found: set[Way] = set()
    for node in body:
        ways = _leave_one(node)
        found |= ways - {"fall"}
        if "fall" not in ways:
            return frozenset(found)
    return frozenset({*found, "fall"})


def _leave_one(node: ast.stmt) -> frozenset[Way]:
    for kind, way in _JUMPS:
        if isinstance(node, kind):
            return frozenset({way})
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and name_of(node.value) in _EXITS:
        args = node.value.args
        is_well = len(args) == 1 and isinstance(args[0], ast.Constant) and args[0].value in {0, None}
        return frozenset({"done" if is_well else "exit"})
    return _leave_blocks(node)


def _leave_blocks(node: ast.stmt) -> frozenset[Way]:
    found: set[Way] = set()
    match node:
        case ast.If(test=test, body=body, orelse=orelse):
            known = _answer(test)
            arms = [arm for arm, when in ((body, True), (orelse, False)) if known in {None, when}]
            found.update(*(_leave(arm) for arm in arms))
        case ast.With(body=body) | ast.AsyncWith(body=body):
            found.update(_leave(body))
        case ast.Try(body=body, handlers=handlers, finalbody=finalbody):
            last = _leave(finalbody)
            if "fall" not in last:
                return last
            found.update(_leave(body), *(_leave(one.body) for one in handlers), last - {"fall"})
        case ast.For(body=body) | ast.While(body=body):
            found.update(_leave(body) - {"break", "continue"}, _FALL)
        case ast.Match(cases=cases):
            found.update(_FALL, *(_leave(one.body) for one in cases))
        case _:
            found.add("fall")
    return frozenset(found)


def _answer(test: ast.expr) -> bool | None:
    """Return what a test of the exception comes to; None if that is not known."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            answer = _answer(operand)
            return None if answer is None else not answer
        case ast.BoolOp(op=op, values=values):
            answers = [_answer(one) for one in values]
            ends = isinstance(op, ast.Or)
            if ends in answers:
                return ends
            return None if None in answers else not ends
        case ast.Compare(left=ast.Constant(value=str(words)), ops=[ast.In() | ast.NotIn() as op]):
            return None if words.lower() in _SAID else isinstance(op, ast.NotIn)
        case ast.Call(func=ast.Name(id="isinstance"), args=[_, kind]):
            return None if _may_take(kind, _TAKES) else False
        case _:
            return None


def _steps_at(texts: Mapping[str, str], site: str | None) -> tuple[Step, ...]:
    """Return the statements that a line stands in, innermost first, up to its function."""
    path, line = split_site(site)
    return find_path_inside(texts[path], line)[::-1] if path in texts else ()
