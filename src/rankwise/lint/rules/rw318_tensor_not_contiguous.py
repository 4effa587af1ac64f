"""A transposed tensor is passed to NCCL.

**Why it breaks.** NCCL needs contiguous memory: `Tensors must be contiguous`. A transposed or permuted tensor is only
another view of its memory.

Bad:

```python
import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
x = torch.rand(4, 8, device="cuda").t()
dist.all_reduce(x)
dist.destroy_process_group()
```

Good:

```python
import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
x = torch.rand(4, 8, device="cuda").t().contiguous()
dist.all_reduce(x)
dist.destroy_process_group()
```

**When it says nothing.** The backend is not the literal "nccl"; Gloo copies non-contiguous tensors.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import FILLED, OBJECTS, backends, collectives, word_of
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.tensor_text import last_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_TURNS = frozenset({"t", "T", "transpose", "permute", "mT", "swapaxes"})


def check(script: Script) -> Iterator[Finding]:
    """Collectives over NCCL on a transposed tensor."""
    if backends(script) != {"nccl"}:
        return
    for place in collectives(script, *(set(FILLED) - OBJECTS)):
        for node in getattr(place.last.node, "args", ())[:2]:
            if not _is_turned(last_value(script.tree, node, place.last.node)):
                continue
            yield script.finding(
                RULE,
                node,
                f"`{text_of(node)}` is a transposed view, and NCCL takes contiguous tensors only: {word_of(place.last)} fails unless a dimension is 1",
                f"call `.contiguous()` first: `{text_of(node)} = {text_of(node)}.contiguous()`",
            )


def _is_turned(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _TURNS
    return isinstance(node, ast.Attribute) and node.attr in {"T", "mT"}


RULE: Rule[Script] = Rule(
    id="RW318",
    name="tensor-not-contiguous",
    severity="warning",
    classes=("C23",),
    summary="a transposed tensor is passed to NCCL",
    check=check,
)
