"""The seed of a DistributedSampler differs between ranks, so their shares overlap.

**Why it breaks.** All ranks must draw the same permutation and take every N-th sample of it. With its own seed each
rank takes its share of another permutation: some samples are seen by several ranks, others (with four ranks about a
third) by none, in each epoch. Nothing fails.

Bad:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.arange(6400.0))
sampler = DistributedSampler(dataset, seed=42 + dist.get_rank())
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.arange(6400.0))
sampler = DistributedSampler(dataset, seed=42)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
dist.destroy_process_group()
```

**When it says nothing.** Seeds that rank 0 has broadcast, seeds from the command line, and ``torch.manual_seed(seed +
rank)``, which the sampler does not use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.library.names import SAMPLER
from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import SAMPLER_AT
from rankwise.lint.topics.in_ranks import is_in_ranks
from rankwise.lint.topics.job_view import is_spawned, once, places, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script
    from rankwise.lint.topics.job_view import Place

_OWN = frozenset({"time", "own", "host", "random"})


def check(script: Script) -> Iterator[Finding]:
    """Seeds and epochs of samplers that differ between ranks."""
    for place in once(places(script, SAMPLER, f"{SAMPLER}.set_epoch")):
        call = place.last
        is_made = call.name == SAMPLER
        value = call.arg(SAMPLER_AT["seed"], "seed") if is_made else call.arg(0, "epoch")
        node = call.arg_node(SAMPLER_AT["seed"], "seed") if is_made else call.arg_node(0, "epoch")
        if value is None or not place.is_made_by_all or call.guards or not _is_own(script, place, value):
            continue
        word = "seed" if is_made else "epoch"
        message = f"`{text_of(node)}` differs between ranks, so each takes its share of another order: shares overlap, and samples are missed"
        yield script.finding(RULE, node or call.node, message, f"use the same {word} on all ranks")


def _is_own(script: Script, place: Place, value: Value) -> bool:
    if value.origin & {"rank", "local_rank", "node_rank"}:
        return bool(value.spread)
    if not value.origin & _OWN or not value.spread:
        return False
    # Where mp.spawn starts the ranks, a clock that was read before is the same for all of them.
    drawn = [
        call
        for history in place.entry.histories
        for call in history.calls
        if call.result.origin & value.origin & _OWN
    ]
    return not is_spawned(place.last) or any(is_spawned(call) and is_in_ranks(script, place.entry, call) and call.index < place.last.index
                                             and call.name != SAMPLER for call in drawn)  # fmt: skip


RULE: Rule[Script] = Rule(
    id="RW507",
    name="sampler-seed-differs",
    severity="error",
    classes=("X4",),
    summary="the seed or the epoch of a DistributedSampler differs between ranks",
    check=check,
)
