"""A trailing comma turns the stored value into a tuple.

**Why it breaks.** ``self.gpu_id = gpu_id,`` stores ``(gpu_id,)``. The line itself runs; a later one fails with
``AttributeError: 'tuple' object has no attribute ...`` or ``TypeError``, or a comparison with it is never true.

Bad:

```python
import torch

class Trainer:
    def __init__(self, model, gpu_id):
        self.gpu_id = gpu_id,
        self.model = model.to(self.gpu_id)

    def step(self, batch):
        return self.model(batch)
```

Good:

```python
import torch

class Trainer:
    def __init__(self, model, gpu_id):
        self.gpu_id = gpu_id
        self.model = model.to(self.gpu_id)

    def step(self, batch):
        return self.model(batch)
```

**When it says nothing.** A tuple in parentheses, ``x, = f()``, a name that is later used as a tuple (indexed, iterated,
unpacked), names that say so (``shape``, ``args``, plurals), and cases where the intention is unclear.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import Edit, Span, span_of
from rankwise.lint.rule import Rule
from rankwise.lint.topics.classes import self_attribute, self_attributes
from rankwise.lint.topics.scopes import Scopes, scopes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
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


def check(script: Script) -> Iterator[Finding]:
    """Assignments of one value and a comma."""
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
) -> Iterator[Finding]:
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
) -> Finding:
    span = span_of(value, script.lines)
    comma = Span(span.end_line, span.end_col - 1, span.end_line, span.end_col)
    inner = ast.unparse(value.elts[0])
    inner = inner if len(inner) < 40 else "..."
    return script.finding(
        RULE,
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


RULE: Rule[Script] = Rule(
    id="RW801",
    name="trailing-comma",
    severity="error",
    classes=(),
    summary="a comma at the end of an assignment makes a tuple",
    check=check,
    needs_ranks=False,
    fixable=True,
)
