"""A module's layers are set before ``super().__init__()`` has run.

**Why it breaks.** ``nn.Module.__init__`` creates the dicts that hold layers and parameters. Before it, ``self.fc =
nn.Linear(...)`` fails with ``AttributeError: cannot assign module before Module.__init__() call``.

Bad:

```python
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__
        self.fc = nn.Linear(20, 2)
```

Good:

```python
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(20, 2)
```

**When it says nothing.** Classes whose bases are not known, plain values set before, ``nn.Module.__init__(self)``.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import Edit, Span, span_of
from rankwise.lint.rule import Rule
from rankwise.lint.topics.classes import LIGHTNING, MODULE, methods, roots, self_name
from rankwise.lint.topics.scopes import FunctionNode, Scopes, scopes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_NOT_PARTS = frozenset({"torch.nn.Module", "torch.nn.functional", "torch.nn.init", "torch.nn.utils"})


def check(script: Script) -> Iterator[Finding]:
    """Constructors of modules that set parts too early."""
    if "Module" not in script.piece.code or "__init__" not in script.piece.code:
        return
    scopes = scopes_of(script.tree)
    for cls in scopes.all(ast.ClassDef):
        own = methods(cls)
        method = own.get("__init__")
        if method is None or not self_name(method) or {"__setattr__", "__new__"} & set(own) or cls.keywords:
            continue
        if "metaclass=" in script.piece.code:
            # It may set the module up in its own way.
            continue
        if roots(scopes, cls) & (MODULE | LIGHTNING) and not _has_unknown_base(scopes, cls):
            yield from _judge(script, scopes, cls, method)


def _has_unknown_base(scopes: Scopes, cls: ast.ClassDef) -> bool:
    # A base that is not known may set up the module in its own way.
    return not roots(scopes, cls) <= {*MODULE, *LIGHTNING, "object"}


def _judge(script: Script, scopes: Scopes, cls: ast.ClassDef, method: FunctionNode) -> Iterator[Finding]:
    bare = _bare_super(method)
    for statement in method.body:
        if _sets_up(statement):
            return
        part = _part(scopes, statement, self_name(method))
        if part:
            yield _finding(script, cls, method, statement, part, bare)
            return
    if bare is not None:
        yield _finding(script, cls, method, bare, "", bare)


def _finding(
    script: Script,
    cls: ast.ClassDef,
    method: FunctionNode,
    statement: ast.stmt,
    part: str,
    bare: ast.Expr | None,
) -> Finding:
    if bare is not None:
        where = span_of(bare, script.lines)
        end = Span(where.end_line, where.end_col, where.end_line, where.end_col)
        text = ast.unparse(bare)
        is_name = isinstance(bare.value, ast.Attribute)
        return script.finding(
            RULE,
            bare,
            f"`{text}` does not initialise {cls.name}"
            + (
                f": line {statement.lineno} fails, {part} is assigned before Module.__init__()"
                if part
                else ""
            ),
            "write `super().__init__()`",
            edits=[Edit(span=end, text="()")] if is_name and _num_super_arguments(bare.value) != 1 else (),
        )
    later = any(_sets_up(s) for s in method.body)
    return script.finding(
        RULE,
        statement,
        f"{cls.name} assigns {part} before Module.__init__() has run: AttributeError",
        "move `super().__init__()` to the top of `__init__`"
        if later
        else "start `__init__` with `super().__init__()`",
    )


def _bare_super(method: FunctionNode) -> ast.Expr | None:
    """A statement that should call the base's ``__init__`` and does not."""
    for statement in method.body:
        if isinstance(statement, ast.Expr):
            text = ast.unparse(statement)
            if text in ("super", "super()") or (text.startswith("super(") and text.endswith(".__init__")):
                return statement
            if (
                text.startswith("super(")
                and ".__init__(" in text
                and _num_super_arguments(statement.value) == 1
            ):
                return statement
            if text.startswith("super().init("):
                return statement
    return None


def _num_super_arguments(call: ast.expr) -> int:
    while isinstance(call, (ast.Call, ast.Attribute)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "super":
            return len(call.args)
        call = call.func if isinstance(call, ast.Call) else call.value
    return -1


def _sets_up(statement: ast.stmt) -> bool:
    """Whether a statement may call a constructor of a base, in any of the ways there are."""
    for node in ast.walk(statement):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        inner = node.func.value
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "super":
            if len(inner.args) != 1 and node.func.attr != "init":
                return True
        elif "init" in node.func.attr.lower() or node.func.attr == "__setstate__":
            return True
    return False


def _part(scopes: Scopes, statement: ast.stmt, me: str) -> str:
    """The attribute to which a statement assigns a layer or a parameter; empty if it does not."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return ""
    target = statement.targets[0]
    if not (
        isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == me
    ):
        return ""
    word = scopes.dotted(statement.value.func)
    is_layer = word.startswith("torch.nn.") and word.count(".") == 2 and word.rpartition(".")[2][:1].isupper()
    return f"`{me}.{target.attr}`" if is_layer and word not in _NOT_PARTS else ""


RULE: Rule[Script] = Rule(
    id="RW810",
    name="module-without-super-init",
    severity="error",
    classes=(),
    summary="a module's layers are set before `super().__init__()` has run",
    check=check,
    needs_ranks=False,
    fixable=True,
)
