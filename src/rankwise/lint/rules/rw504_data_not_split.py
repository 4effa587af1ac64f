"""The training data is not split: each rank reads all of it.

**Why it breaks.** Without a ``DistributedSampler`` each rank has its own loader over the whole data set. N ranks do the
work of one N times, an epoch takes as long as on one GPU, and with equal seeds the ranks even see the same batches:
their averaged gradient is that of one rank. Nothing fails.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

dist.init_process_group("gloo")
dataset = ImageFolder("/data/train")
loader = DataLoader(dataset, batch_size=32, shuffle=True)
model = DDP(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(10):
    for x, y in loader:
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
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder

dist.init_process_group("gloo")
dataset = ImageFolder("/data/train")
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
model = DDP(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
dist.destroy_process_group()
```

**When it says nothing.** Anything that goes into the data set, the loader or the loop depends on the rank (``Subset``,
slices, ``shard``, a seed with the rank in it); a framework prepares the loader; samples are generated; no training
follows; the model is split too (tensor or pipeline parallel). If the data set is created elsewhere it is a warning.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.library.names import ACCELERATOR, FABRIC, SAMPLER
from rankwise.lint.model.values import Instance, Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import (
    AT,
    ITERABLE,
    given,
    here,
    is_given_away,
    is_prepared,
    passes,
    shown,
)
from rankwise.lint.topics.job_view import is_distributed, text_of
from rankwise.lint.topics.shares import (
    is_known_data,
    is_shared_out,
    loop_shares,
    makes_its_samples,
    spreads_otherwise,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script
    from rankwise.lint.topics.data_flow import Pass

_CHOICE = re.compile(r"dist|ddp|world|rank|gpu|parallel|launcher|multi|slurm|sampler|device", re.IGNORECASE)


def check(script: Script) -> Iterator[Finding]:
    """Loaders of whole data sets that ranks train on together."""
    seen: set[int] = set()
    if spreads_otherwise(script.all_calls):
        return
    for one in passes(script):
        call = one.loader.call
        if call is None or id(call.node) in seen or not _is_whole_for_all(script, one):
            continue
        seen.add(id(call.node))
        node = here(script, call)
        node = one.over if node is None and one.module is script.module else node
        finding = _finding(script, one, call, node) if node is not None else None
        if finding is not None:
            yield finding


def _is_whole_for_all(script: Script, one: Pass) -> bool:
    call = one.loader.call
    if call is None or is_prepared(one.loader) or is_shared_out(one.loader) or one.guards or call.guards:
        return False
    if any(_CHOICE.search(text_of(test)) for test, _value, _arm in call.tests) or not is_distributed(
        one.entry
    ):
        return False
    if any(
        other.name.endswith((".prepare", ".setup_dataloaders", ".prepare_data_loader")) and other.has_star
        for other in script.all_calls
    ):
        return False
    sampler = call.arg_node(AT["sampler"], "sampler")
    if isinstance(sampler, ast.IfExp) and isinstance(sampler.orelse, ast.Constant):
        return False  # `sampler=sampler if ... else None`: which, only a run can tell
    return not loop_shares(one) and not is_given_away(one)


def _finding(script: Script, one: Pass, call: Call, node: object) -> Finding | None:
    dataset = given(call, "dataset")
    if dataset is None or makes_its_samples(dataset) or _is_stream(dataset):
        return None
    shuffle = call.arg(AT["shuffle"], "shuffle")
    shuffles = shuffle is not None and shuffle.const is True
    if not one.syncs and not (shuffles and one.entry.is_program and is_known_data(dataset)):
        return None
    if not is_known_data(dataset) and not shuffles:
        return None
    severity = "error" if one.syncs and is_known_data(dataset) else "warning"
    what = text_of(call.arg_node(0, "dataset")) or "the data set"
    message, fix = _words(one, call, what)
    return script.finding(RULE, node, message, fix, severity=severity)  # type: ignore[arg-type]


def _words(one: Pass, call: Call, what: str) -> tuple[str, str]:
    frame = next((other for other in one.history.calls if other.name in {ACCELERATOR, FABRIC}), None)
    over = shown(one)
    if frame is not None and not one.history.calls[0].name.startswith("torch.distributed"):
        how = "accelerator.prepare" if frame.name == ACCELERATOR else "fabric.setup_dataloaders"
        return (
            f"each rank reads all of `{what}`: its loader is not passed to {how}",
            f"pass the loader through {how} before the loop over `{over}`",
        )
    sampler = next(
        (
            other
            for other in one.history.calls
            if other.name == SAMPLER and _same(other.arg(0, "dataset"), given(call, "dataset"))
        ),
        None,
    )
    if sampler is not None:
        message = f"each rank reads all of `{what}`: a DistributedSampler is created for it (line {getattr(sampler.node, 'lineno', 0)}), but this loader does not get it"
        return message, "pass it: DataLoader(..., sampler=sampler), without shuffle=True"
    other = call.arg_node(AT["sampler"], "sampler")
    instead = f"`{text_of(other)}`" if other is not None else "shuffle"
    return (
        f"each rank reads all of `{what}`: nothing splits it between the ranks",
        f"pass sampler=DistributedSampler({what}) instead of {instead}, and call its set_epoch(epoch) in each epoch",
    )


def _same(one: Value | None, other: Value | None) -> bool:
    return one is not None and other is not None and one.thing is not None and one.thing is other.thing


def _is_stream(dataset: Value) -> bool:
    thing = dataset.thing
    if isinstance(thing, Instance):
        bases = thing.cls.library_bases()
        return ITERABLE in bases or thing.cls.find("__getitem__") is None
    return isinstance(thing, Object) and (
        "Iterable" in thing.kind or thing.kind.startswith(("webdataset", "torchdata", "streaming", "litdata"))
    )


RULE: Rule[Script] = Rule(
    id="RW504",
    name="data-not-split",
    severity="error",
    classes=("X3",),
    summary="each rank trains on the whole data set, because nothing splits it",
    check=check,
)
