"""A class's ``__init__`` is misspelt, so it is never called.

**Why it breaks.** ``def init(self, ...)`` is an ordinary method. ``Trainer(model, ...)`` fails with ``TypeError:
Trainer() takes no arguments``, or the attributes are missing later. Web pages lose the underscores where ``__init__``
was rendered as bold type.

Bad:

```python
from torch import nn

class Net(nn.Module):
    def init(self):
        super().__init__()
        self.fc = nn.Linear(20, 2)

    def forward(self, x):
        return self.fc(x)
```

Good:

```python
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(20, 2)

    def forward(self, x):
        return self.fc(x)
```

**When it says nothing.** A class that also has ``__init__``, an ``init`` that is called in the file, protocols and
abstract methods, a real ``__int__(self)``, and classes whose base is not known to take ``__init__``.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import Edit, Span
from rankwise.lint.rule import Rule
from rankwise.lint.topics.classes import (
    LIGHTNING,
    MODULE,
    is_super_call,
    methods,
    roots,
    self_attributes,
    self_name,
)
from rankwise.lint.topics.scopes import FunctionNode, Scopes, scopes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

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


def check(script: Script) -> Iterator[Finding]:
    """Methods that are a misspelt ``__init__``."""
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
                yield from _judge(script, scopes, cls, method)


def _judge(script: Script, scopes: Scopes, cls: ast.ClassDef, method: FunctionNode) -> Iterator[Finding]:
    proof, hint = _proof(scopes, cls, method), ""
    if not proof:
        hint = _hint(scopes, cls, method)
    if not (proof or hint):
        return
    span = _name_span(script, method)
    told = f"it is never called, {proof}" if proof else hint
    yield script.finding(
        RULE,
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


RULE: Rule[Script] = Rule(
    id="RW802",
    name="init-misspelt",
    severity="error",
    classes=(),
    summary="`def init(self)` where `__init__` is meant: it is never called",
    check=check,
    needs_ranks=False,
    fixable=True,
)
