"""Slips in plain Python that such scripts have."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import Edit, Found, Span, span_of
from rankwise.lint.rule import rule
from rankwise.lint.topics.classes import (
    LIGHTNING,
    MODULE,
    is_super_call,
    methods,
    roots,
    self_attribute,
    self_attributes,
    self_name,
)
from rankwise.lint.topics.scopes import FunctionNode, Scopes, scopes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.script import Script


# Words after which a tuple is intended.
_TUPLE_WORDS = (
    "shape",
    "size",
    "dim",
    "arg",
    "betas",
    "tuple",
    "axis",
    "axes",
    "stride",
    "padding",
    "extra",
    "slots",
)


_TUPLE_ATTRIBUTES = frozenset({"count", "index"})


_TAKES_ONE_OBJECT = frozenset({"to", "cuda", "set_device", "device"})


_TAKES_NUMBER = frozenset({"range", "int", "float", "manual_seed"})


_NUMBER_ARGUMENTS = frozenset(
    ["batch_size", "num_workers", "lr", "nprocs", "world_size", "rank", "num_replicas", "weight_decay"]
)


_ARITHMETIC = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)


@rule("RW801", "error", "", "a comma at the end of an assignment makes a tuple", needs_ranks=False, fixable=True)  # fmt: skip
def trailing_comma(script: Script) -> Iterator[Found]:
    scopes = scopes_of(script.tree)
    statements: list[ast.Assign | ast.AnnAssign] = [*scopes.all(ast.Assign), *scopes.all(ast.AnnAssign)]
    for statement in statements:
        value = statement.value
        if isinstance(value, ast.Tuple) and len(value.elts) == 1 and _is_bare(script, value):
            yield from _judge(script, scopes, statement, value)


def _is_bare(script: Script, value: ast.Tuple) -> bool:
    span = span_of(value, script.lines)
    return script.lines[span.end_line - 1][: span.end_col - 1].endswith(",")


def _judge(
    script: Script, scopes: Scopes, statement: ast.Assign | ast.AnnAssign, value: ast.Tuple
) -> Iterator[Found]:
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else statement.targets
    target = targets[0]
    if len(targets) != 1 or not isinstance(target, (ast.Name, ast.Attribute)):
        return
    name = target.id if isinstance(target, ast.Name) else target.attr
    if isinstance(value.elts[0], (ast.Starred, ast.Tuple)):
        return
    reads, num_stores = _places(scopes, target)
    proof = next((read for read in reads if _is_object_use(scopes, read)), None)
    if proof is not None and num_stores == 1:
        why = f"line {proof.lineno} uses it as a single object, which fails"
        yield _finding(script, statement, value, ast.unparse(target), why, certain=True)
    elif proof is not None or _is_slip(value.elts[0], target, name, reads, scopes):
        yield _finding(script, statement, value, ast.unparse(target), "was that intended?", certain=False)


def _finding(
    script: Script,
    statement: ast.Assign | ast.AnnAssign,
    value: ast.Tuple,
    target: str,
    why: str,
    *,
    certain: bool,
) -> Found:
    span = span_of(value, script.lines)
    comma = Span(span.end_line, span.end_col - 1, span.end_line, span.end_col)
    inner = ast.unparse(value.elts[0])
    inner = inner if len(inner) < 40 else "..."
    return Found(
        statement,
        f"the comma at the end makes `{target}` the tuple `({inner},)`: {why}",
        f"remove the comma after `{inner}`; write `({inner},)` if a tuple is intended",
        severity="error" if certain else "warning",
        edits=[Edit(span=comma, text="")] if certain else (),
    )


def _places(scopes: Scopes, target: ast.Name | ast.Attribute) -> tuple[list[ast.expr], int]:
    """Where the stored value is read, and how often something is stored there."""
    if isinstance(target, ast.Name):
        scope = scopes.scope(target)
        stores = len(scopes.bindings(target.id, scope))
        owner = scopes.owner(target.id, scope)
        return [n for n, at in scopes.loads if n.id == target.id and scopes.owner(n.id, at) is owner], stores
    found = self_attribute(scopes, target)
    if found is None:
        return [], 0
    places = list(self_attributes(scopes, *found))
    return [p for p in places if isinstance(p.ctx, ast.Load)], sum(
        isinstance(p.ctx, ast.Store) for p in places
    )


def _is_object_use(scopes: Scopes, read: ast.expr) -> bool:
    """Whether a read would fail, or be never true, for a tuple."""
    around = scopes.parents.get(read)
    if isinstance(around, ast.Attribute):
        return (
            isinstance(around.ctx, ast.Load)
            and around.attr not in _TUPLE_ATTRIBUTES
            and around.attr[:1] != "_"
        )
    if isinstance(around, ast.Call):
        return around.func is read or _takes_one_object(around, read)
    if isinstance(around, ast.keyword):
        return around.arg in _NUMBER_ARGUMENTS
    return _is_number_use(around) or _is_device_use(scopes, around)


def _is_number_use(around: ast.AST | None) -> bool:
    if isinstance(around, ast.BinOp):
        return isinstance(around.op, _ARITHMETIC) and not _is_text(around.left)
    if isinstance(around, ast.Compare):
        others = [around.left, *around.comparators]
        return isinstance(around.ops[0], (ast.Eq, ast.Lt, ast.Gt)) and any(_is_number(o) for o in others)
    return False


def _is_device_use(scopes: Scopes, around: ast.AST | None) -> bool:
    if isinstance(around, ast.FormattedValue):
        return _names_a_device(scopes.parents.get(around), around)
    return isinstance(around, ast.List) and _is_device_ids(scopes.parents.get(around))


def _takes_one_object(call: ast.Call, read: ast.expr) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id in _TAKES_NUMBER and call.args[:1] == [read]
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return name in _TAKES_ONE_OBJECT | _TAKES_NUMBER and call.args[:1] == [read]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _names_a_device(text: ast.AST | None, part: ast.AST) -> bool:
    if not isinstance(text, ast.JoinedStr):
        return False
    pairs = zip(text.values, text.values[1:], strict=False)
    return any(b is part and isinstance(a, ast.Constant) and str(a.value).endswith("cuda:") for a, b in pairs)


def _is_device_ids(around: ast.AST | None) -> bool:
    return isinstance(around, ast.keyword) and around.arg == "device_ids"


def _is_slip(inner: ast.expr, target: ast.expr, name: str, reads: list[ast.expr], scopes: Scopes) -> bool:
    """Whether a parameter is stored under its own name and never used as a tuple."""
    plain = isinstance(inner, ast.Name) and inner.id == name and isinstance(target, ast.Attribute)
    if not plain or name.endswith("s") or any(word in name.lower() for word in _TUPLE_WORDS):
        return False
    return not any(_is_tuple_use(scopes, read) for read in reads)


def _is_tuple_use(scopes: Scopes, read: ast.expr) -> bool:
    around = scopes.parents.get(read)
    if isinstance(around, (ast.For, ast.comprehension)):
        return around.iter is read and "loader" not in ast.unparse(read)
    if isinstance(around, ast.Compare):
        return isinstance(around.ops[-1], (ast.In, ast.NotIn))
    if isinstance(around, ast.Assign):
        return isinstance(around.targets[0], ast.Tuple)
    return isinstance(around, (ast.Subscript, ast.Starred, ast.BinOp))


# Bases whose own constructors take no arguments.
_DATA = ("Dataset", "IterableDataset", "dataset.Dataset", "dataset.IterableDataset")


_TAKES_NOTHING = frozenset({"object", *MODULE, *(f"torch.utils.data.{name}" for name in _DATA)})


_DUNDER_SLIPS = (
    "_init_",
    "__init",
    "__init_",
    "_init__",
    "init__",
    "__int__",
    "__inti__",
    "__ini__",
    "__intit__",
    "__Init__",
)


_SLIPS = (*_DUNDER_SLIPS, "init")


_WORDS = tuple(f"def {slip}(" for slip in _SLIPS)


@rule("RW802", "error", "", "`def init(self)` where `__init__` is meant: it is never called", needs_ranks=False, fixable=True)  # fmt: skip
def init_misspelt(script: Script) -> Iterator[Found]:
    code = script.piece.code
    if not any(word in code for word in _WORDS):
        return
    scopes = scopes_of(script.tree)
    for cls in scopes.all(ast.ClassDef):
        own = methods(cls)
        if "__init__" in own or "__new__" in own:
            continue
        for name in _SLIPS:
            method = own.get(name)
            if method is not None and self_name(method) and not method.decorator_list:
                yield from _judge_rw802(script, scopes, cls, method)


def _judge_rw802(script: Script, scopes: Scopes, cls: ast.ClassDef, method: FunctionNode) -> Iterator[Found]:
    proof, hint = _proof(scopes, cls, method), ""
    if not proof:
        hint = _hint(scopes, cls, method)
    if not (proof or hint):
        return
    span = _name_span(script, method)
    told = f"it is never called, {proof}" if proof else hint
    yield Found(
        span,
        f"class {cls.name} has `{method.name}` where `__init__` is meant: {told}",
        "write `def __init__(self, ...)`, two underscores on both sides",
        severity="error" if proof else "warning",
        edits=[Edit(span=span, text="__init__")] if proof else (),
    )


def _proof(scopes: Scopes, cls: ast.ClassDef, method: FunctionNode) -> str:
    """How it shows that ``__init__`` was meant; empty where it does not for certain."""
    bases = roots(scopes, cls)
    is_known = bases <= {*_TAKES_NOTHING, *LIGHTNING}
    if _is_called(scopes, method.name):
        return ""
    if any(is_super_call(n, "__init__") or (is_known and is_super_call(n, "init")) for n in ast.walk(method)):
        return "so the base class is initialised without it, and its attributes are missing"
    if method.name == "__int__":
        return "and `__int__` takes no arguments" if _num_parameters(method) > 1 else ""
    is_plain = not cls.keywords and not cls.decorator_list
    if is_plain and bases <= _TAKES_NOTHING and (line := _constructed(scopes, cls)):
        return f"and line {line} passes arguments to {cls.name}, which takes none: TypeError"
    is_slip = method.name != "init"
    return "so the attributes it sets are missing" if is_slip and _sets_attributes(method) else ""


def _hint(scopes: Scopes, cls: ast.ClassDef, method: FunctionNode) -> str:
    """What speaks for it without a proof: nothing calls ``init``, and others read what it sets."""
    is_plain = not cls.keywords and not cls.decorator_list
    is_known = roots(scopes, cls) <= {*_TAKES_NOTHING, *LIGHTNING}
    if method.name != "init" or not (is_plain and is_known) or _is_called(scopes, method.name):
        return ""
    name = _missing(scopes, cls, method)
    return f"nothing here calls it, and `self.{name}` is set only there" if name else ""


def _is_called(scopes: Scopes, name: str) -> bool:
    """Whether anything but ``super().name`` in the text reads an attribute of this name."""
    for node in scopes.all(ast.Attribute):
        if node.attr == name and not (
            isinstance(node.value, ast.Call) and is_super_call(scopes.parents[node], name)
        ):
            return True
    return False


def _num_parameters(method: FunctionNode) -> int:
    return len(method.args.posonlyargs) + len(method.args.args)


def _constructed(scopes: Scopes, cls: ast.ClassDef) -> int:
    """The line that makes an instance with arguments; 0 where none does."""
    for call in scopes.all(ast.Call):
        if (call.args or call.keywords) and scopes.called_class(call.func) is cls:
            return call.lineno
    return 0


def _sets_attributes(method: FunctionNode) -> bool:
    me = self_name(method)
    return any(
        isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and isinstance(n.value, ast.Name)
        and n.value.id == me
        for n in ast.walk(method)
    )


def _missing(scopes: Scopes, cls: ast.ClassDef, method: FunctionNode) -> str:
    """An attribute that other methods read and only this one sets."""
    inside = {n for n in ast.walk(method) if isinstance(n, ast.Attribute)}
    for stored in inside:
        if not isinstance(stored.ctx, ast.Store):
            continue
        outside = [n for n in self_attributes(scopes, cls, stored.attr) if n not in inside]
        if (
            outside
            and all(isinstance(n.ctx, ast.Load) for n in outside)
            and stored.attr not in scopes.opened[cls].bound
        ):
            return stored.attr
    return ""


def _name_span(script: Script, method: FunctionNode) -> Span:
    col = (
        script.lines[method.lineno - 1].index(method.name, script.lines[method.lineno - 1].index("def ")) + 1
    )
    return Span(method.lineno, col, method.lineno, col + len(method.name))
