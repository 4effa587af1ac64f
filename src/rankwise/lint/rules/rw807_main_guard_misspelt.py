"""The test for ``__main__`` is misspelt, so the script does nothing.

**Why it breaks.** ``__name__`` is ``"__main__"`` in a script, with two underscores on both sides. Compared with
anything else the test is never true: all ranks exit at once with code 0, and nothing was trained.

Bad:

```python
import torch.multiprocessing as mp

def work(rank):
    print(rank)

if __name__ == "main":
    mp.spawn(work, nprocs=2)
```

Good:

```python
import torch.multiprocessing as mp

def work(rank):
    print(rank)

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
```

**When it says nothing.** Other module names for which a test makes sense: ``"__mp_main__"``, ``"mypackage.tool"``.
"""

from __future__ import annotations

import ast
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from rankwise.lint.finding import Edit, span_of
from rankwise.lint.rule import Rule
from rankwise.lint.topics.scopes import Scopes, scopes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_REAL = frozenset({"__main__", "__mp_main__", "__builtin__", "builtins"})


def check(script: Script) -> Iterator[Finding]:
    """Comparisons of ``__name__`` that are never true, and assignments to it."""
    if "__name__" not in script.piece.code and "main" not in script.piece.code:
        return
    scopes = scopes_of(script.tree)
    for node in scopes.all(ast.Compare):
        if len(node.ops) == 1 and isinstance(node.ops[0], (ast.Eq, ast.Is)):
            yield from _compared(script, scopes, node)
    for statement in scopes.all(ast.Assign):
        target = statement.targets[0]
        if isinstance(target, ast.Name) and target.id == "__name__" and _text(statement.value) == "__main__":
            yield script.finding(
                RULE,
                statement,
                '`__name__ = "__main__"` assigns instead of testing: what follows also runs when the file is imported',
                'write `if __name__ == "__main__":` and indent what follows',
                severity="warning",
            )


def _compared(script: Script, scopes: Scopes, node: ast.Compare) -> Iterator[Finding]:
    left, right = node.left, node.comparators[0]
    if isinstance(left, ast.Constant) and isinstance(right, ast.Name):
        left, right = right, left
    if isinstance(left, ast.Name) and left.id == "__name__" and _is_slip(_text(right)):
        what = f'`__name__` is never "{_text(right)}", so the code under this test never runs'
    elif {_text(left), _text(right)} == {"__name__", "__main__"}:
        what = "two strings are compared that are never equal: `__name__` must not be quoted"
    elif lost := _lost_name(scopes, left, right):
        what = f"`{lost}` is not defined (NameError)"
    else:
        return
    yield script.finding(
        RULE,
        node,
        what,
        'write `if __name__ == "__main__":`',
        edits=[Edit(span=span_of(node, script.lines), text='__name__ == "__main__"')],
    )


def _lost_name(scopes: Scopes, left: ast.expr, right: ast.expr) -> str:
    """A misspelt ``__name__``, or "__main__" without quotes; empty if the file has such a name."""
    if scopes.has_star_import or not isinstance(left, ast.Name):
        return ""
    if left.id == "__name__":
        is_lost = isinstance(right, ast.Name) and right.id == "__main__" and _is_unknown(scopes, right)
        return "__main__" if is_lost else ""
    is_pair = {left.id.strip("_"), _text(right).strip("_")} == {"name", "main"}
    return left.id if is_pair and _is_unknown(scopes, left) else ""


def _is_unknown(scopes: Scopes, name: ast.Name) -> bool:
    return scopes.owner(name.id, scopes.scope(name)) is None


def _is_slip(value: str) -> bool:
    if value in _REAL or "." in value:
        return False
    word = value.strip("_ ").lower()
    return word in ("main", "name") or (
        value[:1] == "_" and SequenceMatcher(None, word, "main").ratio() >= 0.75
    )


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


RULE: Rule[Script] = Rule(
    id="RW807",
    name="main-guard-misspelt",
    severity="error",
    classes=(),
    summary="a misspelt test for `__main__` is never true: the script does nothing",
    check=check,
    needs_ranks=False,
    fixable=True,
)
