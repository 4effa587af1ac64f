"""Only some ranks wrap the model or create a group.

**Why it breaks.** `DistributedDataParallel(model)` compares and broadcasts parameters, and *every* rank must call
`new_group`, including ranks that are not members. If some skip it, the others block there, or at the next call.

Bad:

```python
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() < 2:
    group = dist.new_group([0, 1])
    dist.barrier(group=group)
```

Good:

```python
import torch.distributed as dist

dist.init_process_group("gloo")
group = dist.new_group([0, 1])
if dist.get_rank() < 2:
    dist.barrier(group=group)
dist.destroy_process_group()
```

**When it says nothing.** Every rank creates all groups, in the same order; only members use them.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.paths.found import all_local_paths, missed_ops
from rankwise.lint.paths.reasons import test_of
from rankwise.lint.paths.words import also, called, place, tested, who, written
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

#: `self` or a cache may keep groups that all ranks created before.
_CACHE = re.compile(r"\bin (self\.|\w*cache)")


def check(script: Script) -> Iterator[Finding]:
    """Wrappers and groups that some of the simulated ranks do not create."""
    for one in missed_ops(script, "wrap", "group"):
        op, guard = one.op, one.guard
        is_group = op.family == "group"
        yield script.finding(
            RULE,
            one.at,
            f"{who(one.doers, one.others, 'reach')} {called(op)} (`{tested(op, guard)}`), which every rank must call"
            + (", members or not" if is_group else ""),
            f"call {called(op)} on every rank"
            + (", and use the group on its members only" if is_group else ""),
            severity="error" if one.is_sure else "warning",
            failure_class="C10" if is_group else "D13",
            also=also(op, one.at, guard),
        )
    yield from _skipped(script)


def _skipped(script: Script) -> Iterator[Finding]:
    """`if rank not in ranks: continue` before new_group."""
    for path in all_local_paths(script):
        if path.op.family == "group" and path.kind in {"leave", "arm"} and "member" in path.item.value.origin:
            test = test_of(path.item.node)
            yield script.finding(
                RULE,
                test,
                f"ranks for which `{written(test)}` differs do not all reach {called(path.op)}, which every rank must call,"
                " members or not",
                f"call {called(path.op)} for every group on every rank, and keep the one that this rank is in",
                severity="warning" if _CACHE.search(ast.unparse(test)) else "error",
                failure_class="C10",
                also=[place(f"{called(path.op)} is here", path.op.call.node, path.op.call.module)],
            )


RULE: Rule[Script] = Rule(
    id="RW107",
    name="made-on-some-ranks",
    severity="error",
    classes=("C10", "D13"),
    summary="only some ranks wrap the model or create a group",
    check=check,
)
