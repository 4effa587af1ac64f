"""gather_list or scatter_list is passed on ranks that must not pass one.

**Why it breaks.** `ValueError: Argument gather_list must NOT be specified on non-destination ranks` on all ranks but
one; the correct one only reports that a peer closed the connection.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
part = torch.ones(2)
parts = [torch.zeros(2) for _ in range(dist.get_world_size())]
dist.gather(part, parts, dst=0)
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
part = torch.ones(2)
parts = [torch.zeros(2) for _ in range(dist.get_world_size())]
dist.gather(part, parts if dist.get_rank() == 0 else None, dst=0)
dist.destroy_process_group()
```

**When it says nothing.** The list is None or empty on the other ranks, they call without it, or its value there is
unknown.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.model.values import Items
from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import collectives, has_group, root_rank, word_of
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.tensor_text import bindings, key_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

_LISTS = {
    "gather": (1, "gather_list"),
    "gather_object": (1, "object_gather_list"),
    "scatter": (1, "scatter_list"),
}


def check(script: Script) -> Iterator[Finding]:
    """Calls in which a rank other than the source or destination passes a list."""
    for place in collectives(script, *_LISTS):
        word = word_of(place.last)
        root = root_rank(place.last)
        if root is None or has_group(place.last):
            continue
        if any(test.spread for call in place.calls for _, test, _ in call.tests):
            # A test on the rank that could not be decided.
            continue
        others = [call for call in place.calls if call.rank != root]
        if not others and place.num_ranks == 1:
            others = [place.last]
        if place.is_once_a_node or not others or not all(_gives_list(script.tree, call) for call in others):
            continue
        node = others[0].arg_node(*_LISTS[word])
        what = "destination" if word != "scatter" else "source"
        yield script.finding(
            RULE,
            node or place.last.node,
            f"every rank passes `{text_of(node)}` to {word}, which only rank {root}, the {what}, may do: the others fail with a ValueError",
            f"pass `{text_of(node)} if dist.get_rank() == {root} else None`",
        )


def _gives_list(tree: ast.Module, call: Call) -> bool:
    position, name = _LISTS[word_of(call)]
    value, node = call.arg(position, name), call.arg_node(position, name)
    if value is None or node is None or (value.is_known and not value.const):
        return False
    if isinstance(value.thing, Items):
        return value.thing.kind == "list" and (bool(value.thing.values) or not value.thing.is_whole)
    if value.origin & {"rank", "local_rank"} and not isinstance(node, (ast.List, ast.ListComp)):
        return False
    if isinstance(node, (ast.List, ast.ListComp, ast.BinOp)):
        return True
    found = bindings(tree, key_of(node), node) if key_of(node) else []
    return bool(found) and all(_is_list(one) for _, one in found)


def _is_list(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return key_of(value.func) in {"list", "torch.chunk", "torch.split", "torch.unbind"} or (
            isinstance(value.func, ast.Attribute) and value.func.attr in {"chunk", "split", "unbind"}
        )
    return isinstance(value, (ast.List, ast.ListComp)) or (
        isinstance(value, ast.BinOp) and isinstance(value.left, ast.List)
    )


RULE: Rule[Script] = Rule(
    id="RW309",
    name="list-on-other-ranks",
    severity="error",
    classes=("C19",),
    summary="gather_list or scatter_list is passed on every rank",
    check=check,
)
