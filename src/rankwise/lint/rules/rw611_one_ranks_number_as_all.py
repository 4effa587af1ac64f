"""Rank 0 reports the loss or accuracy of its own share of the data as that of all ranks.

**Why it breaks.** Each rank sees one share of the data. What rank 0 prints or logs is the number of its share: noisier
than the true one, and dependent on the number of ranks. Nothing fails.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
for step in range(8):
    loss = model(torch.randn(8, 4)).mean()
    loss.backward()
    if dist.get_rank() == 0:
        print("loss", loss.item())
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
for step in range(8):
    loss = model(torch.randn(8, 4)).mean()
    loss.backward()
    shown = loss.detach().clone()
    dist.all_reduce(shown)
    shown /= dist.get_world_size()
    if dist.get_rank() == 0:
        print("loss", shown.item())
dist.destroy_process_group()
```

**When it says nothing.** The number was reduced or gathered, or the output says that it is local (``local loss``,
``rank``).
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.library.names import SAMPLER
from rankwise.lint.model.values import Items, Spread
from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import passes, sampler_of, shown
from rankwise.lint.topics.job_view import above, function_of, is_distributed, once, places, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script
    from rankwise.lint.topics.data_flow import Pass

_TELLS = frozenset(
    {
        "print",
        "log",
        "add_scalar",
        "info",
        "log_metric",
        "log_metrics",
        "log_dict",
        "write",
        "set_postfix",
        "add_scalars",
    }
)
_METRIC = re.compile(
    r"loss|acc|metric|score|error|auc|recall|precision|perplexity|ppl|bleu|f1|iou|\bmap\b|psnr", re.IGNORECASE
)
_JUDGED = re.compile(r"val|test|eval|acc|score|auc|recall|f1|iou|bleu", re.IGNORECASE)
#: `ACC_STEPS` is no accuracy.
_CONSTANTS = re.compile(r"\b[A-Z][A-Z0-9_]+\b")
_LOCAL = re.compile(r"local|rank|this process|own|shard", re.IGNORECASE)


#: Functions that may combine the numbers of all ranks.
_TOGETHER = re.compile(r"reduce|gather|sync|aggregat|average|across|collect|broadcast", re.IGNORECASE)
_WORLD = re.compile(r"world|replicas|nprocs|num_processes|size", re.IGNORECASE)


def check(script: Script) -> Iterator[Finding]:
    """Numbers of one rank's data that only rank 0 reports, one finding for each function; shares divided by all samples."""
    yield from _divided_by_all(script)
    seen: set[int] = set()
    for place in once(places(script)):
        call = place.calls[0]
        if (
            call.name.rpartition(".")[2] not in _TELLS
            or place.ranks != {0}
            or id(call.function) in seen
            or not is_distributed(place.entry)
        ):
            continue
        text = ast.unparse(call.node)
        if not _METRIC.search(text) or _LOCAL.search(text) or call.name.startswith("torch.distributed"):
            continue
        if any(_is_own(value) for value in _told(call)) and not _is_computed_here(script, call):
            seen.add(id(call.function))
            is_judged = _JUDGED.search(_CONSTANTS.sub("", text)) is not None
            what = "validation number" if is_judged else "loss"
            yield script.finding(
                RULE,
                call.node,
                f"`{text_of(call.node)}` reports the {what} of rank 0's share of the data as that of all ranks",
                "all_reduce sums and counts over the ranks first, or say in the output that it is rank 0's",
                severity="warning" if is_judged else "hint",
            )


def _divided_by_all(script: Script) -> Iterator[Finding]:
    """Counts of one rank's share that are divided by the number of all samples, and reduced nowhere."""
    seen: set[int] = set()
    for one in passes(script):
        sampler = sampler_of(one.loader)
        if one.trains or one.module is not script.module or id(one.loop) in seen or _is_put_together(one):
            continue
        seen.add(id(one.loop))
        made = sampler.call if sampler is not None else None
        if made is None or made.name != SAMPLER:
            continue
        for node in _divisions(script.tree, one, made):
            yield script.finding(
                RULE,
                node,
                f"`{text_of(node)}` divides this rank's count by the number of all samples: on W ranks it"
                " is about 1/W of the true number",
                f"all_reduce `{text_of(node.left)}` over the ranks first, or divide by the number of samples that this rank saw",
                severity="warning",
            )


def _is_put_together(one: Pass) -> bool:
    first = one.inside[0].index if one.inside else 0
    return any(
        call.index >= first and _TOGETHER.search(call.name.rpartition(".")[2]) for call in one.history.calls
    )


def _divisions(tree: ast.Module, one: Pass, made: Call) -> Iterator[ast.BinOp]:
    """``correct / len(data)`` after a loop that counts ``correct``."""
    around, end = function_of(tree, one.loop), getattr(one.loop, "end_lineno", 0)
    loader = one.loader.call
    data = {text_of(made.arg_node(0, "dataset")), f"{shown(one)}.dataset", f"{shown(one)}.sampler.dataset"}
    if loader is not None:
        data.add(text_of(loader.arg_node(0, "dataset")))
    numbers = {f"len({name})" for name in data if name}
    numbers |= {
        text_of(part.targets[0])
        for part in ast.walk(around)
        if isinstance(part, ast.Assign) and text_of(part.value) in numbers
    }
    counted = {text_of(part.target) for part in ast.walk(one.loop) if isinstance(part, ast.AugAssign)}
    for node in ast.walk(around):
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Div)
            and node.lineno > end
            and text_of(node.right) in numbers
            and not _WORLD.search(text_of(node.left))
            and any(text_of(part) in counted for part in ast.walk(node.left))
        ):
            yield node


def _told(call: Call) -> Iterator[Value]:
    for value in (*call.args, *call.kwargs.values()):
        yield value
        if isinstance(value.thing, Items):
            yield from value.thing.values


def _is_computed_here(script: Script, call: Call) -> bool:
    """Whether rank 0 alone has computed the number, over whatever data it chose."""
    blocks = [
        one
        for one in above(script.tree, call.node)
        if isinstance(one, ast.If) and any(one.test is guard.node for guard in call.guards)
    ]
    made = {
        name.id
        for block in blocks
        for one in ast.walk(block)
        if isinstance(one, ast.Assign)
        for target in one.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    told = {name.id for name in ast.walk(call.node) if isinstance(name, ast.Name)}
    functions = {one.name for one in ast.walk(script.tree) if isinstance(one, ast.FunctionDef)}
    return bool(made & told) or bool(told & functions)


def _is_own(value: Value) -> bool:
    return (
        value.spread is Spread.LOCAL and bool({"item", "data"} & value.origin) and "time" not in value.origin
    )


RULE: Rule[Script] = Rule(
    id="RW611",
    name="one-ranks-number-as-all",
    severity="hint",
    classes=("M1",),
    summary="rank 0's own loss or accuracy is reported as that of all ranks",
    check=check,
)
