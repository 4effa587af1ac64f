"""The process group is never destroyed.

**Why it breaks.** NCCL warns at the end (``destroy_process_group() was not called before program exit``), and a rank
that leaves early closes connections that others still need: ``Connection reset by peer`` after a successful training.

Bad:

```python
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
```

Good:

```python
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
```

**When it says nothing.** The name occurs anywhere in the script (``atexit``, a ``finally``), and functions that are
parts of a larger program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import INIT, once, places

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Programs that create a group and never destroy one."""
    if (
        "destroy_process_group" in script.piece.code
        or "destroy" in script.piece.code
        or "cleanup" in script.piece.code
    ):
        return
    for place in once(places(script, INIT)):
        calls = [call for history in place.entry.histories for call in history.calls]
        texts = {call.module.text for call in calls}
        if place.entry.is_program and not any("destroy_process_group" in text for text in texts):
            message = (
                "the process group created here is never destroyed: ranks that end early cut off the others"
            )
            yield script.finding(
                RULE, place.last.node, message, "call dist.destroy_process_group() at the end"
            )
            return


RULE: Rule[Script] = Rule(
    id="RW216",
    name="group-not-destroyed",
    severity="hint",
    classes=("R6",),
    summary="the process group is never destroyed",
    check=check,
)
