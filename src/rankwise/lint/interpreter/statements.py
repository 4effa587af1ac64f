"""Statements of the simulated run: assignments, branches, loops, `with`, `try`, definitions."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.lint.interpreter.branches import run_if, run_match, run_try
from rankwise.lint.interpreter.calls import part_of
from rankwise.lint.interpreter.defining import define_class, define_function, import_from, import_names
from rankwise.lint.interpreter.history import Exit
from rankwise.lint.interpreter.looping import run_for, run_while
from rankwise.lint.interpreter.notes import note_quotient
from rankwise.lint.interpreter.operators import of_all
from rankwise.lint.interpreter.values import ANY, NONE, Call, Instance, Items, Library, Object, Value, known, mixed
from rankwise.lint.interpreter.withs import run_with
from rankwise.lint.library.constructor_table import TENSOR

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.lint.interpreter.history import ExitKind
    from rankwise.lint.interpreter.run import Run, Scope


def execute(run: Run, scope: Scope, body: Sequence[ast.stmt]) -> Exit | None:
    """Run statements in order; the Exit if they do not reach their end."""
    before = run.guards, run.tests
    try:
        for statement in body:
            if not run.spend():
                return None
            doing = _STATEMENTS.get(type(statement))
            left = doing(run, scope, statement) if doing is not None else None
            if left is not None:
                return left
        return None
    finally:
        run.guards, run.tests = before


def _expression(run: Run, scope: Scope, node: ast.Expr) -> Exit | None:
    run.evaluate(run, scope, node.value)
    value = node.value
    is_exit = isinstance(value, ast.Call) and _is_exit(run, scope, value.func)
    return _leave(run, Exit("exit", node, scope.module, run.guards)) if is_exit else None


def _is_exit(run: Run, scope: Scope, func: ast.expr) -> bool:
    if isinstance(func, ast.Name):
        return func.id in {"exit", "quit"} and scope.find(func.id) is None
    if isinstance(func, ast.Attribute) and func.attr in {"exit", "_exit", "abort"}:
        thing = run.evaluate(run, scope, func.value).thing
        return isinstance(thing, Library) and thing.name in {"sys", "os"}
    return False


def _assign(run: Run, scope: Scope, node: ast.Assign) -> None:
    value = run.evaluate(run, scope, node.value)
    for target in node.targets:
        run.bind(run, scope, target, value)


def _annotated(run: Run, scope: Scope, node: ast.AnnAssign) -> None:
    if node.value is not None:
        run.bind(run, scope, node.target, run.evaluate(run, scope, node.value))


def _augmented(run: Run, scope: Scope, node: ast.AugAssign) -> None:
    fields = dict(ast.iter_fields(node.target), ctx=ast.Load())
    target = ast.copy_location(type(node.target)(**fields), node.target)
    old, new = run.evaluate(run, scope, target), run.evaluate(run, scope, node.value)
    note_quotient(run, scope, node, old, new)
    value = of_all(run, scope.module, node, (old, new), mixed((old, new)))
    if isinstance(old.thing, Items):
        old.thing.is_whole = False
        value = replace(value, thing=old.thing)
    elif isinstance(old.thing, Object) and old.thing.kind == TENSOR:
        value = replace(value, thing=old.thing)
    run.bind(run, scope, node.target, value)


def _return(run: Run, scope: Scope, node: ast.Return) -> Exit:
    value = run.evaluate(run, scope, node.value) if node.value is not None else NONE
    scope.returns.append(run.colour(value))
    return _leave(run, Exit("return", node, scope.module, run.guards))


def _leave(run: Run, left: Exit) -> Exit:
    if not run.dry:
        run.items.append(left)
    return left


def _raise(run: Run, scope: Scope, node: ast.Raise) -> Exit:
    run.evaluate(run, scope, node.exc)
    return _leave(run, Exit("raise", node, scope.module, run.guards))


def _jump(run: Run, scope: Scope, node: ast.Break | ast.Continue) -> Exit:
    kind: ExitKind = "break" if isinstance(node, ast.Break) else "continue"
    return _leave(run, Exit(kind, node, scope.module, run.guards))


def _delete(run: Run, scope: Scope, node: ast.Delete) -> None:
    for target in node.targets:
        if isinstance(target, ast.Name):
            scope.holder(target.id).names.pop(target.id, None)


def _assert(run: Run, scope: Scope, node: ast.Assert) -> None:
    run.evaluate(run, scope, node.test)


def _global(run: Run, scope: Scope, node: ast.Global) -> None:
    scope.globals.update(node.names)


def _nonlocal(run: Run, scope: Scope, node: ast.Nonlocal) -> None:
    scope.nonlocals.update(node.names)


_STATEMENTS: dict[type, Callable[..., Exit | None]] = {
    ast.Expr: _expression,
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented,
    ast.Return: _return,
    ast.Raise: _raise,
    ast.Break: _jump,
    ast.Continue: _jump,
    ast.Delete: _delete,
    ast.Assert: _assert,
    ast.Global: _global,
    ast.Nonlocal: _nonlocal,
    ast.If: run_if,
    ast.For: run_for,
    ast.AsyncFor: run_for,
    ast.While: run_while,
    ast.With: run_with,
    ast.AsyncWith: run_with,
    ast.Try: run_try,
    ast.Match: run_match,
    ast.FunctionDef: define_function,
    ast.AsyncFunctionDef: define_function,
    ast.ClassDef: define_class,
    ast.Import: import_names,
    ast.ImportFrom: import_from,
}
if hasattr(ast, "TryStar"):
    _STATEMENTS[ast.TryStar] = run_try


def bind(run: Run, scope: Scope, target: ast.AST, value: Value) -> None:
    """Assign a value to a target: a name, an attribute, an item, several at once."""
    match target:
        case ast.Name(id=name):
            names = scope.holder(name).names
            # `loader = tqdm(loader)` on one rank: it goes over the same.
            is_same = value is names.get(name) and value is not ANY
            names[name] = value if is_same else run.colour(value)
        case ast.Starred(value=inner):
            bind(run, scope, inner, replace(mixed((value,)), thing=None))
        case ast.Tuple(elts=targets) | ast.List(elts=targets):
            for one, part in zip(targets, parts_of(value, targets), strict=True):
                bind(run, scope, one, part)
        case ast.Attribute(value=holder, attr=name):
            owner = run.evaluate(run, scope, holder)
            attrs = getattr(owner.thing, "attrs", None)
            if isinstance(attrs, dict):
                run.write(attrs, name, value)
            _record_setting(run, scope, target, owner, known(name), value)
        case ast.Subscript(value=holder, slice=index):
            owner, key = run.evaluate(run, scope, holder), run.evaluate(run, scope, index)
            _set_item(run, owner, key, value)
            _record_setting(run, scope, target, owner, key, value)
            if isinstance(holder, ast.Name) and value.spread and not isinstance(owner.thing, (Items, Object, Library)):
                known_part = Items([value], keys=[key], kind="dict", is_whole=False)
                is_table = isinstance(key.const, str) and not owner.spread
                new = Value(thing=known_part, path=owner.path) if is_table else mixed((owner, value))
                bind(run, scope, holder, new)
        case _:
            pass


def parts_of(value: Value, targets: Sequence[ast.AST]) -> list[Value]:
    """The parts that several targets get from one value."""
    thing = value.thing
    if isinstance(thing, Items) and thing.is_whole and len(thing.values) == len(targets):
        return thing.values if thing.keys is None else thing.keys
    rest = part_of(value)
    if isinstance(thing, Object) and "parts" in thing.attrs:
        parts = thing.attrs["parts"].thing
        if isinstance(parts, Items):
            return [*parts.values, *[rest] * len(targets)][: len(targets)]
    return [rest] * len(targets)


def _set_item(run: Run, owner: Value, key: Value, value: Value) -> None:
    thing = owner.thing
    if isinstance(thing, Items):
        if thing.keys is not None and key.is_known:
            for number, old in enumerate(thing.keys):
                if old.is_known and old.const == key.const:
                    thing.values[number] = run.colour(value)
                    return
            thing.keys.append(key)
            thing.values.append(run.colour(value))
        else:
            thing.is_whole = False
            thing.values.append(run.colour(value))
    elif isinstance(thing, Library) and thing.name == "os.environ" and isinstance(key.const, str):
        run.write(run.environ, key.const, value)


def _record_setting(run: Run, scope: Scope, node: ast.AST, owner: Value, key: Value, value: Value) -> None:
    if isinstance(owner.thing, Library):
        name = owner.thing.name
    elif isinstance(owner.thing, Object):
        name = owner.thing.kind
    elif isinstance(node, ast.Attribute) and node.attr.startswith("should_"):
        name = "?"
    elif (isinstance(owner.thing, Instance) or "module" in owner.origin) and isinstance(
        value.thing, (Object, Instance)
    ):
        name = "user"
    else:
        return
    ending = "__setattr__" if isinstance(node, ast.Attribute) else "__setitem__"
    run.record(Call(name=f"{name}.{ending}", node=node, module=scope.module, args=(key, value), receiver=owner))
