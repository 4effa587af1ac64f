"""A DataLoader gets two arguments that exclude each other: a sampler and shuffle=True, or a batch sampler and a batch size.

**Why it breaks.** ``ValueError: sampler option is mutually exclusive with shuffle``: the sampler decides the order. In
the same way a ``batch_sampler`` excludes ``batch_size``, ``shuffle``, ``sampler`` and ``drop_last``, and a stream
(``IterableDataset``) excludes both.

Bad:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.arange(6400.0))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, shuffle=True, sampler=sampler)
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.arange(6400.0))
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
dist.destroy_process_group()
```

**When it says nothing.** ``shuffle=False`` or ``shuffle=(sampler is None)`` with a sampler, and ``shuffle=True`` with
``sampler=None``.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from rankwise.lint.finding import Edit, span_of
from rankwise.lint.library.names import LOADER
from rankwise.lint.model.values import Instance, Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import AT, ITERABLE, given
from rankwise.lint.topics.job_view import function_of, once, places, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Loaders with two orders."""
    for place in once(places(script, LOADER)):
        call = place.last
        clash = _clash(call)
        if clash is not None and not _may_be_apart(call):
            edits = _edits(script, call) if clash.is_of_shuffle else []
            yield script.finding(RULE, call.node, clash.message, clash.fix, edits=edits)


class _Clash(NamedTuple):
    message: str
    fix: str
    is_of_shuffle: bool = False  # without shuffle=True, the call is right


def _clash(call: Call) -> _Clash | None:
    sampler, batches = given(call, "sampler"), given(call, "batch_sampler")
    shuffles = _is_true(call, "shuffle")
    name = text_of(call.arg_node(AT["sampler"], "sampler")) or "the sampler"
    if batches is not None and _is_there(batches):
        others = [word for word in ("shuffle", "drop_last") if _is_true(call, word)]
        size = call.arg(AT["batch_size"], "batch_size")
        others += ["batch_size"] if size is not None and size.const != 1 else []
        others += ["sampler"] if sampler is not None and _is_there(sampler) else []
        if others:
            return _Clash(
                f"ValueError: a batch_sampler excludes {', '.join(others)}",
                f"remove {', '.join(others)}: the batch sampler decides",
            )
    if sampler is not None and _is_there(sampler) and shuffles:
        return _Clash(
            f"ValueError: `{name}` decides the order, so shuffle=True is not allowed",
            f"remove shuffle: `{name}` does the shuffling",
            is_of_shuffle=True,
        )
    dataset = given(call, "dataset")
    if (
        dataset is not None
        and isinstance(dataset.thing, Instance)
        and ITERABLE in dataset.thing.cls.library_bases()
    ):
        if shuffles:
            return _Clash(
                "ValueError: a loader cannot shuffle an IterableDataset",
                "remove shuffle, and shuffle in the data set's __iter__",
            )
        if sampler is not None and _is_there(sampler) and not _is_one_of_several(call):
            return _Clash(
                "ValueError: an IterableDataset has no indices, so a sampler cannot draw from it",
                "remove the sampler, and select this rank's share in the data set's __iter__",
            )
    return None


def _is_one_of_several(call: Call) -> bool:
    """Whether data set and sampler both come from branches: which goes with which is not known."""
    scope = function_of(call.module.tree, call.node)
    names = [text_of(call.arg_node(AT[word], word)) for word in ("dataset", "sampler")]
    counts = [
        sum(
            isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name
            for node in ast.walk(scope)
        )
        for name in names
    ]
    return any(count > 1 for count in counts)


def _may_be_apart(call: Call) -> bool:
    """Whether the arguments come by a table (``**options``) that gets one or the other on different ways."""
    keywords = getattr(call.node, "keywords", [])
    if all(one.arg is not None for one in keywords):
        return False
    scope = function_of(call.module.tree, call.node)
    for node in ast.walk(scope):
        if isinstance(node, ast.Delete) or (
            isinstance(node, ast.Attribute) and node.attr in {"pop", "update"}
        ):
            return True
        if isinstance(node, ast.If) and node.orelse and _keys(node.body) and _keys(node.orelse):
            return True
    return False


def _keys(statements: list[ast.stmt]) -> set[str]:
    """The loader's arguments that these statements name."""
    words = {
        part.value
        for one in statements
        for part in ast.walk(one)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }
    return words & {"shuffle", "sampler", "batch_sampler", "batch_size", "drop_last"}


def _is_true(call: Call, name: str) -> bool:
    value = call.arg(AT[name], name)
    return value is not None and value.const is True


def _is_there(value: Value) -> bool:
    return isinstance(value.thing, (Object, Instance))


def _edits(script: Script, call: Call) -> list[Edit]:
    """`shuffle=False` instead of `shuffle=True`: both loaders of a branch keep their form."""
    node = call.node
    if not isinstance(node, ast.Call):
        return []
    keyword = next(
        (one for one in node.keywords if one.arg == "shuffle" and isinstance(one.value, ast.Constant)), None
    )
    if keyword is None:
        return []
    span = span_of(keyword.value, script.lines)
    return [Edit(span=span, text="False")]


RULE: Rule[Script] = Rule(
    id="RW503",
    name="sampler-and-shuffle",
    severity="error",
    classes=("X2",),
    summary="a DataLoader gets a sampler and an argument that excludes it",
    check=check,
    fixable=True,
)
