"""There are too few samples: some or all ranks get no batch.

**Why it breaks.** With ``drop_last=True`` a rank whose share is smaller than the batch size makes no step at all:
training ends at once, without an error. With shares cut by hand, ranks beyond the last sample get nothing, and the
others wait for them in the first backward pass.

Bad:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.zeros(12, 4))
sampler = DistributedSampler(dataset, drop_last=True)
loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.zeros(12, 4))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=2, sampler=sampler)
dist.destroy_process_group()
```

**When it says nothing.** The length of the data set is not a literal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.library.names import LOADER, SAMPLER
from rankwise.lint.model.values import Items, Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import AT, SAMPLER_AT, given, here, passes, sampler_of, shown
from rankwise.lint.topics.job_view import is_distributed, once, places
from rankwise.lint.topics.lengths import length_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script

#: Fewer samples than the ranks of one ordinary node.
_FEW = 8


def check(script: Script) -> Iterator[Finding]:
    """Loaders and samplers over data sets that are known to be small."""
    for place in once(places(script, LOADER)):
        loader = place.last.result.thing
        if is_distributed(place.entry) and isinstance(loader, Object):
            yield from _loader(script, place.last, loader)
    for place in once(places(script, SAMPLER)):
        yield from _sampler(script, place.last)
    yield from _cut_by_hand(script)


def _loader(script: Script, call: Call, loader: Object) -> Iterator[Finding]:
    sampler, drop, size = (
        sampler_of(loader),
        call.arg(AT["drop_last"], "drop_last"),
        given(call, "batch_size"),
    )
    if sampler is None or sampler.call is None or drop is None or drop.const is not True or size is None:
        return
    length = length_of(sampler.call.arg(0, "dataset"))
    if length is None or not isinstance(size.const, int) or -(-length // 2) >= size.const:
        return
    share = -(-length // 2)
    message = f"no rank gets a batch: {length} samples on two ranks are {share} each, and drop_last=True drops batches smaller than {size.const}"
    yield script.finding(
        RULE,
        call.node,
        message,
        f"make batch_size at most {max(share, 1)} (less on more ranks), or remove drop_last=True",
    )


def _sampler(script: Script, call: Call) -> Iterator[Finding]:
    length, drop = length_of(call.arg(0, "dataset")), call.arg(SAMPLER_AT["drop_last"], "drop_last")
    if length is not None and 0 < length < _FEW and drop is not None and drop.const is True:
        message = f"all {length} samples are dropped on more than {length} ranks: with drop_last=True each rank then gets none"
        yield script.finding(
            RULE, call.node, message, "remove drop_last=True from the sampler, or use fewer ranks"
        )


def _cut_by_hand(script: Script) -> Iterator[Finding]:
    seen: set[int] = set()
    for one in passes(script):
        call = one.loader.call
        subset = given(call, "dataset") if call is not None else None
        if call is None or subset is None or not one.syncs or id(call.node) in seen:
            continue
        length = _strided(subset)
        node = here(script, call)
        if length is not None and node is not None:
            seen.add(id(call.node))
            message = f"ranks from {length} up get none of {length} samples and make no step; the others wait for them in `{shown(one)}`'s first backward pass"
            yield script.finding(
                RULE,
                node,
                message,
                "use a DistributedSampler, which gives all ranks the same number of samples",
            )


def _strided(subset: Value) -> int | None:
    """The length of `range(rank, length, world_size)` behind a Subset, where it is known and small."""
    thing = subset.thing
    if not isinstance(thing, Object) or thing.call is None or thing.kind != "torch.utils.data.Subset":
        return None
    indices = thing.call.arg(1, "indices")
    order = indices.thing if indices is not None else None
    bounds = order.attrs["bounds"].thing if isinstance(order, Object) and order.kind == "range" else None
    if not isinstance(bounds, Items) or len(bounds.values) != 3 or "rank" not in bounds.values[0].origin:
        return None
    length = bounds.values[1].const if bounds.values[1].is_known else length_of(thing.call.arg(0, "dataset"))
    return length if isinstance(length, int) and length < _FEW else None


RULE: Rule[Script] = Rule(
    id="RW513",
    name="too-few-samples",
    severity="warning",
    classes=("X9",),
    summary="a data set is so small that ranks get no batch",
    check=check,
)
