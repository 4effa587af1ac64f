"""A rank skips a step or leaves the loop because of a value that only it has.

**Why it breaks.** `if torch.isnan(loss): continue` before the backward pass, or `break` on this rank's loss, leaves the
others in a collective that this rank never calls. They hang one step later, or sum numbers of different steps.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
data = list(torch.randn(64, 2))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DDP(torch.nn.Linear(2, 1))
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        loss = model(batch).mean()
        if torch.isnan(loss):
            continue
        loss.backward()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
data = list(torch.randn(64, 2))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DDP(torch.nn.Linear(2, 1))
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        loss = model(batch).mean()
        is_bad = torch.isnan(loss).float()
        dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
        if is_bad.item():
            continue
        loss.backward()
dist.destroy_process_group()
```

**When it says nothing.** The flag was reduced or broadcast first; the branch makes the same collectives (`(loss *
0).backward(); continue`); an exception ends the program, which the launcher sees.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.model.history import Fork
from rankwise.lint.paths.found import all_local_paths
from rankwise.lint.paths.local import how_bad
from rankwise.lint.paths.reasons import is_perhaps_shared, test_of, why
from rankwise.lint.paths.words import called, place, written
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.paths.local import LocalPath
    from rankwise.lint.script import Script

_LONGEST = 50
_CLASSES = {"break": "D16", "continue": "D15", "return": "C27"}
_DOES = {"break": "ends the loop", "continue": "skips the step", "return": "returns"}


def check(script: Script) -> Iterator[Finding]:
    """Exits that depend on rank-local values and skip ops that the other ranks make."""
    for path in all_local_paths(script):
        if (
            path.kind != "leave"
            or path.exit is None
            or not isinstance(path.item, Fork)
            or path.op.family == "group"
        ):
            continue
        test = test_of(path.item.node)
        kind = path.exit.kind
        yield script.finding(
            RULE,
            test,
            f"a rank {_DOES[kind]} when `{written(test)}`, {why(path.item.value)}: the others wait for it in {called(path.op)}",
            _fix(test),
            severity="warning" if is_perhaps_shared(path.item.value) else how_bad(path),
            failure_class=_class(path, kind),
            also=[place(f"{called(path.op)} is here", path.op.call.node, path.op.call.module)],
        )


def _fix(test: ast.AST) -> str:
    text = written(test)
    flag = f"`float({text})`" if isinstance(test, ast.expr) and len(text) < _LONGEST else "the flag"
    return f"reduce {flag} over all ranks first (all_reduce with MAX), and let every rank act on the result"


def _class(path: LocalPath, kind: str) -> str:
    if "signal" in path.item.value.origin:
        return "K9"
    if kind != "return" or not isinstance(path.item, Fork):
        return _CLASSES[kind]
    if path.op.family == "barrier" and path.op.call.guards:
        return "C2"
    return "C26" if _is_of_host(path.item) else "C27"


def _is_of_host(fork: Fork) -> bool:
    """Whether the test is on the host or the clock, not on the data."""
    return not fork.value.origin.isdisjoint({"exists", "files", "time", "queue", "memory"})


RULE: Rule[Script] = Rule(
    id="RW112",
    name="left-on-local-test",
    severity="error",
    classes=("D15", "D16", "C27", "X10", "C26", "C2", "K9"),
    summary="a rank skips a step or leaves the loop because of a value that only it has",
    check=check,
)
