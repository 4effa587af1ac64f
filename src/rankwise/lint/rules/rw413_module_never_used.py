"""A layer of a model that DistributedDataParallel wraps is never used.

**Why it breaks.** DDP waits for the gradient of each parameter. A layer that no forward pass uses gets none: in the second step every rank fails with
`Expected to have finished reduction in the prior iteration before starting a new one`.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)

    def forward(self, x):
        return self.body(x)


dist.init_process_group("gloo")
model = DDP(Net())
model(torch.rand(2, 4)).sum().backward()
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        return self.body(x)


dist.init_process_group("gloo")
model = DDP(Net())
model(torch.rand(2, 4)).sum().backward()
dist.destroy_process_group()
```

**When it says nothing.** `find_unused_parameters=True` or `static_graph=True`, the layer is named anywhere else, or the
class iterates over its layers.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.library.names import DDP
from rankwise.lint.model.values import Instance, Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.tensor_text import is_in, key_of
from rankwise.lint.topics.wrapping import wraps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_LAYERS = (
    "torch.nn.Linear",
    "torch.nn.Conv",
    "torch.nn.Embedding",
    "torch.nn.LSTM",
    "torch.nn.GRU",
    "torch.nn.Bilinear",
    "torch.nn.MultiheadAttention",
)
_WALKS = re.compile(
    r"\b(children|named_children|modules|named_modules|getattr|_modules|__dict__|vars)\b|exec\("
)


def check(script: Script) -> Iterator[Finding]:
    """Layers that are set in a wrapped class of this file and named nowhere else."""
    told: set[int] = set()
    for wrap in wraps(script):
        thing = wrap.inner.thing
        if (
            wrap.kind != DDP
            or wrap.call.name != DDP
            or wrap.call.has_star
            or not isinstance(thing, Instance)
            or not is_in(script.tree, thing.cls.node)
        ):
            continue
        if any(
            (given := wrap.call.kwargs.get(name)) is not None and given.const is not False
            for name in ("find_unused_parameters", "static_graph")
        ):
            continue
        if _WALKS.search(ast.unparse(thing.cls.node)) or len(list(thing.cls.ancestry())) > 1:
            continue
        for name, value in thing.attrs.items():
            made = value.thing.call if isinstance(value.thing, Object) else None
            if (
                made is None
                or not made.name.startswith(_LAYERS)
                or id(made.node) in told
                or _is_named(script, name)
                or not is_in(script.tree, made.node)
            ):
                continue
            if sum(other.thing is value.thing for other in thing.attrs.values()) > 1:
                continue
            told.add(id(made.node))
            yield script.finding(
                RULE,
                made.node,
                f"`self.{name}` is used in no forward pass, so its parameters get no gradient, and DistributedDataParallel fails in the second step",
                f"remove `self.{name} = {text_of(made.node)}`, or wrap with `find_unused_parameters=True`",
            )


def _is_named(script: Script, name: str) -> bool:
    """Whether an attribute of that name is read, or written as text, anywhere."""
    return any(
        (isinstance(one, ast.Attribute) and one.attr == name and not isinstance(one.ctx, ast.Store))
        or (isinstance(one, ast.Constant) and isinstance(one.value, str) and name in one.value)
        or (
            isinstance(one, ast.Call)
            and key_of(one.func) == "getattr"
            and not isinstance(one.args[-1], ast.Constant)
        )
        for one in ast.walk(script.tree)
    )


RULE: Rule[Script] = Rule(
    id="RW413",
    name="module-never-used",
    severity="warning",
    classes=("D1",),
    summary="a layer of a wrapped model is never used",
    check=check,
)
