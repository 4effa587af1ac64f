"""The user's own functions in the simulated run: their arguments are bound, their bodies run where they are called."""

from __future__ import annotations

import ast
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rankwise.lint.interpreter.attributes import guess
from rankwise.lint.interpreter.history import Exit, Inline
from rankwise.lint.interpreter.run import DEEPEST, Run, Scope
from rankwise.lint.interpreter.values import (
    ANY,
    NONE,
    Call,
    Function,
    Guard,
    Items,
    Site,
    Spread,
    Suspended,
    Value,
    joined,
    known,
    mixed,
)
from rankwise.lint.library.hints import is_same_for_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rankwise.lint.program import Module


def call_function(
    run: Run, function: Function, args: tuple[Value, ...], kwargs: dict[str, Value], node: ast.AST, module: Module
) -> Value:
    """Run a function of the user's in place."""
    if _is_too_deep(run, function) or not _is_worth_it(run, function):
        named = run.named(function.name, len(function.node.args.args) - 1)
        return named or _unseen(run, function, args, kwargs, node, module)
    scope = Scope(module=function.module, parent=function.scope, function=function)
    scope.names = bound_arguments(run, function, args, kwargs)
    if isinstance(function.node, ast.Lambda):
        with _inside(run, function, scope, node, module):
            return run.evaluate(run, scope, function.node.body)
    if function.module.has_generators and has_yield(function.node):
        return _suspended(run, function, scope, node, module)
    key = _key(run, function, scope)
    if key is not None and key in run.barren:
        return run.barren[key][1]
    num_ops = run.num_ops
    value = _run_body(run, function, scope, node, module)
    if not value.is_known and value.thing is None and value.spread is Spread.RANK:
        # `get_rank()` that asks first whether there is a group: its name tells what the branches leave open.
        value = run.named(function.name, len(function.node.args.args) - 1) or value
    if key is not None and run.num_ops == num_ops:
        # The values stay with the result, so that no other object gets the id of one of them; who made it may be
        # another one the next time.
        run.barren[key] = (tuple(scope.names.values()), value.given_by(None))
    return value


def _unseen(
    run: Run, function: Function, args: tuple[Value, ...], kwargs: dict[str, Value], node: ast.AST, module: Module
) -> Value:
    """What a function gives that is not looked into: it is like one whose text is not at hand."""
    receiver = args[0] if function.owner is not None and args else ANY
    made = Call(name=f"?.{function.name}", node=node, module=module, receiver=receiver, args=args, kwargs=kwargs)
    made.result = mixed((*args, *kwargs.values())).given_by(run.record(made))
    return made.result


def _key(run: Run, function: Function, scope: Scope) -> tuple[object, ...] | None:
    """What a call that does nothing together with others depends on; None if it can't be told."""
    if run.dry or run.moment is not None or isinstance(function.node, ast.Lambda):
        return None
    given = compared(scope.names.values())
    return (function.node, id(function.scope), given, tuple(id(guard.node) for guard in run.guards), run.initialized)


#: Annotations that leave open what a parameter is, or say that it is a module.
_ANYTHING = frozenset({"Any", "object", "ModuleType"})
_PLAIN = (int, str, float, bool, type(None))


def compared(values: Iterable[Value]) -> tuple[object, ...]:
    """What can be compared of some values."""
    return tuple(
        (
            value.spread,
            value.origin,
            value.const if isinstance(value.const, _PLAIN) else id(value.const),
            type(value.const),
            id(value.thing),
            value.via,
        )
        for value in values
    )


def _is_too_deep(run: Run, function: Function) -> bool:
    return (
        run.budget <= 0 or len(run.functions) >= DEEPEST or sum(one.node is function.node for one in run.functions) >= 2
    )


def _is_worth_it(run: Run, function: Function) -> bool:
    """In a library most functions have nothing to do with ranks; a program is run whole."""
    return (
        run.is_program
        or function.name in function.module.relevant
        or function.name in {"lambda", "__init__", "forward"}
        or function.scope is None
        or function.scope.parent is not None
    )


@contextmanager
def _inside(run: Run, function: Function, scope: Scope, node: ast.AST, module: Module) -> Iterator[None]:
    """Stand inside a function for a while."""
    before = (run.functions, run.stack, run.guards, run.contexts, run.selves)
    if function.owner is not None:
        run.selves = (*run.selves, next(iter(scope.names.values()), ANY))
    run.functions = (*run.functions, function)
    run.stack = (*run.stack, Site(node, module))
    run.executed.add(function.node)
    if "no_grad" in function.marks:
        run.contexts = (*run.contexts, "no_grad")
    try:
        yield
    finally:
        run.functions, run.stack, run.guards, run.contexts, run.selves = before


def _run_body(run: Run, function: Function, scope: Scope, node: ast.AST, module: Module) -> Value:
    with _inside(run, function, scope, node, module):
        role = next((mark.removeprefix("only ") for mark in function.marks if mark.startswith("only ")), None)
        if role is not None:
            test = run.is_rank(0, role)
            if not test.const:
                return Value(test.spread, test.origin, None)
            decorator = function.node.decorator_list[0]  # type: ignore[union-attr]
            run.guards = (
                *run.guards,
                Guard(decorator, function.module, test.origin, outcome=True, depth=len(run.stack)),
            )
        num_ops = run.num_ops
        with run.gathering() as items:
            run.execute(run, scope, function.node.body)  # type: ignore[arg-type]
        for (_, name), (table, value) in (one for ends in scope.returned[scope.num_alone[1] :] for one in ends.items()):
            run.write(table, name, joined(table.get(name, value), value))
    # Where nothing is done together, the ways out of a function do not matter, unless they end the program.
    if items and not run.dry and (run.num_ops > num_ops or _ends_program(items) or _raises(items)):
        run.items.append(Inline(node, module, function, items))
    value, *others = scope.returns[scope.num_alone[0] :] or scope.returns or [NONE]
    for other in others:
        value = joined(value, other, scope.tint)
    if scope.tint is not None and value.spread < scope.tint.spread:
        value = joined(value, value.given_by(None), scope.tint)
    if is_same_for_all(function.name) and value.spread and items:
        return Value(thing=value.thing, via=value.via)
    return value


def _ends_program(items: list[Any]) -> bool:
    return any(
        (isinstance(item, Exit) and item.kind == "exit")
        or any(_ends_program(arm.items) for arm in getattr(item, "arms", ()))
        or _ends_program(getattr(item, "items", []))
        for item in items
    )


def _raises(items: list[Any]) -> bool:
    """Whether it surely ends by an exception: by a `raise` that stands under no test whose outcome is open."""
    return any(isinstance(item, Exit) and item.kind == "raise" for item in items)


@lru_cache(maxsize=2048)
def has_yield(node: ast.AST) -> bool:
    """Whether there is a `yield` in a function, or in a statement, that is its own."""
    todo = list(getattr(node, "body", ()))
    while todo:
        one = todo.pop()
        if isinstance(one, (ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            todo.extend(ast.iter_child_nodes(one))
    return False


def _suspended(run: Run, function: Function, scope: Scope, node: ast.AST, module: Module) -> Value:
    names = scope.names

    def resume(on_yield: Callable[[Value], None]) -> None:
        outside = (run.functions, run.stack, run.guards, run.contexts)

        def step_out(value: Value) -> None:
            # What follows the yield is the caller's code: it is not inside the generator, but keeps its contexts and
            # guards.
            inside = (run.functions, run.stack)
            run.functions, run.stack = outside[0], outside[1]
            on_yield(value)
            run.functions, run.stack = inside

        scope.names, scope.on_yield = dict(names), step_out
        with _inside(run, function, scope, node, module):
            run.execute(run, scope, function.node.body)  # type: ignore[arg-type]

    return Value(thing=Suspended(resume, function.name))


def bound_arguments(
    run: Run, function: Function, args: tuple[Value, ...], kwargs: dict[str, Value]
) -> dict[str, Value]:
    """Names of the parameters with what was given, with defaults, or with what their names tell."""
    node = function.node.args
    positional = [one.arg for one in (*node.posonlyargs, *node.args)]
    names: dict[str, Value] = dict(zip(positional, args, strict=False))
    if node.vararg is not None:
        names[node.vararg.arg] = Value(thing=Items(list(args[len(positional) :]), kind="tuple"))
    rest: dict[str, Value] = {}
    allowed = {*positional, *(one.arg for one in node.kwonlyargs)}
    for name, value in kwargs.items():
        (names if name in allowed else rest)[name] = value
    if node.kwarg is not None:
        names[node.kwarg.arg] = Value(
            thing=Items(list(rest.values()), keys=[known(name) for name in rest], kind="dict")
        )
    defaults = dict(zip(positional[len(positional) - len(function.defaults) :], function.defaults, strict=True))
    typed = {
        one.arg
        for one in (*node.posonlyargs, *node.args, *node.kwonlyargs)
        if one.arg == "dist"
        and one.annotation is not None
        and ast.unparse(one.annotation).strip("'\"").rpartition(".")[2] not in _ANYTHING
    }
    for name in (*positional, *(one.arg for one in node.kwonlyargs)):
        if name not in names:
            # `dist: DistributedContext` is an object of a class, not torch's module.
            given = defaults.get(name) or function.kw_defaults.get(name)
            names[name] = given or (ANY if name in typed else guess(run, name))
    return names
