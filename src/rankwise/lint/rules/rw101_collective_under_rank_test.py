"""Only some ranks reach a collective.

**Why it breaks.** A collective waits until every rank of its group has called it. Under `if rank == 0` the other ranks
skip it: rank 0 blocks until the timeout (10 or 30 minutes), or is paired with the others' *next* collective and gets
its numbers. The collective may be hidden in a helper, a property, a decorated function or behind `and`.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
if dist.get_rank() == 0:
    dist.all_reduce(total)
    print(total.item())
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    print(total.item())
dist.destroy_process_group()
```

**When it says nothing.** Both branches call the same collectives (also "rank 0 first": `if rank != 0: barrier()`, work,
`if rank == 0: barrier()`); the collective uses a group of its own; sends and receives to one peer.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.paths.found import missed_ops
from rankwise.lint.paths.words import also, called, line_left, tested, who
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import parents_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Guard
    from rankwise.lint.model.history import Op
    from rankwise.lint.script import Script

#: Calls that write their result into a tensor or list that they were given.
_FILLING = ("all_gather", "all_reduce", "all_to_all", "gather", "reduce", "scatter")


def check(script: Script) -> Iterator[Finding]:
    """Collectives that some of the simulated ranks never reach."""
    for one in missed_ops(script, "collective"):
        op, guard = one.op, one.guard
        yield script.finding(
            RULE,
            one.at,
            f"{who(one.doers, one.others, 'reach')} {called(op)} (`{tested(op, guard)}`): it waits for the others,"
            " or pairs with their next collective",
            _fix(script, op, guard),
            severity="error" if one.is_sure else "warning",
            also=also(op, one.at, guard),
        )


def _fix(script: Script, op: Op, guard: Guard) -> str:
    if line := line_left(op, guard):
        return f"call {called(op)} before line {line}, or let every rank reach it"
    is_alone = isinstance(parents_of(script.tree).get(op.call.node), ast.Expr)
    if is_alone and not op.call.name.rpartition(".")[2].startswith(_FILLING):
        return f"call {called(op)} on every rank, outside the test"
    return f"call {called(op)} on every rank, and keep only the use of its result under the test"


RULE: Rule[Script] = Rule(
    id="RW101",
    name="collective-under-rank-test",
    severity="error",
    classes=("C1", "C27"),
    summary="only some ranks reach a collective",
    check=check,
)
