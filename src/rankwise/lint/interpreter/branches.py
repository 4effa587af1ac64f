"""Branches of the simulated run: decided by who the rank is, or taken both ways."""

from __future__ import annotations

import ast
from functools import reduce
from itertools import chain, compress
from typing import TYPE_CHECKING, Literal

from rankwise.lint.interpreter.history import Arm, Exit, Fork
from rankwise.lint.interpreter.notes import note_test
from rankwise.lint.interpreter.values import Guard, Spread, Value, joined, mixed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rankwise.lint.interpreter.history import Item
    from rankwise.lint.interpreter.run import Run, Scope
    from rankwise.lint.program import Module

#: What all ranks meet alike: a missing module, a wrong call, Ctrl-C.
_SAME_EVERYWHERE = frozenset(
    """ImportError ModuleNotFoundError KeyboardInterrupt AttributeError NameError SystemExit NotImplementedError
    TypeError KeyError StopIteration ImproperlyConfigured""".split()  # noqa: SIM905
)
#: What follows from the values that are at hand.
_OF_VALUES = _SAME_EVERYWHERE | {
    "ValueError",
    "JSONDecodeError",
    "OverflowError",
    "ZeroDivisionError",
    "ArithmeticError",
    "IndexError",
}
_WHO = frozenset({"rank", "local_rank", "node_rank"})


def asks_who(value: Value) -> bool:
    """Whether a test asks which rank this is."""
    return value.spread >= Spread.RANK and not _WHO.isdisjoint(value.origin)


def run_if(run: Run, scope: Scope, node: ast.If) -> Exit | None:
    """Run one arm, or both."""
    value = run.evaluate(run, scope, node.test)
    note_test(run, scope, node.test, value)
    truth = run.truth(value)
    if truth is None:
        return _both(run, scope, node, value)
    taken, other = (node.body, node.orelse) if truth else (node.orelse, node.body)
    if not asks_who(value):
        return run.execute(run, scope, taken)
    guard = Guard(node.test, scope.module, value.origin, truth, len(run.stack))
    with run.within("guards", guard):
        left = run.execute(run, scope, taken)
    if left is None and leaves(other):
        run.guards = (*run.guards, guard)
    return left


def leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether a block ends by leaving the loop, the function or the program."""
    if not body:
        return False
    last = body[-1]
    if isinstance(last, ast.If):
        return leaves(last.body) and leaves(last.orelse)
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        func = last.value.func
        return (isinstance(func, ast.Attribute) and func.attr in {"exit", "_exit"}) or (
            isinstance(func, ast.Name) and func.id in {"exit", "quit"}
        )
    return isinstance(last, (ast.Return, ast.Continue, ast.Break, ast.Raise))


def _both(run: Run, scope: Scope, node: ast.If, value: Value) -> Exit | None:
    ways = (("if", node.body), ("else", node.orelse))
    left = take_all(run, scope, node, value, ways, "if", node.test)
    if asks_who(value) and leaves(node.body) != leaves(node.orelse):
        run.tests = (*run.tests, (node.test, value, leaves(node.orelse)))  # of what follows, in the arm that stays
    return left


def take_all(
    run: Run,
    scope: Scope,
    node: ast.AST,
    value: Value,
    ways: Iterable[tuple[str, Sequence[ast.stmt]]],
    kind: Literal["if", "except", "finally", "match"],
    test: ast.AST,
) -> Exit | None:
    """Run each arm from the same state; go on with what they leave together."""
    base, guards, tests, items, had_group = scope.names, run.guards, run.tests, run.items, run.initialized
    # `rank == 0 and late()`: only ranks for which the first half holds reach both arms.
    within = (*guards, *run.implied.get(test, ()))
    arms, ends, num_returns = [], [], len(scope.returns)
    written, num_written = [], len(run.written)
    joins, returns = [], []
    for label, body in ways:
        scope.names, run.guards, run.items, run.initialized = dict(base), within, [], had_group
        run.tests = (*tests, (test, value, label == "if"))
        left = run.execute(run, scope, body)
        arms.append(Arm(label, run.items, left))
        ends.append((scope.names, left))
        written.append((run.take_back(num_written), left))
        joins.append(bool(run.initialized))
        returns.append(scope.returns[num_returns:])
        del scope.returns[num_returns:]
    run.guards, run.tests, run.items, run.initialized = guards, tests, items, had_group or any(joins)
    if any(joins) and not had_group:
        # Of a job of several ranks all go the way that makes the group: the other one is for a single process.
        ends, written = list(compress(ends, joins)), list(compress(written, joins))
        returns = list(compress(returns, joins))
        if joins[0] != joins[-1] and kind == "if":
            run.settle(value, joins[0])
    elif kind == "if" and [left is None or left.kind in {"break", "continue"} for _, left in ends].count(True) == 1:
        scope.passed.append((value, ends[0][1] is None))
    scope.returns += chain.from_iterable(returns)
    _write_arms(run, scope, written, value)
    finish_fork(run, scope, Fork(node, scope.module, value, tuple(arms), kind, within), num_returns)
    return go_on(scope, ends, value)


def each_way(run: Run, module: Module, node: ast.AST, test: Value, ways: Sequence[Callable[[], Value]]) -> Value:
    """What an expression gives of which nobody can tell which way it goes; what is done on any of them is seen."""
    arms, values, asked = [], [], getattr(node, "test", getattr(node, "func", node))
    for number, way in enumerate(ways):
        label = "else" if number else "if"
        with run.gathering() as items, run.within("tests", (asked, test, not number)):
            values.append(way())
        arms.append(Arm(label, items))
    if not run.dry and any(arm.items for arm in arms):
        run.items.append(Fork(node, module, test, tuple(arms), "if", run.guards))
    return reduce(lambda one, other: joined(one, other, test), values)


def finish_fork(run: Run, scope: Scope, fork: Fork, num_returns: int) -> None:
    """Keep a fork that holds anything; what it returns depends on its test."""
    if not run.dry and any(arm.items for arm in fork.arms):
        run.items.append(fork)
    # Where all other ways end the program, what is returned does not depend on the test.
    ways = [arm for arm in fork.arms if arm.exit is None or arm.exit.kind not in {"raise", "exit"}]
    # An exception outside of all loops, where things are set up, mostly strikes all ranks.
    is_weak = fork.kind == "except" and not run.loops
    if (fork.value.spread or fork.value.origin) and not is_weak and len(ways) > 1 and len(scope.returns) > num_returns:
        scope.tint = fork.value if scope.tint is None else joined(scope.tint, fork.value)


def go_on(scope: Scope, ends: Sequence[tuple[dict[str, Value], Exit | None]], value: Value) -> Exit | None:
    """Join what the arms that did not leave have left in the names."""
    staying = [names for names, left in ends if left is None]
    if not staying:
        scope.names = ends[-1][0]
        return min((left for _, left in ends if left is not None), key=lambda left: _REACH[left.kind])
    scope.names = merged(staying, value)
    return None


_Written = dict[tuple[int, str], tuple[dict[str, Value], Value]]


def _write_arms(run: Run, scope: Scope, ends: Sequence[tuple[_Written, Exit | None]], test: Value) -> None:
    """Attributes hold what one arm or another has left in them."""
    # What a way has set that ends by `return` is there behind the call, perhaps.
    scope.returned += [written for written, left in ends if left is not None and left.kind == "return"]
    if not any(written for written, _ in ends):
        return
    staying = [written for written, left in ends if left is None] or [ends[-1][0]]
    for (number, name), (table, _) in {key: one for written in staying for key, one in written.items()}.items():
        before = table.get(name)
        values = [written[number, name][1] if (number, name) in written else before for written in staying]
        first, *rest = [value for value in values if value is not None]
        for other in rest:
            first = joined(first, other, test)
        run.write(table, name, first)


#: The nearest place that one of the paths goes on to.
_REACH = {"continue": 0, "break": 1, "return": 2, "exit": 3, "raise": 4}


def merged(states: Sequence[dict[str, Value]], test: Value) -> dict[str, Value]:
    """One state of names from several; a name that only some have keeps what it has there."""
    first, *rest = states
    if not rest:
        return first
    result = dict(first)
    for state in rest:
        for name, value in state.items():
            mine = result.get(name)
            if mine is None:
                result[name] = value
            elif mine is not value:
                result[name] = joined(mine, value, test)
    return result


def run_match(run: Run, scope: Scope, node: ast.Match) -> Exit | None:
    """Run the case that is decided, or all."""
    subject = run.evaluate(run, scope, node.subject)
    for case in node.cases:
        truth = _matches(run, scope, subject, case)
        if truth is None:
            break
        if truth:
            if not asks_who(subject):
                return run.execute(run, scope, case.body)
            guard = Guard(node.subject, scope.module, subject.origin, outcome=True, depth=len(run.stack))
            with run.within("guards", guard):
                return run.execute(run, scope, case.body)
    else:
        return None
    ways: list[tuple[str, Sequence[ast.stmt]]] = [
        ("if" if not number else "else", case.body) for number, case in enumerate(node.cases)
    ]
    if not any(isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None for case in node.cases):
        ways.append(("else", []))
    return take_all(run, scope, node, subject, ways, "match", node.subject)


def _matches(run: Run, scope: Scope, subject: Value, case: ast.match_case) -> bool | None:
    found = _pattern(run, scope, subject, case.pattern)
    if found and case.guard is not None:
        return run.evaluate(run, scope, case.guard).truth()
    return found


def _pattern(run: Run, scope: Scope, subject: Value, pattern: ast.pattern) -> bool | None:
    match pattern:
        case ast.MatchAs(pattern=None, name=name):
            if name is not None:
                scope.names[name] = subject
            return True
        case ast.MatchValue(value=value):
            wanted = run.evaluate(run, scope, value)
            return bool(subject.const == wanted.const) if subject.is_known and wanted.is_known else None
        case ast.MatchSingleton(value=value):
            return subject.const is value if subject.is_known else None
        case ast.MatchOr(patterns=patterns):
            found = [_pattern(run, scope, subject, one) for one in patterns]
            return True if True in found else None if None in found else False
        case _:
            return None


def run_try(run: Run, scope: Scope, node: ast.Try) -> Exit | None:
    """Run the body, then each handler as what happens on one rank only, then what is done in any case."""
    base, guards, num_returns = dict(scope.names), run.guards, len(scope.returns)
    with run.gathering() as items:
        left = run.execute(run, scope, node.body)
        if left is None:
            left = run.execute(run, scope, node.orelse)
    after, arms = scope.names, [Arm("try", items, left)]
    ends, num_written = [(after, left)], len(run.written)
    written: list[tuple[_Written, Exit | None]] = [({}, left)]
    origin = frozenset({"exception"} if run.loops else {"exception", "once"})
    local = Value(spread=Spread.LOCAL, origin=origin)
    for handler in node.handlers:
        is_same = _names_only(handler.type, _SAME_EVERYWHERE) or (
            _names_only(handler.type, _OF_VALUES) and _are_equal(base, after)
        )
        value = Value() if is_same else local
        scope.names, run.guards = merged([base, after], value), guards
        if handler.name:
            scope.names[handler.name] = value
        with run.gathering() as items, run.within("tests", (handler, value, True)):
            caught = run.execute(run, scope, handler.body)
        arms.append(Arm("except" if value.spread else "except, on all", items, caught))
        ends.append((scope.names, caught))
        written.append((run.take_back(num_written), caught))
    _write_arms(run, scope, written, local)
    run.guards = guards
    if not node.handlers:
        run.items.extend(arms[0].items)
        left = ends[0][1]
        scope.names = ends[0][0]
    else:
        finish_fork(run, scope, Fork(node, scope.module, local, tuple(arms), "except", guards), num_returns)
        left = go_on(scope, ends, local if any(arm.label == "except" for arm in arms) else Value())
    return _finally(run, scope, node) or left


def _finally(run: Run, scope: Scope, node: ast.Try) -> Exit | None:
    if not node.finalbody:
        return None
    items: list[Item]
    with run.gathering() as items, run.within("contexts", "finally"):
        left = run.execute(run, scope, node.finalbody)
    if items and not run.dry:
        arm = Arm("finally", items, left)
        run.items.append(Fork(node, scope.module, Value(), (arm,), "finally", run.guards))
    return left


def _names_only(type_: ast.expr | None, known: frozenset[str]) -> bool:
    names = type_.elts if isinstance(type_, ast.Tuple) else [type_] if type_ is not None else []
    return bool(names) and all(getattr(name, "id", getattr(name, "attr", "")) in known for name in names)


def _are_equal(before: Mapping[str, Value], after: Mapping[str, Value]) -> bool:
    """Whether what was assigned in between is the same on all ranks: it then fails on all, or on none."""
    new = [value for name, value in after.items() if value is not before.get(name)]
    return bool(new) and not any(mixed((value,)).spread for value in new)
