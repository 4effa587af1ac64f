"""Ranks call broadcast_object_list with lists of different lengths.

**Why it breaks.** The source sends as many objects as its list has, and each receiver expects as many as its own list
has. If these differ, receivers abort (`SIGABRT`) or wait for a message that never comes. `[None]` or `[]` on the
receivers must be as long as the source's list.

Bad:

```python
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    state = ["run-7", {"step": 3}]
else:
    state = [None]
dist.broadcast_object_list(state, src=0)
dist.destroy_process_group()
```

Good:

```python
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    state = ["run-7", {"step": 3}]
else:
    state = [None, None]
dist.broadcast_object_list(state, src=0)
dist.destroy_process_group()
```

**When it says nothing.** The lengths are not known.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.model.values import Items
from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import collectives
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.tensor_text import bindings, key_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Calls in which the lists of the simulated ranks differ in length."""
    for place in collectives(script, "broadcast_object_list"):
        node = place.last.arg_node(0, "object_list")
        lengths = {call.rank: _length(script.tree, call, node) for call in place.calls}
        known = {rank: one for rank, one in lengths.items() if one}
        if len(known) < 2 or len(set(known.values())) < 2 or len(known) != len(lengths):
            continue
        first, last = min(known), max(known)
        yield script.finding(
            RULE,
            place.last.node,
            f"`{text_of(node)}` holds {known[first]} on rank {first} and {known[last]} on rank {last}, so receivers abort or wait forever",
            "make the receivers' list as long as the source's, or send everything as one object: `[everything]` and `[None]`",
        )


def _length(tree: ast.Module, call: Call, node: ast.AST | None) -> str:
    value = call.arg(0, "object_list")
    thing = value.thing if value is not None else None
    if isinstance(thing, Items) and thing.keys is None:
        if thing.is_whole or (node is not None and _only_appends(tree, node)):
            return f"{len(thing.values)} objects"
        return ""
    if value is not None and value.origin & {"files"} and value.thing is None:
        return "one object for each file"
    return ""


def _only_appends(tree: ast.Module, node: ast.AST) -> bool:
    """Whether a list grows by `append`, outside of loops, and in no other way."""
    key = key_of(node)
    grown = [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and key_of(one.func.value) == key
    ]
    in_loops = {
        id(inner)
        for one in ast.walk(tree)
        if isinstance(one, (ast.For, ast.While))
        for inner in ast.walk(one)
    }
    assigned = bindings(tree, key, node) if key else []
    return (
        bool(grown)
        and all(getattr(one.func, "attr", "") == "append" and id(one) not in in_loops for one in grown)
        and all(isinstance(value, ast.List) for _, value in assigned)
    )


RULE: Rule[Script] = Rule(
    id="RW310",
    name="object-lists-differ-in-length",
    severity="error",
    classes=("C20",),
    summary="ranks call broadcast_object_list with lists of different lengths",
    check=check,
)
