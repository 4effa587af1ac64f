"""Each rank decides for itself whether and from which file to resume.

**Why it breaks.** Nodes see different disks, or see a new file at different times. Then some ranks resume at epoch 7
and others begin at 0: the replicas silently diverge, or the ranks wait for each other at the end.

Bad:

```python
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
if os.path.exists("last.pt"):
    model.load_state_dict(torch.load("last.pt", map_location="cpu"))
dist.barrier()
dist.destroy_process_group()
```

Good:

```python
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
found = [os.path.exists("last.pt")]
dist.broadcast_object_list(found, src=0)
if found[0]:
    model.load_state_dict(torch.load("last.pt", map_location="cpu"))
dist.destroy_process_group()
```

**When it says nothing.** Rank 0 decides and broadcasts the decision, or the file is given on the command line.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import is_distributed, text_of
from rankwise.lint.topics.saved_files import is_model_file, reads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_OWN = frozenset({"exists", "files"})


def check(script: Script) -> Iterator[Finding]:
    """Loads under a test of, or from a path found on, this rank's own disk."""
    for use in reads(script):
        call = use.call
        if call.name != "torch.load" or not is_distributed(use.place.entry) or len(use.place.ranks) == 1:
            continue
        if not is_model_file(script, use):
            continue
        test = next(
            (
                node
                for node, value, _ in call.tests
                if value.spread and value.origin & _OWN and not _is_asked_for(node)
            ),
            None,
        )
        if test is not None:
            message = f"each rank tests its own disk (`{text_of(test)}`) to decide whether to resume: ranks with different results diverge"
        elif use.path.spread and use.path.origin & _OWN:
            message = f"each rank looks for `{text_of(use.node)}` on its own disk: ranks may resume from different files"
        else:
            continue
        fix = "let rank 0 decide, and call dist.broadcast_object_list on all ranks before they load"
        yield script.finding(RULE, test if test is not None else call.node, message, fix)


def _is_asked_for(test: ast.AST) -> bool:
    """Whether the environment or an option also decides."""
    return isinstance(test, ast.BoolOp) and any(
        word in ast.unparse(test) for word in ("environ", "getenv", "args.resume")
    )


RULE: Rule[Script] = Rule(
    id="RW609",
    name="resume-decided-by-each-rank",
    severity="warning",
    classes=("K8",),
    summary="each rank decides for itself whether to resume",
    check=check,
)
