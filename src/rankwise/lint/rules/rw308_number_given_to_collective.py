"""A Python number is passed where a collective takes a tensor.

**Why it breaks.** `TypeError: Invalid function argument. Expected parameter tensor of type torch.Tensor`. A number
could not be changed in place anyway.

Bad:

```python
import torch.distributed as dist

dist.init_process_group("gloo")
num_correct = 12
dist.all_reduce(num_correct)
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
num_correct = torch.tensor(12)
dist.all_reduce(num_correct)
print(num_correct.item())
dist.destroy_process_group()
```

**When it says nothing.** The value cannot be traced, or is a tensor in one of the places where it is set.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.model.values import Items
from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import collectives, word_of
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.tensor_places import is_number
from rankwise.lint.topics.tensor_text import bindings, key_of, last_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script

_TAKES = {"all_reduce": (0, "tensor"), "broadcast": (0, "tensor"), "reduce": (0, "tensor"), "all_gather": (1, "tensor"), "gather": (0, "tensor"),
          "scatter": (0, "tensor"), "send": (0, "tensor"), "recv": (0, "tensor"), "isend": (0, "tensor"), "irecv": (0, "tensor"),
          "all_gather_into_tensor": (1, "input_tensor"), "reduce_scatter_tensor": (1, "input")}  # fmt: skip


def check(script: Script) -> Iterator[Finding]:
    """Numbers, lists and strings where a collective takes a tensor."""
    for place in collectives(script, *_TAKES):
        call = place.last
        position, name = _TAKES[word_of(call)]
        node = call.arg_node(position, name)
        if (
            node is None
            or isinstance(node, ast.Starred)
            or not (_is_no_tensor(script.tree, node) or _is_known_list(call.arg(position, name)))
        ):
            continue
        shown = text_of(node)
        yield script.finding(
            RULE,
            node,
            f"{word_of(call)} takes a tensor, and `{shown}` is not one: every rank fails with a TypeError",
            f"pass a tensor that you keep: `value = torch.tensor({shown}, device=...)`, and read `value.item()` afterwards",
        )


def _is_no_tensor(tree: ast.Module, node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return node.value is not None
    if isinstance(node, (ast.List, ast.Tuple, ast.ListComp, ast.Dict, ast.JoinedStr)):
        return True
    if is_number(tree, node, node):
        return True
    value = last_value(tree, node, node)
    return (
        value is not node
        and isinstance(value, (ast.List, ast.Tuple, ast.ListComp, ast.Dict))
        and not _is_changed(tree, node)
    )


def _is_known_list(value: Value | None) -> bool:
    thing = value.thing if value is not None else None
    return isinstance(thing, Items) and thing.is_whole and bool(thing.values) and thing.kind != "dict"


def _is_changed(tree: ast.Module, node: ast.AST) -> bool:
    return len(bindings(tree, key_of(node), node)) > 1


RULE: Rule[Script] = Rule(
    id="RW308",
    name="number-given-to-collective",
    severity="error",
    classes=("C18",),
    summary="a number is passed where a collective takes a tensor",
    check=check,
)
