"""Rank 0 prepares a data set while the others wait at a barrier, for longer than its timeout.

**Why it breaks.** The waiting ranks are inside a collective, and its timeout runs: 10 minutes with NCCL, 30 with Gloo.
A ``map`` over a large data set takes longer: ``Timeout waiting for key``, ``Watchdog caught collective operation
timeout``, and the job fails although nothing is wrong.

Bad:

```python
import torch.distributed as dist
from datasets import load_dataset, load_from_disk

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    texts = load_dataset("text", data_files="corpus.txt", split="train")
    texts.map(lambda row: {"n": len(row["text"])}).save_to_disk("/data/corpus")
dist.barrier()
texts = load_from_disk("/data/corpus")
dist.destroy_process_group()
```

Good:

```python
from datetime import timedelta

import torch.distributed as dist
from datasets import load_dataset, load_from_disk

dist.init_process_group("gloo", timeout=timedelta(hours=3))
if dist.get_rank() == 0:
    texts = load_dataset("text", data_files="corpus.txt", split="train")
    texts.map(lambda row: {"n": len(row["text"])}).save_to_disk("/data/corpus")
dist.barrier()
texts = load_from_disk("/data/corpus")
dist.destroy_process_group()
```

**When it says nothing.** The group is created with a timeout, the work is done before the group is created, or the work
is not ``map`` or ``filter`` over a Hugging Face data set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import INIT, once, places, starts_group, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script
    from rankwise.lint.topics.job_view import Place

_LONG = frozenset({"datasets.Dataset.map", "datasets.Dataset.filter"})


def check(script: Script) -> Iterator[Finding]:
    """Work of one rank that the others wait for under the default timeout."""
    told: set[int] = set()
    for place in once(places(script, *_LONG)):
        if id(place.entry) not in told and _others_wait(place) and _has_default_timeout(place):
            told.add(id(place.entry))
            message = f"the other ranks wait at a barrier while one runs `{text_of(place.last.node)}`; if that takes longer than the group's timeout, they fail"
            yield script.finding(RULE, place.last.node, message, _FIX)


def _others_wait(place: Place) -> bool:
    call = place.calls[0]
    if any(context.endswith("process_first") for context in call.contexts):
        return True
    if not call.guards or call.rank != 0:
        return False
    return any(
        other.index > call.index
        and other.name.endswith(("barrier", "wait_for_everyone"))
        and not other.guards
        for other in place.entry.histories[0].calls
    )


def _has_default_timeout(place: Place) -> bool:
    call = place.calls[0]
    makers = [
        other for other in place.entry.histories[0].calls if starts_group(other) and other.index < call.index
    ]
    if not makers:
        return False
    return all("timeout" not in maker.kwargs and "kwargs_handlers" not in maker.kwargs and not maker.has_star
               and (maker.name != INIT or len(maker.args) < 3) for maker in makers)  # fmt: skip


_FIX = "do it before the process group is created, or allow more time: timeout=timedelta(hours=3)"

RULE: Rule[Script] = Rule(
    id="RW518",
    name="others-wait-for-preprocessing",
    severity="hint",
    classes=("X14",),
    summary="the other ranks wait at a barrier, under the default timeout, while one prepares the data",
    check=check,
)
