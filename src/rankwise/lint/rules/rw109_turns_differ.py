"""Ranks run different numbers of iterations of a loop with collectives.

**Why it breaks.** Each iteration makes a collective (a backward pass is one). The rank with more iterations waits for
ranks that have left the loop, or its gradients pair with their next collective.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 1))
for step in range(10 + dist.get_rank()):
    model(torch.ones(1, 2)).sum().backward()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 1))
for step in range(10):
    model(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
```

**When it says nothing.** Inside `join()`; a `DistributedSampler`, which gives all ranks equally many samples. A share
cut by hand (`files[rank::world_size]`) is a warning: it is even only if the number is divisible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.model.history import Loop
from rankwise.lint.model.values import Spread
from rankwise.lint.paths.found import all_divergences, all_local_paths
from rankwise.lint.paths.tokens import ops_of
from rankwise.lint.paths.words import called, place, written
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_FIX = "give every rank the same number of iterations: cut to the shortest, pad, agree on the number by all_reduce(MIN), or use DDP's join()"


def check(script: Script) -> Iterator[Finding]:
    """Loops whose number of iterations is known to differ, or is a share cut by hand."""
    told: set[int] = set()
    for one in all_divergences(script):
        loop = one.item
        if not isinstance(loop, Loop) or loop.value.spread is Spread.EQUAL:
            continue  # as many turns, and on some ranks without what the others do in them: that is told where it is
        if one.guard is None and loop.module is script.module:
            told.add(id(loop.node))
            yield script.finding(
                RULE,
                _head(loop.node),
                f"ranks run different numbers of iterations over `{written(_over(loop.node))}`, with collectives in each iteration",
                _FIX,
                failure_class=_class(loop),
            )
    for path in all_local_paths(script):
        share = path.item
        if (
            path.kind == "loop"
            and isinstance(share, Loop)
            and share.value.spread is Spread.RANK
            and id(share.node) not in told
        ):
            yield script.finding(
                RULE,
                _head(share.node),
                f"the share of this rank, `{written(_over(share.node))}`, may be longer than another's, and each iteration calls"
                f" {called(path.op)}",
                _FIX,
                severity="warning",
                failure_class=_class(share),
                also=[place(f"{called(path.op)} is here", path.op.call.node, path.op.call.module)],
            )


def _class(loop: Loop) -> str:
    """Uneven batches if it trains, otherwise a collective that some ranks skip."""
    return "D14" if any(op.family in {"backward", "forward"} for op in ops_of(loop.items)) else "C1"


def _over(node: ast.AST) -> ast.AST | None:
    generators = getattr(node, "generators", None)  # of a comprehension
    return generators[0].iter if generators else getattr(node, "iter", getattr(node, "test", None))


def _head(node: ast.AST) -> ast.AST:
    return _over(node) or node


RULE: Rule[Script] = Rule(
    id="RW109",
    name="turns-differ",
    severity="error",
    classes=("D14", "C1", "C27"),
    summary="ranks run different numbers of iterations of a loop with collectives",
    check=check,
)
