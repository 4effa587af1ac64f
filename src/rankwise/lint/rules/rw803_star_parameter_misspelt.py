"""A function takes ``**kwards`` and reads ``kwargs``.

**Why it breaks.** The name in the body is not the name in the signature: ``NameError: name 'kwargs' is not defined`` when
the line is reached, on every rank.

Bad:

```python
import torch

def build(cls, *args, **kwards):
    return cls(*args, **kwargs)
```

Good:

```python
import torch

def build(cls, *args, **kwargs):
    return cls(*args, **kwargs)
```

**When it says nothing.** Any name on which signature and body agree. One that looks misspelt (``**kwards`` in both) is
a hint, because it works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.finding import Edit, Span
from rankwise.lint.rule import Rule
from rankwise.lint.topics.scopes import Scopes, scopes_of
from rankwise.lint.topics.undefined import is_certain, may_make_names, meant_star_parameter, undefined

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_SLIPS = frozenset({"kwards", "kwrags", "kawrgs", "kwagrs", "kwargss", "kwarsg", "kwars", "kwags", "krwags"})


def check(script: Script) -> Iterator[Finding]:
    """Star parameters that the body spells otherwise."""
    scopes = scopes_of(script.tree)
    told: set[ast.AST] = set()
    for name, scope in undefined(scopes):
        param = meant_star_parameter(name.id, scope)
        if (
            param is None
            or param in told
            or may_make_names(script, scopes)
            or not is_certain(script, scopes, name)
        ):
            continue
        told.add(param)
        span = Span(param.lineno, _col(script, param), param.lineno, _col(script, param) + len(param.arg))
        is_read = any(n.id == param.arg for n, _ in scopes.loads)
        yield script.finding(
            RULE,
            span,
            f"the parameter is `{param.arg}`, line {name.lineno} reads `{name.id}`: NameError",
            f"rename the parameter to `{name.id}`",
            edits=() if is_read else [Edit(span=span, text=name.id)],
        )
    yield from _slips(script, scopes, told)


def _slips(script: Script, scopes: Scopes, told: set[ast.AST]) -> Iterator[Finding]:
    for function in scopes.functions():
        param = function.args.kwarg
        if param is not None and param.arg in _SLIPS and param not in told:
            yield script.finding(
                RULE,
                param,
                f"`**{param.arg}` looks like a misspelt `**kwargs`; it works, because signature and body agree",
                "rename it to `kwargs`",
                severity="hint",
            )


def _col(script: Script, param: ast.arg) -> int:
    text = script.lines[param.lineno - 1]
    return (
        param.col_offset if text.isascii() else len(text.encode()[: param.col_offset].decode(errors="ignore"))
    ) + 1


RULE: Rule[Script] = Rule(
    id="RW803",
    name="star-parameter-misspelt",
    severity="error",
    classes=(),
    summary="the body reads `kwargs`, but the signature has another name",
    check=check,
    needs_ranks=False,
    fixable=True,
)
