"""A collective depends on a value that may differ between ranks.

**Why it breaks.** A test of a loss, a clock, a queue, a file or an exception may be true on one rank only. That rank
blocks in the collective; the others skip it.

Bad:

```python
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
start = time.time()
x = torch.ones(1)
for step in range(100):
    if time.time() - start > 60:
        dist.all_reduce(x)
```

Good:

```python
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
start = time.time()
x = torch.ones(1)
for step in range(100):
    is_late = torch.tensor(time.time() - start > 60).int()
    dist.broadcast(is_late, src=0)
    if is_late.item():
        dist.all_reduce(x)
dist.destroy_process_group()
```

**When it says nothing.** The value was reduced, gathered or broadcast first; both branches call the same collectives;
the test is on a file, which ranks mostly share (RW609 is about those), or on an exception while things are set up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.model.history import Fork, Loop
from rankwise.lint.model.values import Spread
from rankwise.lint.paths.found import all_local_paths
from rankwise.lint.paths.local import how_bad
from rankwise.lint.paths.reasons import is_perhaps_shared, test_of, why
from rankwise.lint.paths.words import called, place, written
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Branches and `while` loops on rank-local values with an op in one branch only."""
    for path in all_local_paths(script):
        item = path.item
        if path.op.family == "group" or is_perhaps_shared(item.value):
            continue
        is_loop = path.kind == "loop" and isinstance(item, Loop) and item.value.spread is Spread.LOCAL
        if not is_loop and not (path.kind == "arm" and isinstance(item, Fork)):
            continue
        test = test_of(item.node)
        yield script.finding(
            RULE,
            test,
            f"whether {called(path.op)} is {'made again' if is_loop else 'made'} depends on `{written(test)}`,"
            f" {why(item.value)}: ranks that differ wait for each other",
            "let all ranks agree first: all_reduce the flag, or decide on one rank and broadcast it",
            severity=how_bad(path),
            failure_class="D14" if is_loop and "files" in item.value.origin else "C26",
            also=[place(f"{called(path.op)} is here", path.op.call.node, path.op.call.module)],
        )


RULE: Rule[Script] = Rule(
    id="RW111",
    name="collective-under-local-test",
    severity="error",
    classes=("C26", "D14", "C27"),
    summary="a collective depends on a value that may differ between ranks",
    check=check,
)
