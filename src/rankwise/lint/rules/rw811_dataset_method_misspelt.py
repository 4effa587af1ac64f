"""A data set's ``__getitem__`` or ``__len__`` is misspelt.

**Why it breaks.** DataLoader and DistributedSampler use ``dataset[i]`` and ``len(dataset)``. ``def __getItem__`` or
``def len`` is an ordinary method: ``NotImplementedError`` or ``TypeError: object of type ... has no len()``.

Bad:

```python
from torch.utils.data import Dataset

class Points(Dataset):
    def __len(self):
        return 100

    def __getItem__(self, i):
        return i
```

Good:

```python
from torch.utils.data import Dataset

class Points(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, i):
        return i
```

**When it says nothing.** Classes that also have the right method, iterable data sets without ``__len__``, abstract
bases.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.finding import Edit, Span
from rankwise.lint.rule import Rule
from rankwise.lint.topics.classes import methods, roots, self_name
from rankwise.lint.topics.scopes import FunctionNode, Scopes, scopes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_MAP_STYLE = frozenset({"torch.utils.data.Dataset", "torch.utils.data.dataset.Dataset"})
_ITERABLE = frozenset({"torch.utils.data.IterableDataset", "torch.utils.data.dataset.IterableDataset"})
_MEANT = {
    "getitem": "__getitem__",
    "get_item": "__getitem__",
    "len": "__len__",
    "length": "__len__",
    "iter": "__iter__",
}
_BREAKS = {
    "__getitem__": "`dataset[i]` raises NotImplementedError",
    "__len__": "`len(dataset)` raises TypeError",
    "__iter__": "iterating raises NotImplementedError",
}
_WORDS = re.compile(r"\bdef +(_*(?:get_?item|len|length|iter)_*)\b", re.IGNORECASE)


def check(script: Script) -> Iterator[Finding]:
    """Methods of data sets that look like the ones that loaders call."""
    code = script.piece.code
    if "Dataset" not in code or all(m in _BREAKS for m in _WORDS.findall(code)):
        return
    scopes = scopes_of(script.tree)
    for cls in scopes.all(ast.ClassDef):
        above = roots(scopes, cls)
        own = methods(cls)
        if above and above <= _MAP_STYLE:
            wanted = {"__getitem__", "__len__"}
        elif above and above <= _ITERABLE:
            wanted = {"__iter__"}
        else:
            continue
        if "__getattr__" in own or any(scopes.called_class(base) for base in cls.bases):
            continue
        for name, method in own.items():
            meant = _MEANT.get(name.strip("_").lower(), "")
            if meant in wanted and meant not in own and "__getitems__" not in own and self_name(method):
                yield from _finding(script, scopes, cls, method, meant)


def _finding(
    script: Script, scopes: Scopes, cls: ast.ClassDef, method: FunctionNode, meant: str
) -> Iterator[Finding]:
    if method.decorator_list or len(method.args.args) != (2 if meant == "__getitem__" else 1):
        return
    is_called = any(n.attr == method.name for n in scopes.all(ast.Attribute))
    if is_called and "_" not in (method.name[0], method.name[-1]):
        return
    line = script.lines[method.lineno - 1]
    col = line.index(method.name, line.index("def ") + 3) + 1
    span = Span(method.lineno, col, method.lineno, col + len(method.name))
    yield script.finding(
        RULE,
        span,
        f"{cls.name} has `{method.name}` where `{meant}` is meant: {_BREAKS[meant]}",
        f"rename the method to `{meant}`",
        edits=() if is_called else [Edit(span=span, text=meant)],
    )


RULE: Rule[Script] = Rule(
    id="RW811",
    name="dataset-method-misspelt",
    severity="error",
    classes=(),
    summary="a data set's `__getitem__`, `__len__` or `__iter__` is misspelt",
    check=check,
    needs_ranks=False,
    fixable=True,
)
