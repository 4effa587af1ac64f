"""A stream (IterableDataset) yields the same samples on each rank, because it never uses the rank.

**Why it breaks.** A sampler cannot split what has no indices: each rank runs ``__iter__`` from the start, and all ranks
train on the same samples. In the same way ``load_dataset(..., streaming=True)`` streams everything to each rank.
Nothing fails; N ranks do the work of one.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Numbers(IterableDataset):
    def __iter__(self):
        for number in range(6400):
            yield torch.tensor([float(number)])


dist.init_process_group("gloo")
loader = DataLoader(Numbers(), batch_size=32)
model = DDP(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for x in loader:
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Numbers(IterableDataset):
    def __iter__(self):
        for number in range(dist.get_rank(), 6400, dist.get_world_size()):
            yield torch.tensor([float(number)])


dist.init_process_group("gloo")
loader = DataLoader(Numbers(), batch_size=32)
model = DDP(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for x in loader:
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
dist.destroy_process_group()
```

**When it says nothing.** The class, or what it is created from, uses the rank or a shard; after
``split_dataset_by_node``; streams that draw at random or read from a queue; Accelerate prepares the loader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.library.names import ACCELERATOR
from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import given, here, is_given_away, is_prepared, passes, shown
from rankwise.lint.topics.in_ranks import differs_deeply
from rankwise.lint.topics.job_view import is_distributed, text_of
from rankwise.lint.topics.shares import (
    classes_in,
    draws_at_random,
    loop_shares,
    splits_by_rank,
    splits_by_worker,
    spreads_otherwise,
)
from rankwise.lint.topics.streams import hf_stream, is_stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script
    from rankwise.lint.topics.data_flow import Pass


def check(script: Script) -> Iterator[Finding]:
    """Streams that all ranks read from the start."""
    seen: set[int] = set()
    if spreads_otherwise(script.all_calls):
        return
    for one in passes(script):
        call = one.loader.call
        if call is None or id(call.node) in seen or is_prepared(one.loader) or one.guards or call.guards:
            continue
        if not is_distributed(one.entry) or any(
            other.name.startswith(ACCELERATOR) for other in one.history.calls
        ):
            continue
        dataset = given(call, "dataset")
        if dataset is None or loop_shares(one) or is_given_away(one):
            continue
        module = getattr(getattr(dataset.thing, "cls", None), "module", None)
        if module is not None and module is not script.module and "world_size" in module.text:
            # The data sets of another file, one of which knows the ranks.
            continue
        what = _same_everywhere(dataset)
        node = here(script, call) or (one.over if one.module is script.module else None)
        if what is not None and node is not None:
            seen.add(id(call.node))
            yield _finding(script, one, node, what)


def _finding(script: Script, one: Pass, node: object, what: tuple[str, str]) -> Finding:
    severity = "error" if one.syncs else "warning"
    message = f"each rank gets all samples of {what[0]} from the loop over `{shown(one)}`: nothing in it uses the rank"
    return script.finding(RULE, node, message, what[1], severity=severity)  # type: ignore[arg-type]


def _same_everywhere(dataset: Value) -> tuple[str, str] | None:
    if differs_deeply(dataset):
        return None
    classes = list(classes_in(dataset))
    if is_stream(dataset):
        if any(splits_by_rank(cls) or draws_at_random(cls) for cls in classes):
            return None
        name = dataset.thing.cls.node.name
        by_worker = any(splits_by_worker(cls) for cls in classes)
        also = " and its world size, and by the worker id" if by_worker else " and its world size"
        return (
            f"`{name}`",
            f"in {name}.__iter__ take every world_size-th sample from the rank on, by dist.get_rank(){also}",
        )
    made = hf_stream(dataset)
    if made is not None:
        return (
            f"`{text_of(made.node)}`",
            "split it: split_dataset_by_node(dataset, rank=dist.get_rank(), world_size=dist.get_world_size())",
        )
    return None


RULE: Rule[Script] = Rule(
    id="RW510",
    name="stream-not-split",
    severity="error",
    classes=("X7",),
    summary="an IterableDataset yields the same samples on each rank",
    check=check,
)
