"""The source or destination of a collective is not a member of its group.

**Why it breaks.** `ValueError: Global rank 0 is not part of group`. `src` and `dst` are global ranks, even in a
subgroup: in the group of ranks 2 and 3 the source is 2, not 0. A rank within the group is passed as `group_src` or
`group_dst`.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
group = dist.new_group([2, 3])
x = torch.ones(1)
if dist.get_rank() in (2, 3):
    dist.broadcast(x, src=0, group=group)
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
group = dist.new_group([2, 3])
x = torch.ones(1)
if dist.get_rank() in (2, 3):
    dist.broadcast(x, src=2, group=group)
dist.destroy_process_group()
```

**When it says nothing.** The members of the group are not known, or the number comes from `dist.get_global_rank`.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.model.values import Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import (
    ROOTED,
    collectives,
    group_of,
    members_of,
    root_value,
    word_of,
)
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.tensor_text import bindings, key_of, last_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Collectives of a group whose source is not a member, or is a rank within the group."""
    for place in collectives(script, *ROOTED):
        call = place.last
        group = group_of(call)
        value = root_value(call)
        if group is None or value is None or not isinstance(group.thing, Object) or group.thing.call is None:
            continue
        position, name = ROOTED[word_of(call)]
        node = call.arg_node(position, name) or call.node
        members = members_of(group)
        shown = text_of(node)
        if members and isinstance(value.const, int) and value.const not in members and not value.spread:
            fix = f"use `{name}={members[0]}`, or `group_{name}=0`"
            what = f"its members are {', '.join(str(one) for one in members[:8])}"
        elif _is_group_rank(script.tree, node) and not (members and members[0] == 0):
            fix, what = (
                f"use `group_{name}={shown}`, or `dist.get_global_rank(group, {shown})`",
                "it is a rank within the group",
            )
        else:
            continue
        yield script.finding(
            RULE,
            node,
            f"{name} must be a global rank that belongs to the group, and `{shown}` is not: {what}",
            fix,
        )


def _is_group_rank(tree: ast.Module, node: ast.AST) -> bool:
    """Whether it is `get_rank(group)`, or runs over `range(get_world_size(group))`."""
    value = last_value(tree, node, node)
    if isinstance(value, ast.Call) and _of_group(value, "get_rank"):
        return True
    key = key_of(node)
    for statement, _ in bindings(tree, key, node)[-1:] if key else []:
        if (
            isinstance(statement, ast.For)
            and isinstance(statement.iter, ast.Call)
            and key_of(statement.iter.func) == "range"
        ):
            if len(statement.iter.args) != 1:
                return False
            size = last_value(tree, statement.iter.args[0], statement)
            return isinstance(size, ast.Call) and _of_group(size, "get_world_size")
    return False


def _of_group(call: ast.Call, word: str) -> bool:
    given = [*call.args[:1], *(one.value for one in call.keywords if one.arg == "group")]
    return (
        key_of(call.func).rpartition(".")[2] == word
        and bool(given)
        and not (isinstance(given[0], ast.Constant))
    )


RULE: Rule[Script] = Rule(
    id="RW312",
    name="source-outside-of-group",
    severity="error",
    classes=("C11",),
    summary="src or dst is not a member of the group",
    check=check,
)
