"""The data is split at random, differently on each rank: one rank trains on what another validates on.

**Why it breaks.** ``random_split``, ``train_test_split`` and a shuffled list of indices draw from the process's
generator. With its own seed, or with none (torch, NumPy and Python then seed themselves), each rank splits differently.
Validation samples leak into the training set of other ranks and the validation score is too good; nothing fails.

Bad:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

dist.init_process_group("gloo")
torch.manual_seed(7 + dist.get_rank())
dataset = TensorDataset(torch.arange(1000.0))
train_set, val_set = random_split(dataset, [800, 200])
loader = DataLoader(train_set, batch_size=32, sampler=DistributedSampler(train_set))
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

dist.init_process_group("gloo")
torch.manual_seed(7 + dist.get_rank())
dataset = TensorDataset(torch.arange(1000.0))
train_set, val_set = random_split(dataset, [800, 200], generator=torch.Generator().manual_seed(7))
loader = DataLoader(train_set, batch_size=32, sampler=DistributedSampler(train_set))
dist.destroy_process_group()
```

**When it says nothing.** The split has its own generator or ``random_state``; all ranks set the same seed before it;
only some ranks split, or the process that starts the ranks does; the split is broadcast. If the seed may be set
elsewhere it is a warning.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.names import LOADER, SAMPLER
from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import here
from rankwise.lint.topics.in_ranks import differs_deeply, is_in_ranks
from rankwise.lint.topics.job_view import above, is_distributed, once, places, text_of
from rankwise.lint.topics.seeds import library_of, standing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script
    from rankwise.lint.topics.job_view import Place

_SPLIT = "torch.utils.data.random_split"
_SKLEARN = frozenset(
    f"sklearn.model_selection.{name}"
    for name in ("train_test_split", "ShuffleSplit", "StratifiedShuffleSplit", "GroupShuffleSplit")
)
_FOLDS = frozenset(
    f"sklearn.model_selection.{name}" for name in ("KFold", "StratifiedKFold", "StratifiedGroupKFold")
)
_ORDERS = frozenset({"torch.randperm", "numpy.random.permutation", "random.sample"})
_IN_PLACE = frozenset({"random.shuffle", "numpy.random.shuffle"})
_FEEDS = frozenset({SAMPLER, LOADER, "torch.utils.data.Subset"})


def check(script: Script) -> Iterator[Finding]:
    """Random splits that each rank makes for itself."""
    for place in once(places(script, _SPLIT, *_SKLEARN, *_FOLDS, *_ORDERS, *_IN_PLACE, anywhere=True)):
        call = place.last
        if (
            not place.is_made_by_all
            or call.guards
            or not is_distributed(place.entry)
            or not is_in_ranks(script, place.entry, call)
        ):
            continue
        if not _splits(place) or _is_agreed(place):
            continue
        reason = _reason(place)
        if reason is not None:
            severity, why = reason
            node = here(script, call)
            message = f"each rank splits differently at `{text_of(call.node)}`: {why}"
            if node is not None:
                yield script.finding(RULE, node, message, _fix(call), severity=severity)


def _splits(place: Place) -> bool:
    call = place.last
    if call.name in _FOLDS:
        shuffle = call.kwargs.get("shuffle")
        return shuffle is not None and shuffle.const is True
    if call.name == _SPLIT or call.name in _SKLEARN:
        shuffle = call.kwargs.get("shuffle")
        return shuffle is None or shuffle.const is not False
    feeds = any(
        other.name in _FEEDS and other.index > call.index for other in place.entry.histories[-1].calls
    )
    return feeds and not call.loops and _is_cut(call)


def _is_cut(call: Call) -> bool:
    """Whether a part of an order is taken: `order[:n]`."""
    name = text_of(call.arg_node(0)) if call.name in _IN_PLACE else _target(call)
    if not name:
        return False
    cuts = [node.slice for node in ast.walk(call.module.tree)
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and text_of(node.value) == name]  # fmt: skip
    return bool(cuts)


def _target(call: Call) -> str:
    for node in above(call.module.tree, call.node):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            return text_of(node.targets[0])
        if isinstance(node, ast.stmt):
            break
    return ""


def _is_agreed(place: Place) -> bool:
    """Whether rank 0's split is sent to the others."""
    names = {_target(place.last), text_of(place.last.arg_node(0))} - {""}
    for call in place.entry.histories[-1].calls:
        if "broadcast" in call.name and call.index > place.last.index and isinstance(call.node, ast.Call):
            sent = {
                text_of(part)
                for arg in call.node.args[:1]
                for part in ast.walk(arg)
                if isinstance(part, (ast.Name, ast.Attribute))
            }
            if sent & names:
                return True
    return False


def _reason(place: Place) -> tuple[Severity, str] | None:
    call = place.last
    own = _own_seed(call)
    if own is not None:
        return ("error", "its seed depends on the rank") if differs_deeply(own) else None
    how = standing(
        place.entry.histories[-1], call, "numpy" if call.name.startswith("sklearn") else library_of(call.name)
    )
    if how == "differs":
        return "error", "the seed that was set before it depends on the rank"
    if how == "unset" and place.entry.is_program:
        return "error", "no seed was set before it, so each process has its own"
    if how == "unknown" and place.entry.is_program and not _seen_seed(place):
        return "warning", "no seed is found before it, and without one each process has its own"
    return None


def _seen_seed(place: Place) -> bool:
    return any("seed" in call.name.lower() for call in place.entry.histories[-1].calls[: place.last.index])


def _own_seed(call: Call) -> Value | None:
    if call.name == _SPLIT:
        value = call.arg(2, "generator")
    else:
        value = call.arg(None, "random_state", "generator", "seed")
    return None if value is None or (value.is_known and value.const is None) else value


def _fix(call: Call) -> str:
    if call.name.startswith("sklearn"):
        return "pass random_state=0, the same on all ranks"
    if call.name in {_SPLIT, "torch.randperm"}:
        return "pass generator=torch.Generator().manual_seed(0), the same on all ranks"
    return "draw from a generator with a seed that all ranks share: random.Random(0), numpy.random.default_rng(0)"


RULE: Rule[Script] = Rule(
    id="RW508",
    name="split-differs",
    severity="error",
    classes=("X5",),
    summary="ranks split the data at random, each differently",
    check=check,
)
