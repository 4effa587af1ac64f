"""Loops of the simulated run: one dry turn to see what changes, then one turn that counts."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.interpreter.branches import asks_who, merged
from rankwise.lint.interpreter.calls import part_of
from rankwise.lint.interpreter.history import Exit, Loop
from rankwise.lint.interpreter.values import (
    ANY,
    NUMBER,
    Bound,
    Function,
    Guard,
    Instance,
    Items,
    Library,
    Object,
    Spread,
    Suspended,
    Value,
    joined,
    mixed,
    object_of,
)
from rankwise.lint.library.names import LOADER

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.lint.interpreter.run import Run, Scope

_DATA = Value(spread=Spread.LOCAL, origin=frozenset({"data"}), path="(batch)")
_MOST_UNROLLED = 4
_MOST_LISTED = 5000


def run_for(run: Run, scope: Scope, node: ast.For) -> Exit | None:
    """Run a `for` loop."""
    value = _iterator(run, scope, node, run.evaluate(run, scope, node.iter))
    each = to_unroll(value)
    if each is not None:
        return _unroll(run, scope, node, value, each)

    def turn(element: Value | None = None) -> Exit | None:
        run.bind(run, scope, node.target, element if element is not None else element_of(value))
        return run.execute(run, scope, node.body)

    left: list[Exit | None] = [None]
    suspended, wrap = generator_of(value)
    if suspended is not None:

        def once() -> Exit | None:
            left[0] = None

            def on_yield(yielded: Value) -> None:
                left[0] = turn(wrap(yielded))

            suspended.resume(on_yield)
            return left[0]

        with run.gathering() as items:
            _loop(run, scope, node, value, once, None)
        # The turns are those of the generator's own loops.
        for item in items:
            run.items.extend(item.items if isinstance(item, Loop) and item.node is node else [item])
    else:
        is_whole = isinstance(value.thing, Items) and value.thing.is_whole
        _loop(run, scope, node, Value(thing=value.thing) if is_whole else value, turn, turns_of(value))
    return run.execute(run, scope, node.orelse)


def _iterator(run: Run, scope: Scope, node: ast.For, value: Value) -> Value:
    """What `iter` of an object of the user's gives, where it is a generator."""
    inner = getattr(value.thing, "attrs", {}).get("of")
    if inner is not None and isinstance(inner.thing, Instance):  # `enumerate(prefetcher)`
        value.thing.attrs["of"] = _iterator(run, scope, node, inner)
    if isinstance(value.thing, Instance):
        method = value.thing.cls.find("__iter__")
        if method is not None and isinstance(method.thing, Function):
            made = run.call(run, Value(thing=Bound(value, method.thing)), (), {}, node.iter, scope=scope)
            return made if isinstance(made.thing, (Suspended, Items, Object)) else value
    return value


def run_while(run: Run, scope: Scope, node: ast.While) -> Exit | None:
    """Run a `while` loop."""
    first = run.evaluate(run, scope, node.test)
    if first.truth() is False and first.is_known and (not first.spread or asks_who(first)):
        return run.execute(run, scope, node.orelse)
    is_endless = isinstance(node.test, ast.Constant) and first.truth() is True
    tests = [first]

    def turn() -> Exit | None:
        if not is_endless:
            tests.append(run.evaluate(run, scope, node.test))
        return run.execute(run, scope, node.body)

    left = _loop(run, scope, node, None, turn, None, test=lambda: tests[-1])
    if is_endless and left is not None and left.kind in {"return", "raise", "exit"}:
        return left
    return run.execute(run, scope, node.orelse)


def _loop(
    run: Run,
    scope: Scope,
    node: ast.For | ast.While,
    value: Value | None,
    turn: Callable[[], Exit | None],
    turns: int | None,
    test: Callable[[], Value] | None = None,
) -> Exit | None:
    base, guards = scope.names, run.guards
    implied = run.implied.get(node.test, ()) if isinstance(node, ast.While) else ()
    if isinstance(node, ast.While) and test is not None and asks_who(test()) and test().truth():
        implied = (*implied, Guard(node.test, scope.module, test().origin, outcome=True, depth=len(run.stack)))
    with run.within("loops", node), run.within("guards", *implied):
        inner = run.guards
        if not run.dry:
            scope.names = dict(base)
            run.dry += 1
            with run.gathering():
                turn()
            run.dry -= 1
            run.guards = inner
            base = widened(base, scope.names)
        scope.names = dict(base)
        with run.gathering() as items:
            left = turn()
    run.guards = guards
    scope.names = merged([base, scope.names], ANY)
    final = test() if test is not None else value or ANY
    run.keep_loop(Loop(node, scope.module, final, items, turns, guards))
    return left


def widened(before: dict[str, Value], after: dict[str, Value]) -> dict[str, Value]:
    """The names as any later turn may find them."""
    result = dict(before)
    for name, value in before.items():
        now = after.get(name)
        if now is not None and now is not value:
            result[name] = joined(value, now)
    return result


def generator_of(value: Value) -> tuple[Suspended | None, Callable[[Value], Value]]:
    """The generator that a loop runs, and what the loop makes of each value of it."""
    thing = value.thing
    if isinstance(thing, Object) and thing.kind == "enumerate" and isinstance(thing.attrs["of"].thing, Suspended):
        return thing.attrs["of"].thing, lambda one: Value(thing=Items([ANY, one], kind="tuple"))
    return (thing if isinstance(thing, Suspended) else None), lambda one: one


def to_unroll(value: Value) -> list[Value] | None:
    """The parts that a loop over a short list is run for one by one; None if one turn stands for all."""
    thing = value.thing
    if not isinstance(thing, Items) or not thing.is_whole or not 0 < len(thing.values) <= _MOST_UNROLLED:
        return None
    parts = thing.values if thing.keys is None else thing.keys
    inner = [one for part in parts for one in getattr(part.thing, "values", (part,))]
    is_each_own = any(isinstance(one.thing, (Object, Instance, Library, Function)) for one in inner)
    return list(parts) if is_each_own or all(isinstance(part.const, str) for part in parts) else None


def _unroll(run: Run, scope: Scope, node: ast.For, value: Value, each: list[Value]) -> Exit | None:
    with run.within("loops", node), run.gathering() as items:
        for part in each:
            run.bind(run, scope, node.target, part)
            run.execute(run, scope, node.body)
    # How many values a whole list or table has does not depend on what they are.
    run.keep_loop(Loop(node, scope.module, Value(thing=value.thing), items, None, run.guards))
    return run.execute(run, scope, node.orelse)


def turns_of(value: Value) -> int | None:
    """How many turns a loop over it makes, where that is known."""
    thing = value.thing
    if isinstance(thing, Items) and thing.is_whole:
        return len(thing.values)
    if isinstance(thing, Object):
        if thing.kind == "range":
            length: int | None = thing.attrs["length"].const if thing.attrs["length"].is_known else None
            return length
        if thing.kind in {"enumerate", "reversed"}:
            return turns_of(thing.attrs["of"])
    if isinstance(value.const, (range, tuple, list, str)):
        return len(value.const)
    return None


def plain_list(value: Value) -> list[object] | None:
    """The constants of a list or range, or None if not all of them are known."""
    thing = value.thing
    if isinstance(thing, Items) and thing.is_whole:
        parts = thing.values if thing.keys is None else thing.keys
        return [part.const for part in parts] if all(part.is_known for part in parts) else None
    if isinstance(thing, Object) and thing.kind == "range":
        bounds = [bound.const for bound in thing.attrs["bounds"].thing.values]
        if thing.attrs["length"].is_known and thing.attrs["length"].const < _MOST_LISTED:
            return list(range(*bounds))
    return None


def element_of(value: Value) -> Value:
    """What a loop over it binds at each turn."""
    thing = object_of(value)
    if isinstance(thing, Items):
        parts = thing.values if thing.keys is None else thing.keys
        return parts[0] if len(parts) == 1 and thing.is_whole else mixed((value, *parts))
    if not isinstance(thing, Object):
        return part_of(value)
    if thing.kind in {"enumerate", "reversed"}:
        inner = element_of(thing.attrs["of"])
        index = Value(thing=NUMBER)
        return Value(thing=Items([index, inner], kind="tuple")) if thing.kind == "enumerate" else inner
    if thing.kind == "zip":
        return Value(thing=Items([element_of(one) for one in thing.attrs["of"].thing.values], kind="tuple"))
    if thing.kind == LOADER or thing.kind.endswith(("DataLoader", "Loader")):
        return _DATA
    if thing.kind == "parameters":
        one = Value(thing=Object("parameter", thing.call))
        is_named = thing.call is not None and thing.call.name.endswith("named_parameters")
        return Value(thing=Items([ANY, one], kind="tuple")) if is_named else one
    if thing.kind == "range":
        bounds = mixed(thing.attrs["bounds"].thing.values)
        return Value(bounds.spread, bounds.origin, thing=NUMBER, made=thing.call)
    return part_of(value)
