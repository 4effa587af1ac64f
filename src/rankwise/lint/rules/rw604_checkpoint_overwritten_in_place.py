"""A checkpoint is overwritten in place, in the file that a resume will read.

**Why it breaks.** A job that is stopped during ``torch.save`` leaves an incomplete file, and the complete one before it
is gone: the resume fails with ``failed finding central directory``, and no earlier checkpoint is left.

Bad:

```python
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
state = torch.load("last.pt", map_location="cpu")
model.load_state_dict(state)
for epoch in range(10):
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "last.pt")
dist.destroy_process_group()
```

Good:

```python
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
state = torch.load("last.pt", map_location="cpu")
model.load_state_dict(state)
for epoch in range(10):
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "last.pt.tmp")
        os.replace("last.pt.tmp", "last.pt")
dist.destroy_process_group()
```

**When it says nothing.** The file is written under another name and moved into place, the name contains the epoch or
step, or the script never reads the file back.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import called_names, line_of, text_of
from rankwise.lint.topics.saved_files import reads, writes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script
    from rankwise.lint.topics.saved_files import FileUse

_MOVES = frozenset({"replace", "rename", "renames", "move"})


def check(script: Script) -> Iterator[Finding]:
    """Saves in loops to a file from which the script resumes."""
    if script.piece.code.count(".load(") == 0:
        return
    read = list(reads(script))
    for use in writes(script):
        if (
            use.call.name != "torch.save"
            or not use.call.loops
            or use.changes_with_loop()
            or _is_moved(script, use)
        ):
            continue
        resumed = next((one for one in read if one.same_file(use) and _is_resume(one, use)), None)
        if resumed is not None:
            path, line = text_of(use.node), line_of(resumed.call)
            yield script.finding(
                RULE,
                use.call.node,
                f"`{path}` is overwritten in place, and line {line} resumes from it: a crash during the write leaves neither the old nor the new file",
                f"write to {path} + '.tmp' first, then os.replace(...) it",
            )


def _is_resume(read: FileUse, write: FileUse) -> bool:
    """Whether the read comes before the loop: after it, it is the best model, not a resume."""
    if read.place.entry is not write.place.entry:
        return True
    return read.place.calls[0].index < write.place.calls[0].index


def _is_moved(script: Script, use: FileUse) -> bool:
    function = getattr(use.call.function, "node", None) or script.tree
    if not _MOVES & called_names(function):
        return False
    return any(
        isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") in _MOVES
        and "os" in ast.unparse(node.func) + "os"
        for node in ast.walk(function)
    )


RULE: Rule[Script] = Rule(
    id="RW604",
    name="checkpoint-overwritten-in-place",
    severity="warning",
    classes=("K2",),
    summary="a checkpoint is overwritten in place, in the file that a resume reads",
    check=check,
)
