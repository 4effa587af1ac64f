"""The loader's workers use CUDA, which does not work in forked processes.

**Why it breaks.** A DataLoader forks its workers from a process that already uses CUDA: ``RuntimeError: Cannot
re-initialize CUDA in forked subprocess``, or a worker that hangs forever while the other ranks wait in the backward
pass.

Bad:

```python
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler


def collate(samples):
    return torch.stack(samples).cuda()


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
dataset = [torch.ones(3)] * 64
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset), num_workers=2, collate_fn=collate)
dist.destroy_process_group()
```

Good:

```python
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
dataset = [torch.ones(3)] * 64
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset), num_workers=2, pin_memory=True)
dist.destroy_process_group()
```

**When it says nothing.** No workers; ``multiprocessing_context="spawn"`` or another start method set for the program;
batches that are moved to the GPU in the loop.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.names import LOADER
from rankwise.lint.model.values import Bound, Function, Instance, Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import given, here
from rankwise.lint.topics.job_view import is_distributed, once, places, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import UserClass, Value
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Loaders with workers whose collate function or data set works on the GPU."""
    if any(
        call.name.endswith("set_start_method") and call.args and call.args[0].const in {"spawn", "forkserver"}
        for call in script.all_calls
    ):
        return
    for place in once(places(script, LOADER)):
        call = place.last
        workers = given(call, "num_workers")
        if (
            workers is None
            or not isinstance(workers.const, int)
            or workers.const < 1
            or not is_distributed(place.entry)
        ):
            continue
        if given(call, "multiprocessing_context") is not None or call.has_star:
            continue
        where = _uses_cuda(call)
        node = here(script, call)
        if where and node is not None:
            message = f"{where} uses CUDA in the {workers.const} forked workers of this loader: Cannot re-initialize CUDA in forked subprocess"
            yield script.finding(
                RULE,
                node,
                message,
                "stay on the CPU there, and move the batch in the training loop (pin_memory=True, non_blocking=True)",
            )


def _uses_cuda(call: Call) -> str:
    collate = given(call, "collate_fn")
    thing = collate.thing if collate is not None else None
    function = thing.function if isinstance(thing, Bound) else thing
    if isinstance(function, Function) and _moves(function.node):
        return f"`{function.name}`"
    dataset = given(call, "dataset")
    if dataset is None or not isinstance(dataset.thing, Instance):
        return ""
    cls = dataset.thing.cls
    for name in ("__getitem__", "__iter__"):
        method = cls.find(name)
        node = getattr(method.thing, "node", None) if method is not None else None
        if node is not None and (
            _moves(node) or _reads_cuda(cls, node) or _moves_to_own(node, dataset.thing)
        ):
            return f"`{cls.node.name}.{name}`"
    return ""


def _moves(node: ast.AST) -> bool:
    """Whether something is moved to, or made on, the GPU."""
    for part in ast.walk(node):
        if not isinstance(part, ast.Call):
            continue
        if (
            isinstance(part.func, ast.Attribute)
            and part.func.attr == "cuda"
            and not text_of(part.func).startswith("torch.cuda")
        ):
            return True
        places_named = [*(part.args[:1] if isinstance(part.func, ast.Attribute) and part.func.attr == "to" else []),
                        *(one.value for one in part.keywords if one.arg == "device")]  # fmt: skip
        if any(isinstance(one, ast.Constant) and str(one.value).startswith("cuda") for one in places_named):
            return True
    return False


def _moves_to_own(getter: ast.AST, instance: Instance) -> bool:
    """Whether something goes `.to(self.device)`, and that is a GPU."""
    for part in ast.walk(getter):
        if not (
            isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "to"
        ):
            continue
        where = part.args[0] if part.args else None
        if isinstance(where, ast.Attribute) and text_of(where.value) == "self":
            value = instance.attrs.get(where.attr)
            if value is not None and _is_gpu(value):
                return True
    return False


def _is_gpu(value: Value) -> bool:
    thing = value.thing
    if (
        isinstance(thing, Object)
        and thing.kind == "torch.device"
        and thing.call is not None
        and thing.call.args
    ):
        value = thing.call.args[0]
    return isinstance(value.const, str) and value.const.startswith("cuda")


def _reads_cuda(cls: UserClass, getter: ast.AST) -> bool:
    """Whether a method reads an attribute that the class has put on the GPU."""
    read = {
        part.attr
        for part in ast.walk(getter)
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
    }
    for part in ast.walk(cls.node):
        if isinstance(part, ast.Assign) and _moves(part.value):
            names = {one.attr for one in part.targets if isinstance(one, ast.Attribute)}
            if names & read:
                return True
    return False


RULE: Rule[Script] = Rule(
    id="RW519",
    name="cuda-in-loader-worker",
    severity="error",
    classes=("X15",),
    summary="the forked workers of a loader use CUDA",
    check=check,
)
