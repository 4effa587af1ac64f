"""A rank swallows an exception and continues, having skipped collectives.

**Why it breaks.** The exception occurs on one rank: it skips the rest of the `try`, the others do not. From then on
their collectives belong to different steps: a hang, or sums over two batches. Out-of-memory handlers that `continue`
are the common case.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 1))
for step in range(100):
    try:
        loss = model(torch.ones(8, 2)).sum()
        loss.backward()
    except RuntimeError as error:
        print("skipped", error)
        continue
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 1))
for step in range(100):
    loss = model(torch.ones(8, 2)).sum()
    loss.backward()
dist.destroy_process_group()
```

**When it says nothing.** The handler raises or ends the program; the `try` has no collectives; exceptions that all
ranks get alike (`ImportError`, `KeyboardInterrupt`). Outside a loop it is a warning.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.paths.found import all_local_paths
from rankwise.lint.paths.local import may_fail_alone
from rankwise.lint.paths.words import called, place
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Handlers after which a rank continues with fewer ops than the others."""
    for path in all_local_paths(script):
        if path.kind != "swallow":
            continue
        handler = _handler(path.item.node)
        yield script.finding(
            RULE,
            handler,
            f"a rank that reaches this `except` skips {called(path.op)}, which the others call: from then on they wait"
            " for each other, or mix up steps",
            "let the exception end the rank, or let all ranks agree on skipping (all_reduce a flag) before the collective",
            severity="error"
            # A distributed checkpoint reports an error on one rank to all ranks.
            if path.in_loop
            and path.in_program
            and path.op.is_sure
            and path.op.family != "save"
            and may_fail_alone(path.item.node)
            else "warning",
            failure_class="D15" if path.exit is not None and path.exit.kind == "continue" else "R1",
            also=[place(f"{called(path.op)} is here", path.op.call.node, path.op.call.module)],
        )


def _handler(node: ast.AST) -> ast.AST:
    """The `except` itself: its type if it has one, for a short mark; or `suppress(...)`."""
    return node.handlers[0].type or node.handlers[0] if isinstance(node, ast.Try) else node


RULE: Rule[Script] = Rule(
    id="RW114",
    name="exception-swallowed",
    severity="error",
    classes=("R1", "D15", "C24"),
    summary="a rank swallows an exception and continues, having skipped collectives",
    check=check,
)
