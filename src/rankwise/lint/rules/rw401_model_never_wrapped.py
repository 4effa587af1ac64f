"""A program with several processes trains a model that is never wrapped.

**Why it breaks.** `init_process_group` only lets ranks communicate; it does not change training. Without
DistributedDataParallel, FSDP or a reduction of the gradients each rank trains its own model on its own data. The
replicas silently diverge, and only one of them is saved.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
```

**When it says nothing.** Gradients or weights are reduced by hand or by a helper, anything is wrapped anywhere, other
kinds of parallelism (pipelines, tensor parallel, RPC) are used, the world has one rank, or the file is only a part of a
program.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.finding import span_of
from rankwise.lint.library.names import ACCELERATOR
from rankwise.lint.model.values import Instance, Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import D
from rankwise.lint.topics.job_view import INIT
from rankwise.lint.topics.tensor_text import is_in
from rankwise.lint.topics.wrapping import OFF

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

#: Words of anything that may keep ranks in sync.
_OTHERS = re.compile(
    r"DataParallel|\bDDP\b|fully_shard|FSDP|deepspeed|accelerat(e|or)\b|horovod|hvd\.|\brpc\b|[Pp]ipeline|PipelineStage|parallelize_module|DTensor"
    r"|distribute_(tensor|module)|fairscale|colossalai|ModelAverager|average_(param|grad)|sync\w*_(grad|param|model)|reduce_grad|allreduce_\w*"
    r"|lightning|Fabric|register_(post_accumulate_grad_)?hook|Reducer|torchtitan|megatron|replicate\(|zero_optim|localsgd|gossip|federated|\bray\b",
    re.IGNORECASE,
)
_SHARING = frozenset(D + word for word in ("all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor",
                                           "all_reduce_coalesced", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "gather",
                                           "batch_isend_irecv", "scatter"))  # fmt: skip
#: What such a name's call is, is a forward pass of a model.
_MODELS = ("torch.nn.", "torchvision.models.", "timm.", "transformers.Auto")
_ON_NUMBERS = re.compile(
    r"loss|acc|correct|total|count|metric|num|sum|mean|stat|score|hits|time|flag|stop", re.IGNORECASE
)


def check(script: Script) -> Iterator[Finding]:
    """Whole programs that create a group and train a model that is never wrapped."""
    if script.piece.is_fragment:
        return
    yield from _unprepared(script)
    for entry in script.entries[:1]:
        calls = entry.histories[0].calls
        init = next((call for call in calls if call.name == INIT), None)
        if init is None or init.module is not script.module or _is_alone(init) or _is_shared(calls):
            continue
        if any(_OTHERS.search(_without_imports(module.text)) for module in {call.module for call in calls}):
            continue
        back = _backward(calls, init)
        if back is None or not is_in(script.tree, back.node):
            continue
        yield script.finding(
            RULE,
            back.node,
            "each rank trains its own model: a process group is created, but the model is never wrapped and its gradients are never reduced",
            "wrap the model before the optimizer is created: `model = DistributedDataParallel(model)`, or divide and all_reduce each `p.grad` before the step",
            also=[("the process group", script.piece.path, span_of(init.node, script.lines))],
        )


def _unprepared(script: Script) -> Iterator[Finding]:
    """`accelerator.backward(loss)` of a model that was left out of `accelerator.prepare`."""
    for entry in script.entries:
        calls = entry.histories[0].calls
        prepares = [call for call in calls if call.name.startswith(f"{ACCELERATOR}.prepare")]
        if not prepares or any(call.has_star or call.guards for call in prepares):
            continue
        given = {
            id(value.thing)
            for call in prepares
            for value in (*call.args, *call.kwargs.values())
            if value.thing is not None
        }
        open_ended = any(value.thing is None for call in prepares for value in call.args)
        back = next((call for call in calls if call.name == f"{ACCELERATOR}.backward" and call.loops), None)
        if back is None or open_ended or not is_in(script.tree, back.node):
            continue
        loss = back.arg(0, "loss")
        models = [
            call
            for call in calls
            if back.loops[-1] in call.loops and call.name.startswith(_MODELS) and call.name.endswith(".__call__")
            and isinstance(call.receiver.thing, (Object, Instance)) and not OFF & set(call.contexts)
            and "Loss" not in call.name and not call.name.startswith("torch.nn.functional")
        ]  # fmt: skip
        if (
            not models
            or (loss is not None and loss.via)
            or any(id(call.receiver.thing) in given for call in models)
        ):
            continue
        if not any(_learns(call.receiver.thing, calls) for call in models):
            continue
        yield script.finding(
            RULE,
            back.node,
            f"the model of this loss was never given to accelerator.prepare (line {getattr(prepares[0].node, 'lineno', 0)}): each process trains its own",
            "pass the model to accelerator.prepare, too, and continue with what it returns",
        )


def _learns(model: object, calls: list[Call]) -> bool:
    """Whether an optimizer was given this model's parameters."""
    asked = {
        id(call.node) for call in calls if call.name.endswith(".parameters") and call.receiver.thing is model
    }
    return any(
        call.name.startswith("torch.optim.") and any(id(part) in asked for part in ast.walk(call.node))
        for call in calls
    )


def _without_imports(text: str) -> str:
    """Unused imports do not keep ranks in sync."""
    return "\n".join(
        line for line in text.split("\n") if not line.lstrip().startswith(("import ", "from ", "#"))
    )


def _is_alone(init: Call) -> bool:
    size = init.arg(None, "world_size")
    return size is not None and size.const == 1


def _is_shared(calls: list[Call]) -> bool:
    """Whether something other than a metric is communicated while training."""
    for call in calls:
        if call.name in _SHARING:
            text = ast.unparse(call.arg_node(0, "tensor", "tensor_list", "output_tensor") or call.node)
            if not _ON_NUMBERS.search(text) or "grad" in text:
                return True
    return False


def _backward(calls: list[Call], init: Call) -> Call | None:
    """A backward pass through a model that is known, with an optimizer that steps afterwards."""
    known = [
        call
        for call in calls
        if call.name.startswith(_MODELS) and call.name.endswith(".__call__") and not OFF & set(call.contexts)
        and isinstance(call.receiver.thing, (Object, Instance)) and "Loss" not in call.name and not call.name.startswith("torch.nn.functional")
    ]  # fmt: skip
    if not known:
        return None
    for call in calls:
        if (
            call.name.endswith(".backward")
            and call.index > max(init.index, known[0].index)
            and not call.receiver.via
        ):
            stepped = any(one.name.endswith(".step") and one.index > call.index for one in calls)
            return call if stepped else None
    return None


RULE: Rule[Script] = Rule(
    id="RW401",
    name="model-never-wrapped",
    severity="error",
    classes=("D7",),
    summary="a program with several processes trains a model that is never wrapped",
    check=check,
)
