"""Simulate a piece of Python as each of four ranks would run it: as a program, and function by function."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.lint.interpreter.calling import call, instantiate
from rankwise.lint.interpreter.defining import module_scope
from rankwise.lint.interpreter.expressions import evaluate
from rankwise.lint.interpreter.functions import call_function
from rankwise.lint.interpreter.history import History
from rankwise.lint.interpreter.run import BUDGET, VIRTUAL_RANKS, Run, Scope, VirtualRank
from rankwise.lint.interpreter.statements import bind, execute
from rankwise.lint.interpreter.values import Bound, Function, Instance, Object, UserClass, Value, known
from rankwise.lint.library.names import PL_MODULE, PL_TRAINER
from rankwise.lint.program import Module, Project, matters, parse
from rankwise.lint.script import Entry, Script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankwise.lint.code_unit import CodeUnit

#: Steps for all functions of a module together: a file of a hundred thousand lines is seen in part.
MOST_STEPS = 8 * BUDGET
#: Who runs a function of a library: the first, the second, and the first of the next node.
_ENTRY_RANKS = (VIRTUAL_RANKS[0], VIRTUAL_RANKS[1], VIRTUAL_RANKS[3])
#: Of so many commands of a program each is run.
_MOST_WAYS = 6
_METHODS_FIRST = ("setup", "configure_model", "prepare", "build")


def study(unit: CodeUnit, project: Project) -> Script:
    """Learn what a piece does.

    Raises:
        SyntaxError: It is no Python.
    """
    tree = parse(unit.code)
    module = Module(path=Path(unit.path), tree=tree, text=unit.code, shown=unit.path, is_fragment=unit.is_fragment)
    project.program = module.path
    if not (module.is_program or unit.is_fragment):
        module.is_program = project.starts_ranks(module.path, unit.code)
    script = Script(unit=unit, tree=tree, module=module, project=project)
    if module.is_program or matters(unit.code):
        _Runs(module, project, script).run_all()
    return script


@dataclass(eq=False, slots=True)
class _Runs:
    """The runs of one module: one for each rank, made when it is needed."""

    module: Module
    project: Project
    script: Script
    runs: dict[VirtualRank, Run] = field(default_factory=dict)
    left: int = MOST_STEPS
    way: int = 0

    def run_all(self) -> None:
        if not self.module.is_program and not self.module.relevant:
            return
        executed, spent = set[ast.AST](), 0
        while True:
            first = self._run(VIRTUAL_RANKS[0])
            if first.has_seen_rank:
                for virtual_rank in VIRTUAL_RANKS[1:]:
                    self._run(virtual_rank)
            self.script.entries.append(
                self._entry("the program", {run.virtual_rank: run.history for run in self.runs.values()})
            )
            executed.update(*(run.executed for run in self.runs.values()))
            self.way += 1
            # A large program is run once: its time is that of its ways.
            spent += sum(BUDGET - run.budget for run in self.runs.values())
            if self.way >= min(first.num_ways, _MOST_WAYS) or spent > BUDGET:
                break
            self._keep()
            self.runs = {}
        first.executed |= executed
        for name, doing in _functions_left(self.module, first):
            if self.left > 0:
                self._run_entry(name, doing)
        self._keep()

    def _keep(self) -> None:
        self.script.notes.extend(note for run in self.runs.values() for note in run.notes)
        self.script.has_init |= any(run.initialized for run in self.runs.values())

    def _entry(self, name: str, histories: dict[VirtualRank, History]) -> Entry:
        return Entry(name=name, histories=tuple(histories[one] for one in VIRTUAL_RANKS if one in histories))

    def _run(self, virtual_rank: VirtualRank) -> Run:
        run = self.runs.get(virtual_rank)
        if run is None:
            history = History(virtual_rank.rank, "the program")
            run = Run(virtual_rank, self.project, history, execute=execute, evaluate=evaluate, call=call, bind=bind)
            self.runs[virtual_rank] = run
            scope = Scope(module=self.module) if self.module.is_program else module_scope(run, self.module)
            run.way = self.way
            scope.names["__name__"] = known("__main__")
            scope.names["__file__"] = Value()
            run.memo["top"] = run.scopes[self.module] = scope
            run.items = run.history.items
            if self.module.is_program:
                run.is_program = True
                run.execute(run, scope, self.module.tree.body)
                run.is_program = False
        return run

    def _run_entry(self, name: str, doing: Callable[[Run], None]) -> None:
        histories: dict[VirtualRank, History] = {}
        has_ops = False
        for number, virtual_rank in enumerate(_ENTRY_RANKS):
            run = self._run(virtual_rank)
            _restart(run, name)
            doing(run)
            self.left -= BUDGET // 2 - run.budget
            histories[virtual_rank] = run.history
            has_ops = has_ops or run.num_ops > 0
            if not run.has_seen_rank or (number == 1 and not has_ops):
                break
        self.script.entries.append(self._entry(name, histories))


def _restart(run: Run, name: str) -> None:
    is_noted = any(getattr(note, "history", None) is run.history for note in run.notes)
    is_alone = run.has_seen_rank or run.history.is_cut or run.history.entry == "the program" or is_noted
    # Classes of a library have their parts in common. What functions call is for each entry to see.
    run.barren = {} if is_alone else {key: one for key, one in run.barren.items() if key[0] == "made"}
    run.history = History(run.virtual_rank.rank, name)
    run.items = run.history.items
    run.guards = run.tests = run.loops = run.stack = run.contexts = run.functions = run.selves = ()
    run.budget, run.dry, run.has_seen_rank, run.num_ops = BUDGET // 2, 0, False, 0


def _functions_left(module: Module, run: Run) -> Iterator[tuple[str, Callable[[Run], None]]]:
    """What the program itself did not call, as entries of their own: it may be a library of the project."""
    for node in module.tree.body:
        if (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and node not in run.executed
            and node.name in module.relevant
        ):
            yield node.name, _function_entry(module, node)
        elif isinstance(node, ast.ClassDef):
            left = [
                one
                for one in node.body
                if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))
                and one not in run.executed
                and (one.name if one.name != "__init__" else node.name) in module.relevant
            ]
            if left:
                yield node.name, _class_entry(module, node, left)


def _function_entry(module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Callable[[Run], None]:
    def enter(run: Run) -> None:
        if node in run.executed:
            return
        value = run.scopes[module].find(node.name)
        if value is not None and isinstance(value.thing, Function):
            result = call_function(run, value.thing, (), {}, node, module)
            _exhaust(result)

    return enter


def _exhaust(result: Value) -> None:
    resume = getattr(result.thing, "resume", None)
    if resume is not None:
        resume(lambda _value: None)


def _class_entry(module: Module, node: ast.ClassDef, left: list[Any]) -> Callable[[Run], None]:
    def enter(run: Run) -> None:
        value = run.scopes[module].find(node.name)
        if value is None or not isinstance(value.thing, UserClass):
            return
        args, kwargs = run.memo.get(("given", node), ((), {}))
        made = instantiate(run, value.thing, args, kwargs, node, module)
        if not isinstance(made.thing, Instance):
            return
        # Nobody knows which methods have run before this one: what they set may be set already. Who the rank is stays.
        constants = [name for name, value in made.thing.attrs.items() if value.is_known and not value.origin]
        for name in _set_later(node).intersection(constants) if constants else ():
            made.thing.attrs[name] = Value(path=f"self.{name}")
        for method in sorted(left, key=lambda one: not one.name.startswith(_METHODS_FIRST)):
            found = value.thing.attrs.get(method.name)
            if method in run.executed or found is None or not isinstance(found.thing, Function):
                continue
            function = found.thing
            is_static = "staticmethod" in function.marks
            bound = function if is_static else Bound(made, function)
            given = _framework_arguments(value.thing, method)
            _exhaust(call(run, Value(thing=bound), (), given, method, scope=run.scopes[module]))

    return enter


def _set_later(node: ast.ClassDef) -> set[str]:
    """Attributes of `self` that other methods than `__init__` set."""
    return {
        target.attr
        for method in node.body
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) and method.name != "__init__"
        for target in ast.walk(method)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def _framework_arguments(cls: UserClass, method: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, Value]:
    """What Lightning gives the methods of a callback: its trainer, the user's module."""
    if "lightning.pytorch.Callback" not in cls.library_bases:
        return {}
    kinds = {"trainer": PL_TRAINER, "pl_module": PL_MODULE}
    return {one.arg: Value(thing=Object(kinds[one.arg])) for one in method.args.args if one.arg in kinds}
