"""Each worker of the loader yields this rank's whole share, because the stream never uses the worker id.

**Why it breaks.** A DataLoader with ``num_workers=4`` runs the ``__iter__`` of an ``IterableDataset`` in four
processes. If it splits by the rank only, all four yield the same samples: an epoch is four times as long, and has each
sample four times.

Bad:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset


class Numbers(IterableDataset):
    def __iter__(self):
        for number in range(dist.get_rank(), 6400, dist.get_world_size()):
            yield torch.tensor([float(number)])


dist.init_process_group("gloo")
total = torch.zeros(1)
for x in DataLoader(Numbers(), batch_size=32, num_workers=4):
    total += x.sum()
dist.all_reduce(total)
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Numbers(IterableDataset):
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        worker = get_worker_info()
        parts = self.world_size * worker.num_workers
        for number in range(self.rank * worker.num_workers + worker.id, 6400, parts):
            yield torch.tensor([float(number)])


dist.init_process_group("gloo")
total = torch.zeros(1)
for x in DataLoader(Numbers(dist.get_rank(), dist.get_world_size()), batch_size=32, num_workers=4):
    total += x.sum()
dist.all_reduce(total)
dist.destroy_process_group()
```

**When it says nothing.** No workers; a ``worker_init_fn``; a class that uses the worker id in any way; streams that
draw at random.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.library.names import LOADER
from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import given, here
from rankwise.lint.topics.job_view import is_distributed, once, places
from rankwise.lint.topics.shares import classes_in, draws_at_random, splits_by_rank, splits_by_worker
from rankwise.lint.topics.streams import is_stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Streams that several workers read from the start."""
    for place in once(places(script, LOADER)):
        call = place.last
        dataset, workers = given(call, "dataset"), given(call, "num_workers")
        if dataset is None or workers is None or not is_stream(dataset) or not is_distributed(place.entry):
            continue
        if (
            not isinstance(workers.const, int)
            or workers.const < 2
            or given(call, "worker_init_fn") is not None
        ):
            continue
        classes = list(classes_in(dataset))
        by_rank = any(splits_by_rank(cls) for cls in classes)
        if not by_rank or any(splits_by_worker(cls) or draws_at_random(cls) for cls in classes):
            continue
        name = dataset.thing.cls.node.name
        message = f"each of the {workers.const} workers yields this rank's whole share: `{name}` never uses the worker id"
        fix = f"in {name}.__iter__ also split by torch.utils.data.get_worker_info() (its id and num_workers)"
        yield script.finding(RULE, here(script, call) or call.node, message, fix)


RULE: Rule[Script] = Rule(
    id="RW511",
    name="stream-repeated-by-workers",
    severity="error",
    classes=("X7",),
    summary="each worker of a loader yields its rank's whole share",
    check=check,
)
