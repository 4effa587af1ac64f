"""Calls in the run on paper: of the user's functions, which run in place, and of libraries, which tables know."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from rankwise.lint.library.hints import is_same_for_all, main_of, role_of
from rankwise.lint.model.attributes import guess
from rankwise.lint.model.calls import Call, Guard, Site
from rankwise.lint.model.history import Exit, Inline
from rankwise.lint.model.library_calls import call_library, call_method, call_named, call_object, fill
from rankwise.lint.model.run import DEEPEST, Run, Scope
from rankwise.lint.model.training import forward, is_parallel, synced_forward
from rankwise.lint.model.values import (
    ANY,
    NONE,
    Bound,
    Function,
    Instance,
    Items,
    Library,
    Method,
    Object,
    Spread,
    Suspended,
    UserClass,
    Value,
    joined,
    known,
    mixed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rankwise.lint.program import Module


def call(
    run: Run,
    func: Value,
    args: tuple[Value, ...],
    kwargs: dict[str, Value],
    node: ast.AST | None,
    *,
    scope: Scope | None = None,
    has_star: bool = False,
) -> Value:
    """The value of a call, and what it does."""
    thing = func.thing
    module = (
        scope.module
        if scope is not None
        else run.functions[-1].module
        if run.functions
        else run.memo["top"].module
    )
    if node is None:
        return mixed((*args, *kwargs.values()))
    if isinstance(thing, Function):
        value = call_function(run, thing, args, kwargs, node, module)
        _pass_on_fills(run, thing, node, scope, 0)
        return value
    if isinstance(thing, Bound):
        value = call_function(run, thing.function, (thing.receiver, *args), kwargs, node, module)
        _pass_on_fills(run, thing.function, node, scope, 1)
        return value
    if isinstance(thing, UserClass):
        return instantiate(run, thing, args, kwargs, node, module)
    if isinstance(thing, Instance):
        return _call_instance(run, func, thing, args, kwargs, node, module)
    made = Call(name="", node=node, module=module, args=args, kwargs=kwargs, has_star=has_star)
    if isinstance(thing, Library):
        made.name = thing.name
        return call_library(run, made, scope)
    if isinstance(thing, Method):
        made.name, made.receiver = thing.name, thing.receiver
        return call_method(run, made, scope, func)
    if isinstance(thing, Object):
        made.receiver = func
        return call_object(run, made, thing, scope)
    return call_named(run, made, func, scope)


def _pass_on_fills(run: Run, function: Function, node: ast.AST, scope: Scope | None, skipped: int) -> None:
    """What a collective inside a function has written into a parameter is in the caller's argument."""
    fills: dict[str, Value] = run.memo.get(("fills", function.node), {})
    if not fills or scope is None or not isinstance(node, ast.Call):
        return
    names = [one.arg for one in (*function.node.args.posonlyargs, *function.node.args.args)][skipped:]
    given = {
        **dict(zip(names, node.args, strict=False)),
        **{one.arg: one.value for one in node.keywords if one.arg},
    }
    for name, new in fills.items():
        target = given.get(name)
        if isinstance(target, (ast.Name, ast.Attribute, ast.Subscript)):
            old = run.evaluate(run, scope, target)
            fill(run, scope, target, Value(origin=new.origin, thing=old.thing, via=old.via))


def call_function(
    run: Run,
    function: Function,
    args: tuple[Value, ...],
    kwargs: dict[str, Value],
    node: ast.AST,
    module: Module,
) -> Value:
    """Run a function of the user's in place."""
    if _is_too_deep(run, function) or not _is_worth_it(run, function):
        return _result_by_name(run, function, (*args, *kwargs.values()))
    scope = Scope(module=function.module, parent=function.scope, function=function)
    scope.names = bound_arguments(run, function, args, kwargs)
    if isinstance(function.node, ast.Lambda):
        with _inside(run, function, scope, node, module):
            return run.evaluate(run, scope, function.node.body)
    if is_generator(run, function):
        return _suspended(run, function, scope, node, module)
    key = _key(run, function, scope)
    if key is not None and key in run.barren:
        return run.barren[key][1]
    num_ops = run.num_ops
    value = _run_body(run, function, scope, node, module)
    if not value.is_known and value.thing is None and value.spread is Spread.RANK:
        # `get_rank()` that asks first whether there is a group: its name tells what the branches leave open.
        value = _named(run, function) or value
    if key is not None and run.num_ops == num_ops:
        # The values stay with the result, so that no other object gets the id of one of them.
        run.barren[key] = (tuple(scope.names.values()), value)
    return value


def _key(run: Run, function: Function, scope: Scope) -> tuple[object, ...] | None:
    """What a call that does nothing together with others depends on; None if it can't be told."""
    if run.dry or run.moment is not None or isinstance(function.node, ast.Lambda):
        return None
    given = _given(scope.names.values())
    return (
        function.node,
        id(function.scope),
        given,
        tuple(id(guard.node) for guard in run.guards),
        run.initialized,
    )


_PLAIN = (int, str, float, bool, type(None))


def _given(values: Iterable[Value]) -> tuple[object, ...]:
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
        run.budget <= 0
        or len(run.functions) >= DEEPEST
        or sum(one.node is function.node for one in run.functions) >= 2
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


def _result_by_name(run: Run, function: Function, values: Sequence[Value]) -> Value:
    return _named(run, function) or mixed(values)


def _named(run: Run, function: Function) -> Value | None:
    asks_for_another = len(function.node.args.args) > 2
    if not asks_for_another and (role := role_of(function.name)) is not None:
        return run.role(role)
    if (main := main_of(function.name)) is not None:
        return run.is_rank(0, main)
    return None


class _inside:  # noqa: N801 - used as `with _inside(...)`
    """Stand inside a function for a while."""

    def __init__(self, run: Run, function: Function, scope: Scope, node: ast.AST, module: Module) -> None:
        self.run, self.function, self.scope, self.node, self.module = run, function, scope, node, module

    def __enter__(self) -> None:
        run = self.run
        self.before = (run.functions, run.stack, run.guards, run.contexts, run.selves)
        if self.function.owner is not None:
            run.selves = (*run.selves, next(iter(self.scope.names.values()), ANY))
        run.functions = (*run.functions, self.function)
        run.stack = (*run.stack, Site(self.node, self.module))
        run.executed.add(self.function.node)
        if "no_grad" in self.function.marks:
            run.contexts = (*run.contexts, "no_grad")

    def __exit__(self, *_error: object) -> None:
        run = self.run
        run.functions, run.stack, run.guards, run.contexts, run.selves = self.before


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
    # Where nothing is done together, the ways out of a function do not matter, unless they end the program.
    if items and not run.dry and (run.num_ops > num_ops or _ends_program(items)):
        run.items.append(Inline(node, module, function, items))
    if not scope.returns:
        return NONE
    value = scope.returns[0]
    for other in scope.returns[1:]:
        value = joined(value, other, scope.tint)
    if scope.tint is not None and value.spread < scope.tint.spread:
        value = joined(
            value,
            Value(value.spread, value.origin, value.const, value.thing, value.path, value.via),
            scope.tint,
        )
    if is_same_for_all(function.name) and value.spread and _did_collective(items):
        return Value(thing=value.thing, via=value.via)
    return value


def _ends_program(items: list[Any]) -> bool:
    return any(
        (isinstance(item, Exit) and item.kind == "exit")
        or any(_ends_program(arm.items) for arm in getattr(item, "arms", ()))
        or _ends_program(getattr(item, "items", []))
        for item in items
    )


def _did_collective(items: list[Any]) -> bool:
    return bool(items)


def is_generator(run: Run, function: Function) -> bool:
    """Whether calling it runs nothing yet."""
    key = ("generator", function.node)
    found = run.memo.get(key)
    if found is None:
        found = run.memo[key] = _has_yield(function.node)
    return bool(found)


def _has_yield(node: ast.AST) -> bool:
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
            # What follows the yield is the caller's code: it is not inside the generator, but keeps its contexts and guards.
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
    defaults = dict(
        zip(positional[len(positional) - len(function.defaults) :], function.defaults, strict=True)
    )
    for name in (*positional, *(one.arg for one in node.kwonlyargs)):
        if name not in names:
            names[name] = defaults.get(name) or function.kw_defaults.get(name) or guess(run, name)
    return names


def instantiate(
    run: Run, cls: UserClass, args: tuple[Value, ...], kwargs: dict[str, Value], node: ast.AST, module: Module
) -> Value:
    """Make an object of the user's class."""
    key = ("made", node, *_given(args), tuple(kwargs), *_given(kwargs.values())) if not run.dry else None
    if key in run.barren:
        return run.barren[key][1]
    num_ops = run.num_ops
    value = _instantiate(run, cls, args, kwargs, node, module)
    if key is not None and run.num_ops == num_ops:
        # One place that makes an object of the same things again: as in a loop, one object stands for all.
        run.barren[key] = ((*args, *kwargs.values()), value)
    return value


def _instantiate(
    run: Run, cls: UserClass, args: tuple[Value, ...], kwargs: dict[str, Value], node: ast.AST, module: Module
) -> Value:
    instance = Instance(cls)
    made = Call(name=f"user.{cls.node.name}", node=node, module=module, args=args, kwargs=kwargs)
    value = Value(thing=instance)
    made.result = value
    instance.call = run.record(made)
    init = cls.find("__init__")
    if init is not None and isinstance(init.thing, Function):
        call_function(run, init.thing, (value, *args), kwargs, node, module)
        return value
    fields = [
        statement.target.id
        for statement in cls.node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]
    for name, one in (*zip(fields, args, strict=False), *kwargs.items()):
        instance.attrs[name] = one
    spread = mixed((*args, *kwargs.values()))
    return Value(spread.spread if spread.spread is Spread.LOCAL else Spread.EQUAL, thing=instance)


def _call_instance(
    run: Run,
    func: Value,
    thing: Instance,
    args: tuple[Value, ...],
    kwargs: dict[str, Value],
    node: ast.AST,
    module: Module,
) -> Value:
    for name in ("__call__", "forward"):
        found = thing.cls.find(name)
        if found is not None and isinstance(found.thing, Function):
            result = call_function(run, found.thing, (func, *args), kwargs, node, module)
            if name == "forward":
                # Activations differ as the data do, whatever the text of forward shows.
                value = mixed((result, *args, *kwargs.values()))
                made = Call(
                    name="torch.nn.Module.__call__",
                    node=node,
                    module=module,
                    args=args,
                    kwargs=kwargs,
                    receiver=func,
                )
                made.result = Value(
                    max(value.spread, Spread.LOCAL),
                    value.origin | {"data"},
                    thing=result.thing if isinstance(result.thing, Items) else None,
                    via=value.via,
                )
                run.record(made)
                if is_parallel(func):
                    made.result = forward(run, made, thing)
                else:
                    synced_forward(run, made, thing)
                return made.result
            return result
    value = mixed((*args, *kwargs.values()))
    if thing.cls.library_bases():
        made = Call(
            name="torch.nn.Module.__call__", node=node, module=module, args=args, kwargs=kwargs, receiver=func
        )
        made.result = value
        run.record(made)
    return value
