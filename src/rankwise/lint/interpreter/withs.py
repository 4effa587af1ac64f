"""`with` in the simulated run: contexts that change what is legal inside, and the user's own context managers."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.interpreter.history import Arm, Fork
from rankwise.lint.interpreter.values import ANY, Bound, Function, Instance, Library, Object, Spread, Suspended, Value
from rankwise.lint.library.names import OPEN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.lint.interpreter.history import Exit
    from rankwise.lint.interpreter.run import Run, Scope


def run_with(run: Run, scope: Scope, node: ast.With) -> Exit | None:
    """Enter the items one after the other, then run the body."""
    return _enter(run, scope, node.items, node.body)


def _enter(run: Run, scope: Scope, items: Sequence[ast.withitem], body: Sequence[ast.stmt]) -> Exit | None:
    if not items:
        return run.execute(run, scope, body)
    item, *rest = items
    value = run.evaluate(run, scope, item.context_expr)
    thing = value.thing
    left: list[Exit | None] = [None]
    if isinstance(thing, Suspended):

        def go_on(yielded: Value) -> None:
            if item.optional_vars is not None:
                run.bind(run, scope, item.optional_vars, yielded)
            left[0] = _enter(run, scope, rest, body)

        thing.resume(go_on)
        return left[0]
    entered = _call_method(run, item, value, "__enter__", ()) if isinstance(thing, Instance) else value
    if item.optional_vars is not None:
        run.bind(run, scope, item.optional_vars, entered)
    name = _name(run, scope, item.context_expr, value)
    if name == "suppress":
        return _suppress(run, scope, item, lambda: _enter(run, scope, rest, body))
    with run.within("contexts", name, *(["ordered"] if _may_order(value) else [])):
        left[0] = _enter(run, scope, rest, body)
    if isinstance(thing, Instance):
        _leave(run, scope, item, value)
    return left[0]


def _suppress(run: Run, scope: Scope, item: ast.withitem, body: Callable[[], Exit | None]) -> Exit | None:
    """`with suppress(Error)` goes on behind its body, as an `except` that does nothing."""
    local = Value(spread=Spread.LOCAL, origin=frozenset({"exception"}))
    with run.gathering() as items:
        left = body()
    if items and not run.dry:
        arms = (Arm("try", items, left), Arm("except"))
        run.items.append(Fork(item.context_expr, scope.module, local, arms, "except", run.guards))
    return None


def _leave(run: Run, scope: Scope, item: ast.withitem, value: Value) -> None:
    """`__exit__` runs whatever happens inside, as `finally` does."""
    with run.gathering() as items:
        _call_method(run, item, value, "__exit__", (ANY, ANY, ANY))
    if items and not run.dry:
        run.items.append(Fork(item.context_expr, scope.module, ANY, (Arm("finally", items),), "finally", run.guards))


def _call_method(run: Run, item: ast.withitem, value: Value, name: str, args: tuple[Value, ...]) -> Value:
    method = value.thing.cls.find(name)
    if method is None or not isinstance(method.thing, Function):
        return value
    return run.call(run, Value(thing=Bound(value, method.thing)), args, {}, item.context_expr)


def _may_order(value: Value) -> bool:
    """Whether ranks may go through it one after the other: a lock, `main_process_first`, what is not at hand."""
    if value.made is not None and value.made.name == "either":
        return any(map(_may_order, value.made.args))
    # Of what is only passed on, as by `nullcontext()` and `tqdm(...)`, not even a name is known.
    name = value.made.name if value.made is not None else getattr(value.thing, "kind", value.path)
    is_open = isinstance(value.thing, (Instance, Library)) or name.partition(".")[0] in {*OPEN, ""}
    return name.endswith(("_first", "Lock")) or not is_open


def _name(run: Run, scope: Scope, node: ast.expr, value: Value) -> str:
    """What stands in `Call.contexts`: the last name of what was called, with a question mark where a test chooses between it and another."""
    func = node.func if isinstance(node, ast.Call) else node
    last = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
    if func is node and value.made is not None:  # `ctx = nullcontext() if is_last else model.no_sync()`, `with ctx:`
        ways = [one.made.name for one in value.made.args if one.made is not None] if value.made.name == "either" else []
        last = f"{ways[0].rpartition('.')[2]}?" if ways else value.made.name.rpartition(".")[2]
    if last in {"join", "Join", "join_uneven_inputs"}:
        return "join"
    if not last and isinstance(value.thing, Library):
        return value.thing.name
    return value.thing.kind if not last and isinstance(value.thing, Object) else last
