"""set_epoch is never called on a DistributedSampler, so each epoch uses the same order.

**Why it breaks.** ``DistributedSampler`` shuffles with ``seed + epoch``, and its epoch stays 0 until ``set_epoch``
changes it. All epochs have the same batches, in the same order, on the same ranks. Nothing fails; the model generalizes
worse.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.arange(6400.0).unsqueeze(1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
model = DDP(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(10):
    for (x,) in loader:
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
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.arange(6400.0).unsqueeze(1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
model = DDP(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
dist.destroy_process_group()
```

**When it says nothing.** ``set_epoch`` is called in any way (``loader.sampler``, a helper, an attribute); with
``shuffle=False`` or one epoch; no model learns from the loader; Accelerate, Lightning or Transformers' Trainer set the
epoch.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.names import LOADER
from rankwise.lint.model.values import Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import here, is_prepared, sampler_of, shown
from rankwise.lint.topics.epochs import is_reached, loops_of, reshuffled, shuffles
from rankwise.lint.topics.job_view import function_of, parents_of, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script
    from rankwise.lint.topics.data_flow import Pass
    from rankwise.lint.topics.epochs import Shuffled


def check(script: Script) -> Iterator[Finding]:
    """Samplers that shuffle over several epochs without set_epoch."""
    for one in reshuffled(script):
        silent = [each for each in one.passes if not is_reached(each, one)]
        if not silent:
            continue
        node = here(script, one.sampler.call) if one.sampler.call is not None else None
        if node is None:
            node = silent[0].over if silent[0].module is script.module else None
        if node is None:
            continue
        yield script.finding(RULE, node, _message(one, silent), _fix(silent[0], one))
    yield from _endless(script)


def _endless(script: Script) -> Iterator[Finding]:
    """Loaders that a helper restarts: ``batches = cycle(loader)``, ``next(batches)``."""
    if any("set_epoch" in module.text for module in {call.module for call in script.all_calls}):
        return
    told: set[int] = set()
    for entry in script.entries:
        calls = entry.histories[0].calls
        if not any(call.name.endswith("backward") and call.loops for call in calls):
            continue
        for call in calls:
            loader = call.result.thing
            if call.name != LOADER or call.module is not script.module or not isinstance(loader, Object):
                continue
            sampler = sampler_of(loader)
            if sampler is None or sampler.call is None or not shuffles(sampler.call) or is_prepared(loader):
                continue
            again, node = _begun_again(script.tree, call.node), here(script, sampler.call)
            if again is not None and node is not None and id(node) not in told:
                told.add(id(node))
                line = getattr(again, "lineno", 0)
                yield script.finding(
                    RULE,
                    node,
                    f"set_epoch is never called on this sampler, so each time the loader restarts (line {line}) the order is the same",
                    "count the passes where the loader restarts, and call set_epoch(count) on the sampler there, on all ranks",
                )


def _begun_again(tree: ast.Module, made: ast.AST) -> ast.AST | None:
    """Where a loader goes into a generator that never ends, or gets a new iterator when the old one has ended."""
    above = parents_of(tree).get(made)
    names = {ast.unparse(one) for one in above.targets} if isinstance(above, ast.Assign) else set[str]()
    endless = {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and _is_endless(one)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in endless:
            if any(one is made or ast.unparse(one) in names for one in node.args):
                return node
        elif (
            isinstance(node, ast.ExceptHandler)
            and node.type is not None
            and "StopIteration" in ast.unparse(node.type)
        ):
            again = (one for part in node.body for one in ast.walk(part) if isinstance(one, ast.Call))
            found = next(
                (
                    one
                    for one in again
                    if text_of(one.func) == "iter" and one.args and ast.unparse(one.args[0]) in names
                ),
                None,
            )
            if found is not None:
                return found
    return None


def _is_endless(function: ast.FunctionDef) -> bool:
    """``while True: for batch in loader: yield batch``."""
    parameters = {one.arg for one in function.args.args}
    return any(
        isinstance(turn, ast.For)
        and getattr(turn.iter, "id", "") in parameters
        and any(isinstance(part, ast.Yield) for part in ast.walk(turn))
        for loop in ast.walk(function)
        if isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant) and loop.test.value
        for turn in loop.body
    ) or any(
        isinstance(loop, ast.While)
        and isinstance(loop.test, ast.Constant)
        and loop.test.value
        and any(
            isinstance(part, ast.YieldFrom) and getattr(part.value, "id", "") in parameters
            for part in ast.walk(loop)
        )
        for loop in ast.walk(function)
    )


def _message(one: Shuffled, silent: list[Pass]) -> str:
    what = f"`{shown(silent[0])}`"
    told = len(one.passes) - len(silent)
    if told:
        return f"only some ranks call set_epoch on the sampler of {what}: the others shuffle for another epoch, so samples are repeated or missed"
    return f"set_epoch is never called on this sampler, so each epoch reads {what} in the same order"


def _fix(one: Pass, shuffled: Shuffled) -> str:
    loop = loops_of(one, shuffled)[-1]
    target = getattr(loop, "target", None)
    name = text_of(target) if target is not None else "epoch"
    name = "epoch" if name == "_" else name
    sampler = _name_of(one, shuffled)
    what = f"`{sampler}.set_epoch({name})`" if sampler else f"set_epoch({name}) on the sampler"
    return f"call {what} at the start of each epoch, on all ranks, before the loop over `{shown(one)}`"


def _name_of(one: Pass, shuffled: Shuffled) -> str:
    """The sampler's name at the loop; empty if it has none there."""
    made, tree = shuffled.sampler.call, one.module.tree
    if made is None:
        return ""
    above = parents_of(made.module.tree).get(made.node)
    if isinstance(above, ast.Assign) and len(above.targets) == 1:
        name, here_ = text_of(above.targets[0]), made.module is one.module
        is_near = function_of(made.module.tree, made.node) in {tree, function_of(tree, one.over)}
        if here_ and is_near and name.isidentifier():
            return name
    loader = one.loader.call
    is_given = loader is not None and "sampler" in loader.kwargs
    return f"{shown(one)}.sampler" if is_given and shown(one).replace(".", "_").isidentifier() else ""


RULE: Rule[Script] = Rule(
    id="RW501",
    name="set-epoch-forgotten",
    severity="error",
    classes=("X1",),
    summary="set_epoch is never called on a DistributedSampler, so each epoch uses the same order",
    check=check,
)
