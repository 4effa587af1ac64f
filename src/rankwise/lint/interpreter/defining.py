"""Definitions and imports of the simulated run."""

from __future__ import annotations

import ast
from functools import partial
from typing import TYPE_CHECKING

from rankwise.lint.interpreter.run import Scope
from rankwise.lint.interpreter.values import (
    NOTHING,
    Choice,
    Deferred,
    Function,
    Library,
    Method,
    ModuleRef,
    UserClass,
    Value,
)
from rankwise.lint.library.collective_table import ACTS
from rankwise.lint.library.hints import only_of
from rankwise.lint.library.names import canonical

if TYPE_CHECKING:
    from rankwise.lint.interpreter.run import Run
    from rankwise.lint.program import Module

#: What rules ask of a function, by the decorators that say so.
_MARKS = {
    **{one: one for one in ("staticmethod", "classmethod", "contextmanager", "no_grad", "setter", "getter", "deleter")},
    **dict.fromkeys(("property", "cached_property"), "property"),
    "asynccontextmanager": "contextmanager",
    "inference_mode": "no_grad",
}
_TRANSPARENT = frozenset({"functools.wraps", "functools.lru_cache", "functools.cache", "typing.overload", "typing.final",
                          "torch.jit.script", "torch.compile", "abc.abstractmethod", "typing.no_type_check",
                          "torch.distributed.elastic.multiprocessing.errors.record", "hydra.main", "contextlib.wraps"})  # fmt: skip


def function_of(
    run: Run,
    scope: Scope,
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
    marks: frozenset[str] = NOTHING,
    owner: UserClass | None = None,
) -> Function:
    """A function with its defaults, which are computed where it is defined."""
    args = node.args
    return Function(
        node=node,
        module=scope.module,
        scope=scope,
        owner=owner,
        marks=marks,
        defaults=tuple(run.evaluate(run, scope, one) for one in args.defaults),
        kw_defaults={
            one.arg: run.evaluate(run, scope, default)
            for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
            if default is not None
        },
    )


def define_function(run: Run, scope: Scope, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    """Bind a function's name, through its decorators."""
    scope.holder(node.name).names[node.name] = decorated(run, scope, node, None)


def decorated(run: Run, scope: Scope, node: ast.FunctionDef | ast.AsyncFunctionDef, owner: UserClass | None) -> Value:
    """A function as its decorators leave it."""
    marks, wrapping = set(), []
    for decorator in node.decorator_list:
        value = run.evaluate(run, scope, decorator)
        mark = _mark(value, decorator)
        if mark:
            marks.add(mark)
        elif isinstance(value.thing, Function):
            wrapping.append((value, decorator))
    value = Value(thing=function_of(run, scope, node, frozenset(marks), owner))
    for wrapper, decorator in reversed(wrapping):
        made = run.call(run, wrapper, (value,), {}, decorator, scope=scope)
        if made.thing is not None:
            value = made
    return value


def _mark(value: Value, decorator: ast.expr) -> str:
    """A word for what a decorator of a library does, or an empty string."""
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    last = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    if isinstance(value.thing, Function):
        return ""
    if last in _MARKS:
        return _MARKS[last]
    if isinstance(value.thing, Library) and value.thing.name in _TRANSPARENT:
        return ""
    role = only_of(last)
    return f"only {role}" if role and isinstance(value.thing, (Library, Method, type(None))) else ""


def define_class(run: Run, scope: Scope, node: ast.ClassDef) -> None:
    """Bind a class's name; its body runs once, and its functions become methods."""
    given = [run.evaluate(run, scope, base) for base in node.bases]
    bases = tuple(base.thing.ways[0] if isinstance(base.thing, Choice) else base for base in given)
    cls = UserClass(node=node, module=scope.module, bases=bases)
    inner = Scope(module=scope.module, parent=scope, function=scope.function)
    for statement in node.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            value = decorated(run, scope, statement, cls)
            old = inner.names.get(statement.name)
            is_setter = isinstance(value.thing, Function) and not {"setter", "deleter"}.isdisjoint(value.thing.marks)
            if not (is_setter and old is not None):
                inner.names[statement.name] = value
        else:
            run.execute(run, inner, [statement])
    cls.attrs = inner.names
    scope.holder(node.name).names[node.name] = Value(thing=cls)


def import_names(run: Run, scope: Scope, node: ast.Import) -> None:
    """`import a.b as c`."""
    for alias in node.names:
        name = alias.name if alias.asname else alias.name.partition(".")[0]
        scope.holder(alias.asname or name).names[alias.asname or name] = imported(run, scope.module, name, 0)


def import_from(run: Run, scope: Scope, node: ast.ImportFrom) -> None:
    """`from a.b import c as d`."""
    path = run.project.imported(node.module or "", node.level, scope.module)
    is_ours = path is not None or node.level > 0
    for alias in node.names:
        if alias.name == "*":
            _import_all(run, scope, imported(run, scope.module, node.module or "", node.level))
            continue
        target = alias.asname or alias.name
        resolve = partial(_member_of, run, alias.name, scope.module, node)
        scope.holder(target).names[target] = Value(thing=Deferred(resolve)) if is_ours else resolve()


def _member_of(run: Run, name: str, importer: Module, node: ast.ImportFrom) -> Value:
    return member(run, imported(run, importer, node.module or "", node.level), name, importer, node)


def imported(run: Run, importer: Module, name: str, level: int) -> Value:
    """What an imported module is: a file of the project, or a name of a library."""
    path = run.project.imported(name, level, importer)
    if path is not None:
        module = run.project.load(path)
        return Value(thing=ModuleRef(module)) if module is not None else Value(path=name)
    if level:
        return Value(path=name)
    return Value(thing=Library(canonical(name)))


def member(run: Run, source: Value, name: str, importer: Module, node: ast.ImportFrom) -> Value:
    """One name of a module."""
    # A package that imports from itself means the modules in it.
    if isinstance(source.thing, ModuleRef) and source.thing.module is not importer:
        found = module_scope(run, source.thing.module).find(name)
        if found is not None:
            return found
    dotted = f"{node.module}.{name}" if node.module else name
    # A folder is a package without an __init__.py, too.
    path = run.project.imported(dotted, node.level, importer)
    module = run.project.load(path) if path is not None else None
    if module is not None:
        return Value(thing=ModuleRef(module))
    is_library = isinstance(source.thing, Library)
    return Value(thing=Library(canonical(f"{source.thing.name}.{name}"))) if is_library else Value(path=name)


def _import_all(run: Run, scope: Scope, source: Value) -> None:
    if isinstance(source.thing, ModuleRef):
        inner = module_scope(run, source.thing.module)
        inner.find("*")
        for name in dict.fromkeys((*source.thing.module.bindings, *inner.names)):
            found = inner.find(name) if not name.startswith(("_", "*")) else None
            if found is not None:
                scope.names[name] = found
    elif isinstance(source.thing, Library):
        known = (*ACTS, "torch.distributed.get_rank", "torch.distributed.init_process_group")
        for package, _, name in (one.rpartition(".") for one in known):
            if package == source.thing.name:
                scope.names.setdefault(name, Value(thing=Library(f"{package}.{name}")))


def module_scope(run: Run, module: Module) -> Scope:
    """The names of an imported module, run at its first import."""
    scope = run.scopes.get(module)
    if scope is None:
        scope = run.scopes[module] = Scope(module=module)
        scope.names["__name__"] = Value(const=".".join(module.package[1]) or "module")
        pending = dict(module.bindings)

        def define(name: str) -> None:
            """Only what is asked for is run: most of what a module defines is of no use to its importer."""
            statements = pending.pop(name, None) or pending.pop("*", None)
            if statements is None or run.budget <= 0:
                return
            with run.apart():
                run.execute(run, scope, statements)

        scope.lazy = define
    return scope
