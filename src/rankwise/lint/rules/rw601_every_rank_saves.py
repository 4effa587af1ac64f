"""Every rank writes the same file at the same time.

**Why it breaks.** Their writes interleave: the file is sometimes damaged (``invalid header or archive is corrupted``,
``storage has wrong size``), and this shows only when a run is resumed, days later.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
```

**When it says nothing.** A test on the rank encloses it, the path contains the rank, and ``accelerator.save``,
``torch.distributed.checkpoint.save`` and others that handle it themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.in_ranks import is_in_ranks
from rankwise.lint.topics.job_view import is_distributed, node_in, starts_group, text_of
from rankwise.lint.topics.saved_files import is_chosen, writes
from rankwise.lint.topics.tensor_text import is_in
from rankwise.lint.topics.turns import takes_turns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Files that all ranks write."""
    for use in writes(script, anywhere=True):
        call, entry, at = use.call, use.place.entry, node_in(script, use.call)
        if (
            at is None
            or not use.place.is_made_by_all
            or not is_distributed(entry)
            or is_chosen(call)
            or takes_turns(use.place)
            or not use.is_shared()
        ):
            continue
        if {"save_function", "is_main_process"} & call.kwargs.keys() or not is_in_ranks(script, entry, call):
            continue
        is_sure = (
            entry.is_program
            and all(is_in(script.tree, test) for test, _, _ in call.tests)
            and any(starts_group(one) for one in entry.histories[0].calls)
            and call.name != "builtins.open"
        )
        path = text_of(use.node)
        yield script.finding(
            RULE,
            at,
            f"every rank writes `{path}` at the same time: the file is damaged if their writes interleave",
            "let one rank write it: `if dist.get_rank() == 0:`, or include the rank in the path",
            severity="error" if is_sure else "warning",
        )


RULE: Rule[Script] = Rule(
    id="RW601",
    name="every-rank-saves",
    severity="error",
    classes=("K1",),
    summary="every rank writes the same file",
    check=check,
)
