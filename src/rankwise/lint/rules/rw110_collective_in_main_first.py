"""A collective inside `main_process_first()`.

**Why it breaks.** `with accelerator.main_process_first():` lets the main process run the block while all others wait at
a barrier before it. Only the main process makes a collective in the block: it waits for the others, and they wait for
it.

Bad:

```python
import torch
from accelerate import Accelerator

accelerator = Accelerator()
with accelerator.main_process_first():
    data = torch.randn(8, 4)
    mean = accelerator.reduce(data.mean(0), reduction="mean")
```

Good:

```python
import torch
from accelerate import Accelerator

accelerator = Accelerator()
with accelerator.main_process_first():
    data = torch.randn(8, 4)
mean = accelerator.reduce(data.mean(0), reduction="mean")
```

**When it says nothing.** The block has no collectives: downloads, tokenizing, caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.paths.found import all_ops
from rankwise.lint.paths.words import anchor, called
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_FIRST = frozenset({"main_process_first", "local_main_process_first", "rank_zero_first"})


def check(script: Script) -> Iterator[Finding]:
    """Ops whose open contexts let one process go first."""
    for op in all_ops(script):
        if not _FIRST.isdisjoint(op.call.contexts):
            at = anchor(op, None, script)
            if at is not None:
                yield script.finding(
                    RULE,
                    op.call.node if op.call.module is script.module else at[0],
                    f"{called(op)} is in a block that the main process runs first: it waits for the others, and they wait for it",
                    f"move {called(op)} after the block",
                )


RULE: Rule[Script] = Rule(
    id="RW110",
    name="collective-in-main-first",
    severity="error",
    classes=("C1",),
    summary="a collective inside main_process_first()",
    check=check,
)
