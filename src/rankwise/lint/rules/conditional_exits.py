"""Ranks leave, skip or repeat at different times what they must do together."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.data_flow import loaders_in, sampler_of
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.history import Exit, Fork, Loop, Op
from rankwise.lint.interpreter.values import Spread
from rankwise.lint.library.constructor_table import RECOUNTS
from rankwise.lint.paths.found import all_divergences, all_local_paths, place_in
from rankwise.lint.paths.local import how_bad, may_fail_alone
from rankwise.lint.paths.phrases import also, called, reported_place, tested, who, written
from rankwise.lint.paths.reasons import is_perhaps_shared, test_of, why
from rankwise.lint.paths.tokens import ops_of
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.interpreter.values import Value
    from rankwise.lint.paths.local import LocalPath
    from rankwise.lint.script import Script

#: Attributes that stop a framework's training.
_FLAGS = frozenset({"should_stop", "should_training_stop", "should_epoch_stop"})
_CLASSES = {"break": "D16", "continue": "D15", "return": "C27"}


@rule("RW108", "error", "D16 D15 C27", "some ranks leave a loop or function in which the others stay")
def left_on_some_ranks(script: Script) -> Iterator[Found]:
    divergences = all_divergences(script)
    # Where the test keeps ranks from a collective in the first place, that is the mistake.
    seen = {id(one.guard.node) for one in divergences if isinstance(one.item, Op) and one.guard is not None}
    for one in divergences:
        left = one.item
        if not isinstance(left, Exit) or one.guard is None or id(one.guard.node) in seen:
            continue
        at = place_in(script, one)
        if at is None:
            continue
        where = "here" if at[0] is left.node else f"in `{written(at[0])}`"
        yield Found(
            at[0],
            f"{who(one.doers, one.others, 'may')} {left.kind} {where} (`{tested(left, one.guard)}`): the others continue and wait for it"
            " in their next collective",
            "decide on one rank, broadcast the decision, and let every rank act on it",
            # If the file does not call a function, its callers and arguments are unknown.
            severity="error" if one.in_program else "warning",
            failure_class=_CLASSES[left.kind],
            also=also(left, at[0], one.guard),
        )
    for call in script.calls:
        is_flag = call.name.endswith(".__setattr__") and call.args[0].const in _FLAGS
        if is_flag and call.guards and call.args[1].const is not False:
            guard = call.guards[-1]
            yield Found(
                call.node,
                f"`{written(call.node)}` is set only where `{written(guard.node)}`: that rank stops training, the others continue",
                "let every rank set it from a value that was reduced or broadcast",
            )


_FIX = "give every rank the same number of iterations: cut to the shortest, pad, agree on the number by all_reduce(MIN), or use DDP's join()"


@rule("RW109", "error", "D14 C1 C27", "ranks run different numbers of iterations of a loop with collectives")
def turns_differ(script: Script) -> Iterator[Found]:
    seen: set[int] = set()
    for one in all_divergences(script):
        loop = one.item
        if not isinstance(loop, Loop) or loop.value.spread is Spread.EQUAL:
            continue  # as many turns, and on some ranks without what the others do in them: that is told where it is
        if one.guard is None and loop.module is script.module:
            seen.add(id(loop.node))
            yield Found(
                _head(loop.node),
                f"ranks run different numbers of iterations over `{written(_over(loop.node))}`, with collectives in each iteration",
                _FIX,
                failure_class=_class(loop),
            )
    for path in all_local_paths(script):
        share = path.item
        if (
            path.kind == "loop"
            and isinstance(share, Loop)
            and share.value.spread is Spread.RANK
            and id(share.node) not in seen
            and not _gives_as_many(share.value)
        ):
            yield Found(
                _head(share.node),
                f"the share of this rank, `{written(_over(share.node))}`, may be longer than another's, and each iteration calls"
                f" {called(path.op)}",
                _FIX,
                severity="warning",
                failure_class=_class(share),
                also=[reported_place(f"{called(path.op)} is here", path.op.call.node, path.op.call.module)],
            )


def _class(loop: Loop) -> str:
    """Uneven batches if it trains, otherwise a collective that some ranks skip."""
    return "D14" if any(op.family in {"backward", "forward"} for op in ops_of(loop.items)) else "C1"


def _over(node: ast.AST) -> ast.AST | None:
    generators = getattr(node, "generators", None)  # of a comprehension
    return generators[0].iter if generators else getattr(node, "iter", getattr(node, "test", None))


def _head(node: ast.AST) -> ast.AST:
    return _over(node) or node


@rule("RW111", "error", "C26 D14 C27", "a collective depends on a value that may differ between ranks")
def collective_under_local_test(script: Script) -> Iterator[Found]:
    for path in all_local_paths(script):
        item = path.item
        if path.op.family == "group" or is_perhaps_shared(item.value):
            continue
        is_loop = path.kind == "loop" and isinstance(item, Loop) and item.value.spread is Spread.LOCAL
        if not is_loop and not (path.kind == "arm" and isinstance(item, Fork)):
            continue
        test = test_of(item.node)
        yield Found(
            test,
            f"whether {called(path.op)} is {'made again' if is_loop else 'made'} depends on `{written(test)}`,"
            f" {why(item.value)}: ranks that differ wait for each other",
            "let all ranks agree first: all_reduce the flag, or decide on one rank and broadcast it",
            severity=how_bad(path),
            failure_class="D14" if is_loop and "files" in item.value.origin else "C26",
            also=[reported_place(f"{called(path.op)} is here", path.op.call.node, path.op.call.module)],
        )


_LONGEST = 50
_DOES = {"break": "ends the loop", "continue": "skips the step", "return": "returns"}


@rule(
    "RW112",
    "error",
    "D15 D16 C27 X10 C26 C2 K9",
    "a rank skips a step or leaves the loop because of a value that only it has",
)
def left_on_local_test(script: Script) -> Iterator[Found]:
    for path in all_local_paths(script):
        if path.kind != "leave" or path.exit is None or not isinstance(path.item, Fork) or path.op.family == "group":
            continue
        test = test_of(path.item.node)
        kind = path.exit.kind
        yield Found(
            test,
            f"a rank {_DOES[kind]} when `{written(test)}`, {why(path.item.value)}: the others wait for it in {called(path.op)}",
            _fix(test),
            severity="warning" if is_perhaps_shared(path.item.value) else how_bad(path),
            failure_class=_class_of_exit(path, kind),
            also=[reported_place(f"{called(path.op)} is here", path.op.call.node, path.op.call.module)],
        )


def _fix(test: ast.AST) -> str:
    text = written(test)
    flag = f"`float({text})`" if isinstance(test, ast.expr) and len(text) < _LONGEST else "the flag"
    return f"reduce {flag} over all ranks first (all_reduce with MAX), and let every rank act on the result"


def _class_of_exit(path: LocalPath, kind: str) -> str:
    if "signal" in path.item.value.origin:
        return "K9"
    if kind != "return" or not isinstance(path.item, Fork):
        return _CLASSES[kind]
    if path.op.family == "barrier" and path.op.call.guards:
        return "C2"
    return "C26" if _is_of_host(path.item) else "C27"


def _is_of_host(fork: Fork) -> bool:
    """Whether the test is on the host or the clock, not on the data."""
    return not fork.value.origin.isdisjoint({"exists", "files", "time", "queue", "memory"})


@rule("RW113", "error", "C25 K9", "a collective in `except` or `finally`")
def collective_in_handler(script: Script) -> Iterator[Found]:
    for path in all_local_paths(script):
        if path.kind not in {"handler", "finally"}:
            continue
        op = path.op
        node = op.call.node if op.call.module is script.module else path.item.node
        is_handler = path.kind == "handler"
        if not op.is_sure:
            continue
        if "signal" in path.item.value.origin:
            yield Found(
                node,
                f"{called(op)} in a signal handler: each rank gets the signal at a different moment, even inside another collective",
                "only set a flag in the handler; let all ranks agree on it at the end of a step (all_reduce with MAX)",
                failure_class="K9",
            )
            continue
        yield Found(
            node,
            f"a rank with an exception reaches {called(op)} in `{'except' if is_handler else 'finally'}`, while the others"
            " are in another collective: both block, and the traceback is never printed",
            f"let the exception end the rank (the launcher stops the others), and remove {called(op)} from the handler",
            severity=_severity(path),
        )


def _severity(path: LocalPath) -> Severity:
    if path.kind == "handler":
        return "warning" if _is_ctrl_c(path.item) else "error"
    return "hint" if _is_context_manager(path.op) else "warning"


def _is_ctrl_c(item: Fork | Loop) -> bool:
    """Whether only Ctrl-C is handled: a terminal sends it to all ranks."""
    handlers = getattr(item.node, "handlers", [])
    return bool(handlers) and all(
        isinstance(one.type, ast.Name) and one.type.id == "KeyboardInterrupt" for one in handlers
    )


def _is_context_manager(op: Op) -> bool:
    """Whether it ends a context manager, which must happen whatever was inside."""
    node = getattr(op.call.function, "node", None)
    is_method = getattr(node, "name", "") == "__exit__"
    return is_method or (node is not None and any(isinstance(one, ast.Yield) for one in ast.walk(node)))


def _gives_as_many(over: Value) -> bool:
    """Whether a sampler gives each rank as many, of which none drops some."""
    is_recounted = over.made is not None and over.made.name in RECOUNTS
    return not is_recounted and any(map(sampler_of, loaders_in(over)))


@rule("RW114", "error", "R1 D15 C24", "a rank swallows an exception and continues, having skipped collectives")
def exception_swallowed(script: Script) -> Iterator[Found]:
    for path in all_local_paths(script):
        if path.kind != "swallow":
            continue
        handler = _handler(path.item.node)
        yield Found(
            handler,
            f"a rank that reaches this `except` skips {called(path.op)}, which the others call: from then on they wait"
            " for each other, or mix up steps",
            "let the exception end the rank, or let all ranks agree on skipping (all_reduce a flag) before the collective",
            severity="error"
            # A distributed checkpoint reports an error on one rank to all ranks.
            if path.in_loop
            and path.in_program
            and path.op.is_sure
            and path.op.family != "save"
            and may_fail_alone(path.item.node)
            else "warning",
            failure_class="D15" if path.exit is not None and path.exit.kind == "continue" else "R1",
            also=[reported_place(f"{called(path.op)} is here", path.op.call.node, path.op.call.module)],
        )


def _handler(node: ast.AST) -> ast.AST:
    """The `except` itself: its type if it has one, for a short mark; or `suppress(...)`."""
    return node.handlers[0].type or node.handlers[0] if isinstance(node, ast.Try) else node
