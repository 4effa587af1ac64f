"""Slips in plain Python that such scripts have."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.analyses.classes import (
    LIGHTNING,
    MODULE,
    is_super_call,
    methods,
    roots,
    self_attribute,
    self_attributes,
    self_name,
)
from rankwise.lint.analyses.scopes import FunctionNode, Scopes, scopes_of
from rankwise.lint.analyses.turns import is_caught
from rankwise.lint.finding import Edit, Found, Span, span_of
from rankwise.lint.interpreter.notes import Misfit
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.script import Script

#: A parameter stored under its own name is no tuple, unless its name says so.
_NAMES_A_TUPLE = re.compile(r"s$|shape|size|dim|arg|betas|tuple|axis|axes|stride|padding|extra|slots")
#: What takes one number, or one device.
_TAKES_ONE = frozenset({"range", "int", "float", "manual_seed", "to", "cuda", "set_device", "device"})
_NUMBERS = frozenset(
    {"batch_size", "num_workers", "lr", "nprocs", "world_size", "rank", "num_replicas", "weight_decay"}
)
_ARITHMETIC = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)


@rule("RW801", "error", "", "a comma at the end of an assignment makes a tuple", needs_ranks=False, fixable=True)
def trailing_comma(script: Script) -> Iterator[Found]:
    scopes = scopes_of(script.tree)
    statements: list[ast.Assign | ast.AnnAssign] = [*scopes.all(ast.Assign), *scopes.all(ast.AnnAssign)]
    for statement in statements:
        value, targets = (
            statement.value,
            statement.targets if isinstance(statement, ast.Assign) else [statement.target],
        )
        if not (isinstance(value, ast.Tuple) and len(value.elts) == len(targets) == 1) or isinstance(
            value.elts[0], (ast.Starred, ast.Tuple)
        ):
            continue
        span = span_of(value, script.unit.lines)
        if script.unit.lines[span.end_line - 1][: span.end_col - 1].endswith(","):
            yield from _judged(
                scopes,
                statement,
                targets[0],
                value.elts[0],
                Span(span.end_line, span.end_col - 1, span.end_line, span.end_col),
            )


def _judged(scopes: Scopes, statement: ast.stmt, target: ast.expr, inner: ast.expr, comma: Span) -> Iterator[Found]:
    reads, num_stores = _places(scopes, target)
    proof = next((read for read in reads if _is_object_use(scopes, read)), None)
    is_own_name = isinstance(target, ast.Attribute) and isinstance(inner, ast.Name) and inner.id == target.attr
    if proof is None and (
        not is_own_name
        or _NAMES_A_TUPLE.search(ast.unparse(inner).lower())
        or any(_is_tuple_use(scopes, read) for read in reads)
    ):
        return
    is_certain = proof is not None and num_stores == 1
    why = (
        f"line {proof.lineno} uses it as a single object, which fails"
        if proof is not None and is_certain
        else "was that intended?"
    )
    shown = ast.unparse(inner) if len(ast.unparse(inner)) < 40 else "..."
    yield Found(
        statement,
        f"the comma at the end makes `{ast.unparse(target)}` the tuple `({shown},)`: {why}",
        f"remove the comma after `{shown}`; write `({shown},)` if a tuple is intended",
        severity="error" if is_certain else "warning",
        edits=[Edit(span=comma, text="")] if is_certain else (),
    )


def _places(scopes: Scopes, target: ast.expr) -> tuple[list[ast.expr], int]:
    """Where the stored value is read, and how often something is stored there."""
    if isinstance(target, ast.Name):
        scope = scopes.scope(target)
        owner = scopes.owner(target.id, scope)
        return [n for n, at in scopes.loads if n.id == target.id and scopes.owner(n.id, at) is owner], len(
            scopes.bindings(target.id, scope)
        )
    found = self_attribute(scopes, target)
    places = list(self_attributes(scopes, *found)) if found is not None else []
    return [p for p in places if isinstance(p.ctx, ast.Load)], sum(isinstance(p.ctx, ast.Store) for p in places)


def _is_object_use(scopes: Scopes, read: ast.expr) -> bool:  # noqa: PLR0911 - one line for each form
    """Whether a read would fail, or be never true, for a tuple."""
    match scopes.parents.get(read):
        case ast.Attribute(ctx=ast.Load(), attr=attr):
            return attr not in {"count", "index"} and attr[:1] != "_"
        case ast.Call(func=func, args=args):
            return func is read or (ast.unparse(func).rpartition(".")[2] in _TAKES_ONE and args[:1] == [read])
        case ast.keyword(arg=arg):
            return arg in _NUMBERS
        case ast.BinOp(left=left, op=op):
            is_text = isinstance(left, ast.JoinedStr) or (
                isinstance(left, ast.Constant) and isinstance(left.value, str)
            )
            return isinstance(op, _ARITHMETIC) and not is_text
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Lt() | ast.Gt(), *_], comparators=others):
            return any(isinstance(one, ast.Constant) and type(one.value) in {int, float} for one in (left, *others))
        case ast.FormattedValue() as part:
            return f"cuda:{{{ast.unparse(read)}}}" in ast.unparse(scopes.parents[part])
        case ast.List() as part:
            around = scopes.parents.get(part)
            return isinstance(around, ast.keyword) and around.arg == "device_ids"
        case _:
            return False


def _is_tuple_use(scopes: Scopes, read: ast.expr) -> bool:
    around = scopes.parents.get(read)
    if isinstance(around, (ast.For, ast.comprehension)):
        return around.iter is read and "loader" not in ast.unparse(read)
    if isinstance(around, ast.Compare):
        return isinstance(around.ops[-1], (ast.In, ast.NotIn))
    is_unpacked = isinstance(around, ast.Assign) and isinstance(around.targets[0], ast.Tuple)
    return is_unpacked or isinstance(around, (ast.Subscript, ast.Starred, ast.BinOp))


#: Bases whose own constructors take no arguments.
_TAKES_NOTHING = frozenset(
    {
        "object",
        *MODULE,
        *(
            f"torch.utils.data.{name}"
            for name in ("Dataset", "IterableDataset", "dataset.Dataset", "dataset.IterableDataset")
        ),
    }
)
_SLIP = re.compile(r"_{0,2}(init|int|inti|ini|intit|Init)_{0,2}")


@rule(
    "RW802",
    "error",
    "",
    "`def init(self)` where `__init__` is meant: it is never called",
    needs_ranks=False,
    fixable=True,
)
def init_misspelt(script: Script) -> Iterator[Found]:
    scopes = scopes_of(script.tree)
    for cls in scopes.all(ast.ClassDef) if "def " in script.unit.code else ():
        own = methods(cls)
        for name, method in own.items() if not {"__init__", "__new__"} & own.keys() else ():
            is_slip = _SLIP.fullmatch(name) and (
                name == "init" or ("_" in name and name not in {"_int", "_int_", "int_", "int__"})
            )
            if not is_slip or not self_name(method) or method.decorator_list or _is_called(scopes, name):
                continue
            proof = _proof(scopes, cls, method)
            hint = "" if proof else _hint(scopes, cls, method)
            if proof or hint:
                line = script.unit.lines[method.lineno - 1]
                col = line.index(name, line.index("def ")) + 1
                span = Span(method.lineno, col, method.lineno, col + len(name))
                reported = f"it is never called, {proof}" if proof else hint
                yield Found(
                    span,
                    f"class {cls.name} has `{name}` where `__init__` is meant: {reported}",
                    "write `def __init__(self, ...)`, two underscores on both sides",
                    severity="error" if proof else "warning",
                    edits=[Edit(span=span, text="__init__")] if proof else (),
                )


def _proof(scopes: Scopes, cls: ast.ClassDef, method: FunctionNode) -> str:
    """How it shows that ``__init__`` was meant; empty where it does not for certain."""
    bases = roots(scopes, cls)
    is_known = bases <= {*_TAKES_NOTHING, *LIGHTNING}
    if any(is_super_call(n, "__init__") or (is_known and is_super_call(n, "init")) for n in ast.walk(method)):
        return "so the base class is initialised without it, and its attributes are missing"
    if method.name == "__int__":
        return "and `__int__` takes no arguments" if len(method.args.posonlyargs) + len(method.args.args) > 1 else ""
    made = [
        call for call in scopes.all(ast.Call) if (call.args or call.keywords) and scopes.called_class(call.func) is cls
    ]
    if made and _is_plain(cls) and bases <= _TAKES_NOTHING:
        return f"and line {made[0].lineno} passes arguments to {cls.name}, which takes none: TypeError"
    return "so the attributes it sets are missing" if method.name != "init" and _set_by(method) else ""


def _hint(scopes: Scopes, cls: ast.ClassDef, method: FunctionNode) -> str:
    """What speaks for it without a proof: nothing calls ``init``, and others read what only it sets."""
    if method.name != "init" or not _is_plain(cls) or not roots(scopes, cls) <= {*_TAKES_NOTHING, *LIGHTNING}:
        return ""
    inside = set(ast.walk(method))
    for name in _set_by(method):
        outside = [n for n in self_attributes(scopes, cls, name) if n not in inside]
        if outside and all(isinstance(n.ctx, ast.Load) for n in outside) and name not in scopes.opened[cls].bound:
            return f"nothing here calls it, and `self.{name}` is set only there"
    return ""


def _is_plain(cls: ast.ClassDef) -> bool:
    return not cls.keywords and not cls.decorator_list


def _is_called(scopes: Scopes, name: str) -> bool:
    """Whether anything but ``super().name`` in the text reads an attribute of this name."""
    return any(
        node.attr == name and not (isinstance(node.value, ast.Call) and is_super_call(scopes.parents[node], name))
        for node in scopes.all(ast.Attribute)
    )


def _set_by(method: FunctionNode) -> list[str]:
    """The attributes of the instance that a method sets."""
    return [
        n.attr
        for n in ast.walk(method)
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and getattr(n.value, "id", "") == self_name(method)
    ]


@rule("RW819", "error", "", "a function of the text is called with arguments that it does not take", needs_ranks=False)
def call_does_not_fit(script: Script) -> Iterator[Found]:
    for note in script.notes:
        if isinstance(note, Misfit) and note.module is script.module and not is_caught(script.tree, note.node):
            name, where = note.function.name, note.function
            yield Found(
                note.node,
                f"`{ast.unparse(note.node.func)}(...)` {note.why}: TypeError",
                f"pass what `{name}` takes, or change its parameters",
                also=[(f"`{name}`", where.module.shown, span_of(where.node, where.module.lines))],
            )
