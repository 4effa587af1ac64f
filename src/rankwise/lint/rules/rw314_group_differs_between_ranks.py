"""Ranks call new_group with different lists of ranks.

**Why it breaks.** Every rank of the job must create every group, in the same order. If each creates only its own,
different groups at the same position count as one: ranks of different groups reduce together, with wrong sums, or block
forever.

Bad:

```python
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.new_group([0, 1] if rank < 2 else [2, 3])
dist.barrier(group=group)
dist.destroy_process_group()
```

Good:

```python
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
group = low if rank < 2 else high
dist.barrier(group=group)
dist.destroy_process_group()
```

**When it says nothing.** All ranks loop over all groups, and keep the one that they are in; `use_local_synchronization=True`.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.model.values import Items, Object, Spread, mixed
from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import D, ranks_in
from rankwise.lint.topics.job_view import once, places, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script
    from rankwise.lint.topics.job_view import Place

_WHO = frozenset({"rank", "local_rank", "node_rank"})


def check(script: Script) -> Iterator[Finding]:
    """Groups whose list of ranks depends on the calling rank, or that a rank test in a loop skips."""
    for place in once(places(script, D + "new_group")):
        call = place.last
        local = call.kwargs.get("use_local_synchronization")
        if local is not None and local.const is not False:
            continue
        node = call.arg_node(0, "ranks")
        if node is None or len(place.calls) < 2 or not _differs(place):
            continue
        yield script.finding(
            RULE,
            node,
            f"each rank creates another group here, `{text_of(node)}`, but every rank must create all groups, in the same order",
            "create all groups on every rank in one loop, and keep the one with this rank in it; or use `dist.new_subgroups_by_enumeration`",
        )


def _differs(place: Place) -> bool:
    lists = [ranks_in(call.arg(0, "ranks")) for call in place.calls]
    if all(one is not None for one in lists):
        # A group of one needs no other rank.
        return len(set(lists)) > 1 and any(len(one or ()) > 1 for one in lists)
    value = place.last.arg(0, "ranks")
    loops, node = place.last.loops, place.last.arg_node(0, "ranks")
    if value is None:
        return False
    if (
        loops
        and isinstance(loops[-1], (ast.ListComp, ast.DictComp))
        and isinstance(node, (ast.Name, ast.Subscript))
    ):
        return False  # one of several lists, each in its own iteration
    thing = value.thing
    if isinstance(thing, Items) and thing.is_whole and len(thing.values) == 1:
        return False
    if isinstance(thing, Object) and thing.kind == "range":
        value = mixed([value, *thing.attrs["bounds"].thing.values])
    whole = mixed([value])
    return whole.spread is Spread.RANK and bool(whole.origin & _WHO)


RULE: Rule[Script] = Rule(
    id="RW314",
    name="group-differs-between-ranks",
    severity="error",
    classes=("C10",),
    summary="ranks create different groups at the same place",
    check=check,
)
