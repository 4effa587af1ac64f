"""Small things that the simulated run notices by the way, for rules: comparisons of text with a number, attributes of wrappers, what a rank never got, uses of None."""

from __future__ import annotations

import ast
from argparse import ArgumentParser
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.lint.interpreter.values import LITERAL_NONE, Instance, Items, Number, Object, Spread
from rankwise.lint.library.names import DDP

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwise.lint.interpreter.history import History
    from rankwise.lint.interpreter.run import Run, Scope
    from rankwise.lint.interpreter.values import Call, Function, Site, Tests, Value
    from rankwise.lint.program import Module


@dataclass(frozen=True, slots=True)
class TextTest:
    """A test of a rank that is still text: never equal to a number; ``"0"`` counts as true, ``negated`` where `not` stands before it."""

    node: ast.expr
    module: Module
    negated: bool = False


@dataclass(frozen=True, slots=True)
class WrapperRead:
    """A read of an attribute that a DistributedDataParallel was not given."""

    node: ast.Attribute
    module: Module
    wrapper: Object
    tests: Tests
    stack: tuple[Site, ...]


def note_read(run: Run, scope: Scope, node: ast.Attribute, owner: Value) -> None:
    """Keep the read of an attribute that its owner was not given: the wrapped model may have it, or another rank."""
    thing = owner.thing
    if owner.const is None and owner.path == LITERAL_NONE.path and isinstance(node.value, ast.Name):
        if owner.spread is Spread.RANK:  # `ema = ModelEMA(model) if rank == 0 else None`
            note_unbound(run, scope, node.value, LITERAL_NONE)
        elif not run.tests and owner == LITERAL_NONE:
            note_unbound(run, scope, node, LITERAL_NONE)
    if isinstance(thing, Object) and thing.kind == DDP and node.attr not in thing.attrs and not run.dry:
        run.notes.append(WrapperRead(node, scope.module, thing, run.tests, run.stack))
    elif isinstance(thing, Instance) and node.attr not in thing.attrs and thing.cls.find(node.attr) is None:
        # A base class whose text is not at hand may have set it; `__dict__` and its like Python gives.
        is_given = thing.cls.is_open or (node.attr.startswith("__") and node.attr.endswith("__"))
        if not is_given and thing.cls.library_bases <= {"torch.nn.Module"}:
            note_unbound(run, scope, node, thing)
    elif isinstance(thing, Object) and is_unknown_option(thing, node.attr):
        note_unbound(run, scope, node, thing)


def is_unknown_option(parser: Object, name: str) -> bool:
    """Whether a command line has no such option; its parser stands for what it has parsed, too."""
    # An option whose name is not known stands there without one.
    known = {name, f"--{name}", "--"} & parser.attrs.keys()
    return parser.kind == "argparse.ArgumentParser" and not known and not hasattr(ArgumentParser, name)


@dataclass(frozen=True, slots=True)
class Unbound:
    """A read, outside of all tests on the rank, of a name or attribute that this rank has given no value."""

    node: ast.Name | ast.Attribute
    module: Module
    history: History
    tests: Tests
    owner: Instance | Object | Value | None


@dataclass(frozen=True, slots=True)
class Quotient:
    """A division by the length of something, by a count, by the number of ranks, or by a setting."""

    node: ast.BinOp | ast.AugAssign
    module: Module
    left: Value
    right: Value
    stack: tuple[Site, ...] = ()


def is_by_ranks(right: Value) -> bool:
    """Whether a divisor is the number of ranks, or computed with it; how much was gathered from them is no such number."""
    is_measured = right.made is not None and right.made.name.endswith((".numel", ".sum"))
    return "world_size" in right.origin and not is_measured


def is_by_count(right: Value) -> bool:
    """Whether a divisor is how much this rank has seen: what a loop has counted, or the length of what it goes over."""
    name = right.made.name if right.made is not None else ""
    if name == "builtins.len":
        return right.made is not None and not any(one.spread for one in right.made.args)
    if right.made is not None and name == "builtins.max":  # `max(count, 1)`
        return any(map(is_by_count, right.made.args))
    return name in {"", "operator.Add", "either"} and isinstance(right.thing, Number) and "time" not in right.origin


def is_counted(left: Value) -> bool:
    """Whether a dividend has been added up, or is of this rank's data."""
    is_sum = left.made is not None and left.made.name in {"operator.Add", "either"}
    return (is_sum or left.spread is Spread.LOCAL) and "time" not in left.origin


def note_quotient(run: Run, scope: Scope, node: ast.BinOp | ast.AugAssign, left: Value, right: Value) -> None:
    """Keep such a division."""
    is_by_setting = right.path and left.spread is Spread.LOCAL
    if not run.dry and isinstance(node.op, ast.Div) and (is_by_setting or is_by_ranks(right) or is_by_count(right)):
        run.notes.append(Quotient(node, scope.module, left, right, run.stack))


@dataclass(frozen=True, slots=True)
class Misfit:
    """A call of a function of the user's with arguments that its parameters do not take."""

    node: ast.Call
    module: Module
    function: Function
    why: str


def note_misfit(
    run: Run, node: ast.Call, module: Module, function: Function, num_args: int, given: Iterable[str]
) -> None:
    """Keep a call of a plain function or method, by its name, that raises TypeError."""
    takes, name = function.node.args, getattr(node.func, "id", getattr(node.func, "attr", ""))
    is_open = any(isinstance(one, ast.Starred) for one in node.args) or any(one.arg is None for one in node.keywords)
    if run.dry or is_open or name != function.name or getattr(function.node, "decorator_list", None):
        return
    if why := misfit(takes, num_args, set(given)):
        run.notes.append(Misfit(node, module, function, why))


def misfit(takes: ast.arguments, num_args: int, named: set[str]) -> str:
    """Why so many arguments, and others by these names, do not fit a function's parameters; empty if they do."""
    names, only = ([one.arg for one in (*takes.posonlyargs, *takes.args)], [one.arg for one in takes.kwonlyargs])
    needed = names[num_args : len(names) - len(takes.defaults)]
    needed += [one for one, default in zip(only, takes.kw_defaults, strict=True) if default is None]
    lacking = [one for one in needed if one not in named]
    unknown = sorted(named - {*names, *only}) if takes.kwarg is None else []
    if lacking:
        return f"lacks {' and '.join(f'`{one}`' for one in lacking)}"
    if unknown:
        return f"has no parameter `{unknown[0]}`"
    if num_args > len(names) and takes.vararg is None:
        return f"takes {len(names)} argument{'s' * (len(names) != 1)} ({', '.join(names) or 'nothing'}), not {num_args}"
    return ""


def note_unbound(
    run: Run, scope: Scope, node: ast.Name | ast.Attribute, owner: Instance | Object | Value | None = None
) -> None:
    """Keep such a read: another rank may have the value, or nobody has it, as where the owner of an attribute is None."""
    if not run.dry and not run.guards:
        run.notes.append(Unbound(node, scope.module, run.history, run.tests, owner))


def note_comparison(run: Run, scope: Scope, node: ast.Compare, left: Value, right: Value) -> None:
    """Keep a comparison of a rank that is still text with a number, or with several."""
    several = right.thing.values[:1] if isinstance(right.thing, Items) else []
    for text, number in ((left, right), (right, left), *((left, one) for one in several)):
        is_text = isinstance(text.const, str) and text.origin and text.const.isdigit()
        if is_text and isinstance(number.const, (int, float)):
            run.notes.append(TextTest(node, scope.module))


def note_test(run: Run, scope: Scope, node: ast.expr, value: Value) -> None:
    """Keep a test of a rank that is still text, once the process group exists and the launcher's variables are surely set."""
    made = value.made
    asked = made.args[0] if made is not None and made.name == "operator.Not" else value
    if run.initialized and isinstance(asked.const, str) and asked.const.isdigit() and asked.spread and not run.dry:
        run.notes.append(TextTest(node, scope.module, asked is not value))


#: Where collectives that give their result to one rank take its number.
_ONE_RANK = {"torch.distributed.reduce": 1, "torch.distributed.gather": 2, "torch.distributed.gather_object": 2}
#: Begins the origin of what such a collective leaves on the other ranks; behind it stands the id of the call's node.
LEFT = "left by "


def left_on_others(run: Run, call: Call) -> tuple[str, ...]:
    """The origin of what a call leaves on this rank, if another one gets the result."""
    position = _ONE_RANK.get(call.name)
    if position is None or call.has_star or call.guards or {"group", "async_op", "group_dst"} & call.kwargs.keys():
        return ()
    root = call.arg(position, "dst")
    number = root.const if root is not None else 0
    run.has_seen_rank = True
    is_other = isinstance(number, int) and number != run.virtual_rank.rank and (root is None or not root.spread)
    return (f"{LEFT}{id(call.node)}",) if is_other else ()
