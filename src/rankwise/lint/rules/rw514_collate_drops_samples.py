"""The collate function drops samples without the sampler knowing: ranks get batches of different sizes, or none.

**Why it breaks.** The sampler gives each rank the same number of samples. A collate function that drops broken ones
makes the batches of one rank smaller; if it drops a whole batch, that rank skips a step, or fails, and the others wait
for it in the backward pass. The hang may come hours later.

Bad:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler


def collate(samples):
    samples = [one for one in samples if one is not None]
    return torch.stack(samples) if samples else None


dist.init_process_group("gloo")
dataset = [torch.ones(3), None] * 50
loader = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset), collate_fn=collate)
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
dataset = [one for one in [torch.ones(3), None] * 50 if one is not None]
loader = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset))
dist.destroy_process_group()
```

**When it says nothing.** The data set is filtered before the sampler sees it; dropped samples are replaced by others
(the rule looks for a call that draws new ones); programs of one process.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.names import LOADER
from rankwise.lint.model.values import Bound, Function
from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import given, here
from rankwise.lint.topics.job_view import is_distributed, once, places, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Collate functions with a filter over the samples."""
    for place in once(places(script, LOADER)):
        value = given(place.last, "collate_fn")
        thing = value.thing if value is not None else None
        function = thing.function if isinstance(thing, Bound) else thing
        if not isinstance(function, Function) or not is_distributed(place.entry) or place.last.guards:
            continue
        if _filters(function.node) and (node := here(script, place.last)) is not None:
            call = place.last
            message = f"`{function.name}` drops samples without the sampler knowing: a rank may get a smaller batch than the others, or none"
            fix = "filter the data set before the sampler is created, or let __getitem__ return another sample instead of a broken one"
            yield script.finding(RULE, call.arg_node(6, "collate_fn") or node, message, fix)


def _filters(node: ast.AST) -> bool:
    """Whether a function leaves out some of what its parameter holds."""
    args = getattr(node, "args", None)
    names = {one.arg for one in args.args} if args is not None else set()
    if any(
        "random" in text_of(part.func) or "choice" in text_of(part.func)
        for part in ast.walk(node)
        if isinstance(part, ast.Call)
    ):
        return False
    for part in ast.walk(node):
        if isinstance(part, (ast.ListComp, ast.GeneratorExp)):
            head = part.generators[0]
            # `[x for x in samples if ...]` keeps samples; `[x["a"] for ...]` builds something of them.
            if (
                head.ifs
                and isinstance(head.iter, ast.Name)
                and head.iter.id in names
                and ast.dump(part.elt) == ast.dump(_load(head.target))
            ):
                return True
        if (
            isinstance(part, ast.Call)
            and isinstance(part.func, ast.Name)
            and part.func.id == "filter"
            and len(part.args) == 2
        ):
            over = part.args[1]
            if isinstance(over, ast.Name) and over.id in names:
                return True
    return False


def _load(target: ast.expr) -> ast.expr:
    return ast.Name(id=target.id, ctx=ast.Load()) if isinstance(target, ast.Name) else target


RULE: Rule[Script] = Rule(
    id="RW514",
    name="collate-drops-samples",
    severity="warning",
    classes=("X10",),
    summary="a collate function drops samples, so ranks get different batches",
    check=check,
)
