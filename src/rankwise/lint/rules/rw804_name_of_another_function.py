"""A name is used that exists only in another function, or nowhere.

**Why it breaks.** ``NameError: name 'train_set' is not defined`` on every rank, but only when the line is reached: with
a local variable of ``main`` that may be an hour into the run.

Bad:

```python
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData
from torchvision.transforms import ToTensor

def load_train_objs():
    train_set = FakeData(transform=ToTensor())
    return train_set

def prepare_dataloader(batch_size):
    return DataLoader(train_set, batch_size=batch_size)
```

Good:

```python
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData
from torchvision.transforms import ToTensor

def load_train_objs():
    train_set = FakeData(transform=ToTensor())
    return train_set

def prepare_dataloader(train_set, batch_size):
    return DataLoader(train_set, batch_size=batch_size)
```

**When it says nothing.** Files with a star import, ``exec`` or ``globals()``, fragments (a code block of a page), names
that occur nowhere else in a notebook, annotations, names that a ``try`` with ``except NameError`` handles, Python 2's
builtins.
"""

from __future__ import annotations

import ast
from difflib import get_close_matches
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.scopes import FunctionNode, Scope, Scopes, is_function, scopes_of
from rankwise.lint.topics.undefined import (
    function_of,
    is_certain,
    may_make_names,
    meant_star_parameter,
    undefined,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Names that no scope around them binds."""
    scopes = scopes_of(script.tree)
    names = undefined(scopes)
    if script.piece.cells:
        # A notebook's magics may create names that occur nowhere else.
        names = tuple(
            (n, at) for n, at in names if any(n.id in scope.bound for scope in scopes.opened.values())
        )
    if not names or script.piece.is_fragment or may_make_names(script, scopes):
        return
    told: set[tuple[str, ast.AST]] = set()
    for name, scope in names:
        key = (name.id, function_of(scope) or script.tree)
        if (
            key in told
            or not is_certain(script, scopes, name)
            or _belongs_to_other_rules(scopes, name, scope)
        ):
            continue
        told.add(key)
        where, fix = _where(scopes, name, scope)
        yield script.finding(RULE, name, f"`{name.id}` is not defined here: {where}", fix)


def _belongs_to_other_rules(scopes: Scopes, name: ast.Name, scope: Scope) -> bool:
    is_main_test = name.id == "name" and isinstance(scopes.parents.get(name), ast.Compare)
    return is_main_test or meant_star_parameter(name.id, scope) is not None


def _where(scopes: Scopes, name: ast.Name, scope: Scope) -> tuple[str, str]:
    """Where the name does exist, and what to do."""
    here = function_of(scope)
    reader = f"`{here.name}`" if here is not None else "this line"
    for other in scopes.opened.values():
        if name.id in other.bound and other.kind != "comprehension":
            line = getattr(other.bound[name.id][0], "lineno", 0)
            if is_function(other.node):
                return _local_of(other.node, other, name.id, line, reader)
            if isinstance(other.node, ast.ClassDef):
                owner = other.node.name
                return (
                    f"it belongs to class {owner}, line {line}",
                    f"write `self.{name.id}` or `{owner}.{name.id}`",
                )
    if (
        here is not None
        and here.args.args
        and here.args.args[0].arg == "self"
        and _is_attribute(scopes, name.id)
    ):
        return f"only `self.{name.id}` exists", f"write `self.{name.id}`"
    visible = [*scopes.module.bound, *((here and scopes.opened[here].bound) or ())]
    close = get_close_matches(name.id, visible, n=1, cutoff=0.8)
    if close:
        return (
            f"nothing here binds it; `{close[0]}` exists",
            f"write `{close[0]}`, or define `{name.id}` first",
        )
    return (
        "nothing here binds it",
        f"import or define `{name.id}`, or pass it to {reader} as an argument",
    )


def _local_of(function: FunctionNode, scope: Scope, name: str, line: int, reader: str) -> tuple[str, str]:
    is_parameter = isinstance(scope.bound[name][0], ast.arg)
    kind = "a parameter" if is_parameter else "a local variable"
    return (
        f"it is {kind} of {function.name}, line {line}",
        f"pass it to {reader} as an argument"
        + ("" if is_parameter else f", or return it from {function.name}"),
    )


def _is_attribute(scopes: Scopes, name: str) -> bool:
    return any(
        n.attr == name
        and isinstance(n.ctx, ast.Store)
        and isinstance(n.value, ast.Name)
        and n.value.id == "self"
        for n in scopes.all(ast.Attribute)
    )


RULE: Rule[Script] = Rule(
    id="RW804",
    name="name-of-another-function",
    severity="error",
    classes=(),
    summary="a name is used that exists only in another function, or nowhere",
    check=check,
    needs_ranks=False,
)
