"""The evaluation counts some samples twice: the sampler repeats samples until all ranks have the same number.

**Why it breaks.** ``DistributedSampler`` pads (``drop_last=False``): of 1001 samples on 8 ranks 7 are seen twice, and
their results are summed with the others. Accelerate pads its last batch too, and ``gather`` keeps the padding. The
score is slightly wrong, and changes with the number of ranks.

Bad:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.arange(1001.0))
loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset, shuffle=False))
counts = torch.zeros(2)
with torch.no_grad():
    for (x,) in loader:
        counts += torch.tensor([(x > 500).sum(), len(x)])
dist.all_reduce(counts)
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.arange(1001.0))
part = Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))
counts = torch.zeros(2)
with torch.no_grad():
    for (x,) in DataLoader(part, batch_size=32):
        counts += torch.tensor([(x > 500).sum(), len(x)])
dist.all_reduce(counts)
dist.destroy_process_group()
```

**When it says nothing.** ``drop_last=True`` (which drops samples instead), ``gather_for_metrics``, results gathered by
the samples' indices, a length known to be a multiple of 8, or nothing is reduced.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankwise.lint.library.names import ACCELERATOR, SAMPLER
from rankwise.lint.model.values import Items, Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import SAMPLER_AT, here, is_prepared, passes, sampler_of, shown
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.lengths import length_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.history import History
    from rankwise.lint.script import Script
    from rankwise.lint.topics.data_flow import Pass

#: `predictions[: len(loader.dataset) - seen]`: repeated samples are cut off by hand.
_CUT = re.compile(r"len\([\w.]*dataset\w*\)\s*-|remainder|\[\s*:\s*len\(")
_SUMS = frozenset(
    "torch.distributed." + name
    for name in ("all_reduce", "reduce", "all_gather", "gather", "all_gather_into_tensor")
)
_OBJECTS = frozenset({"torch.distributed.all_gather_object", "torch.distributed.gather_object"})
#: Worlds are of these sizes, or of their multiples.
_COMMON = 8


def check(script: Script) -> Iterator[Finding]:
    """Evaluations over padded shares whose results are combined."""
    seen: set[int] = set()
    for one in passes(script):
        if one.trains:
            continue
        for call, node, message, fix in _found(script, one):
            if id(call.node) not in seen:
                seen.add(id(call.node))
                yield script.finding(RULE, node, message, fix)  # type: ignore[arg-type]
    for entry in script.entries:
        yield from _bare(script, entry.histories[-1], seen)


def _found(script: Script, one: Pass) -> Iterator[tuple[Call, object, str, str]]:
    if is_prepared(one.loader):
        if _CUT.search(one.module.text):
            return
        for call in one.history.calls:
            if (
                call.name == f"{ACCELERATOR}.gather"
                and call in one.inside
                and (node := here(script, call)) is not None
            ):
                yield call, node, _GATHER, "use gather_for_metrics, which drops the repeated samples"
        return
    sampler = sampler_of(one.loader)
    if sampler is None or sampler.call is None or not _pads(sampler.call):
        return
    node = here(script, sampler.call)
    if _CUT.search(one.module.text):
        return
    if (
        node is not None
        and not _is_used_for_training(script, one, sampler)
        and _is_summed(one.history, one.inside[-1].index if one.inside else sampler.call.index, one)
    ):
        message = f"the sampler repeats samples to give all ranks the same number; they count twice in what is reduced after the loop over `{shown(one)}`"
        yield sampler.call, node, message, _FIX


def _bare(script: Script, history: History, seen: set[int]) -> Iterator[Finding]:
    """`list(DistributedSampler(...))`: the indices themselves."""
    for call in history.calls:
        if call.name not in {"builtins.list", "builtins.iter"} or not call.args:
            continue
        made = getattr(call.args[0].thing, "call", None)
        if (
            made is None
            or made.name != SAMPLER
            or id(made.node) in seen
            or not _pads(made)
            or not _never_shuffles(made)
        ):
            continue
        sums = any(other.name in _SUMS and other.index > call.index for other in history.calls)
        node = here(script, made)
        if sums and node is not None:
            seen.add(id(made.node))
            yield script.finding(
                RULE,
                node,
                "the sampler repeats samples to give all ranks the same number; they count twice in what is reduced",
                _FIX,
            )


def _never_shuffles(call: Call) -> bool:
    shuffle = call.arg(SAMPLER_AT["shuffle"], "shuffle")
    return shuffle is not None and shuffle.const is False


def _pads(call: Call) -> bool:
    drop = call.arg(SAMPLER_AT["drop_last"], "drop_last")
    if call.has_star or (drop is not None and drop.const is not False):
        return False
    length = length_of(call.arg(0, "dataset"))
    return length is None or length % _COMMON != 0


def _is_used_for_training(script: Script, one: Pass, sampler: Object) -> bool:
    return any(
        other.trains
        for other in passes(script)
        if other.history is one.history and sampler_of(other.loader) is sampler
    )


def _is_summed(history: History, after: int, one: Pass) -> bool:
    is_eval = any(
        "no_grad" in call.contexts or "inference_mode" in call.contexts for call in one.inside
    ) or _never_shuffles_pass(one)
    if not is_eval:
        return False
    if any(call.name in _SUMS for call in one.inside):
        return True
    following = [call for call in history.calls[after:] if call.index > after]
    # The first thing reduced after the loop is what was counted in it.
    for call in following:
        if call.name in _SUMS:
            return True
        if call.name in _OBJECTS:
            given = call.arg(1, "obj", "object")
            node = call.arg_node(1, "obj", "object")
            return not (
                given is not None and isinstance(given.thing, Items) and given.thing.keys is not None
            ) and not _is_table(call, text_of(node))
    return False


def _never_shuffles_pass(one: Pass) -> bool:
    sampler = sampler_of(one.loader)
    return sampler is not None and sampler.call is not None and _never_shuffles(sampler.call)


def _is_table(call: Call, name: str) -> bool:
    """Whether a name holds a table by index, so that duplicates coincide."""
    return f"{name}[" in call.module.text or f"{name} = {{" in call.module.text


_GATHER = "gather keeps the samples that pad the last batch, so they count twice"
_FIX = "give each rank range(rank, len(dataset), world_size) by Subset, and reduce sums and counts; or drop the repeated samples by their index"

RULE: Rule[Script] = Rule(
    id="RW512",
    name="evaluation-counts-padding",
    severity="warning",
    classes=("X8",),
    summary="samples repeated as padding count twice in the evaluation",
    check=check,
)
