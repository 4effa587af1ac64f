"""Calls in the simulated run: of the user's functions, which run in place, and of libraries, which tables know."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rankwise.lint.interpreter.branches import each_way
from rankwise.lint.interpreter.functions import call_function, compared
from rankwise.lint.interpreter.library_calls import call_library, call_method, call_named, call_object, fill
from rankwise.lint.interpreter.notes import note_misfit
from rankwise.lint.interpreter.training import forward, is_parallel, synced_forward
from rankwise.lint.interpreter.values import (
    Bound,
    Call,
    Choice,
    Function,
    Instance,
    Items,
    Library,
    Method,
    Object,
    Spread,
    UserClass,
    Value,
    mixed,
)
from rankwise.lint.library.constructor_table import PASS_ON

if TYPE_CHECKING:
    from rankwise.lint.interpreter.run import Run, Scope
    from rankwise.lint.program import Module


#: Of so many classes, which a setting chooses from, each is made.
_MOST = 6


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
    module = run.module if scope is None else scope.module
    if node is None:
        return mixed((*args, *kwargs.values()))
    if isinstance(func.thing, Choice):
        if any(isinstance(way.thing, (UserClass, Library)) for way in func.thing.ways):
            doing = partial(call, args=args, kwargs=kwargs, node=node, scope=scope, has_star=has_star)
            return each_way(run, module, node, func, [partial(doing, run, way) for way in func.thing.ways[:_MOST]])
        func = run.choose(func.thing.ways)
    return _call(run, func, args, kwargs, node, module, scope, has_star=has_star)


def _call(
    run: Run,
    func: Value,
    args: tuple[Value, ...],
    kwargs: dict[str, Value],
    node: ast.AST,
    module: Module,
    scope: Scope | None,
    *,
    has_star: bool,
) -> Value:
    thing = func.thing
    if isinstance(thing, Function):
        if isinstance(node, ast.Call):
            note_misfit(run, node, module, thing, len(args), kwargs)
        value = call_function(run, thing, args, kwargs, node, module)
        _pass_on_fills(run, thing, node, scope, 0)
        return value
    if isinstance(thing, Bound):
        made = thing.receiver.made
        if isinstance(node, ast.Call) and made is not None and made.name.startswith("user."):
            note_misfit(run, node, module, thing.function, len(args) + 1, kwargs)
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
        value = call_library(run, made, scope)
    elif isinstance(thing, Method):
        made.name, made.receiver = thing.name, thing.receiver
        value = call_method(run, made, scope, func)
    elif isinstance(thing, Object):
        made.receiver = func
        value = call_object(run, made, thing, scope)
    else:
        value = call_named(run, made, func)
    return _given_by(made, value)


def _given_by(made: Call, value: Value) -> Value:
    """What a call has given, which remembers it; what was only passed on remembers who gave it first."""
    if not made.name or made.name in PASS_ON:
        return value
    made.result = value.given_by(made)
    return made.result


def _pass_on_fills(run: Run, function: Function, node: ast.AST, scope: Scope | None, skipped: int) -> None:
    """What a collective inside a function has written into a parameter is in the caller's argument."""
    fills: dict[str, Value] = run.memo.get(("fills", function.node), {})
    if not fills or scope is None or not isinstance(node, ast.Call):
        return
    names = [one.arg for one in (*function.node.args.posonlyargs, *function.node.args.args)][skipped:]
    given = {**dict(zip(names, node.args, strict=False)), **{one.arg: one.value for one in node.keywords if one.arg}}
    for name, new in fills.items():
        target = given.get(name)
        if isinstance(target, (ast.Name, ast.Attribute, ast.Subscript)):
            old = run.evaluate(run, scope, target)
            fill(run, scope, target, Value(origin=new.origin, thing=old.thing, via=old.via))


def instantiate(
    run: Run, cls: UserClass, args: tuple[Value, ...], kwargs: dict[str, Value], node: ast.AST, module: Module
) -> Value:
    """Make an object of the user's class."""
    key = ("made", node, cls.node, *compared(args), tuple(kwargs), *compared(kwargs.values())) if not run.dry else None
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
    if run.is_program and not run.dry:
        run.memo["given", cls.node] = args, kwargs
    made = Call(name=f"user.{cls.node.name}", node=node, module=module, args=args, kwargs=kwargs)
    value = made.result = Value(thing=instance, made=made)
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
    after = cls.find("__post_init__")
    if after is not None and isinstance(after.thing, Function):
        call_function(run, after.thing, (value,), {}, node, module)
    spread = mixed((*args, *kwargs.values()))
    return replace(value, spread=spread.spread if spread.spread is Spread.LOCAL else Spread.EQUAL)


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
                    name="torch.nn.Module.__call__", node=node, module=module, args=args, kwargs=kwargs, receiver=func
                )
                made.result = Value(
                    max(value.spread, Spread.LOCAL),
                    value.origin | {"data"},
                    thing=result.thing if isinstance(result.thing, Items) else None,
                    via=value.via,
                    made=result.made or made,
                )
                run.record(made)
                if is_parallel(func):
                    return _given_by(made, forward(run, made, thing))
                synced_forward(run, made, thing)
                return made.result
            return result
    value = mixed((*args, *kwargs.values()))
    if thing.cls.library_bases:
        made = Call(name="torch.nn.Module.__call__", node=node, module=module, args=args, kwargs=kwargs, receiver=func)
        run.record(made)
        return _given_by(made, value)
    return value
