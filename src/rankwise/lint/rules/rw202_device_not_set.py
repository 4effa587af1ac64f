"""All ranks of a node use GPU 0, because none has set its own.

**Why it breaks.** ``"cuda"``, ``.cuda()`` and ``"cuda:0"`` mean the process's current GPU, which is 0 until it is set.
NCCL then fails with ``Duplicate GPU detected : rank 1 and rank 0 both on CUDA device``, or all ranks fill the memory of
GPU 0. A barrier or an object collective before the GPU is set makes NCCL guess, and may hang.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
model = DDP(torch.nn.Linear(8, 1).cuda())
dist.destroy_process_group()
```

Good:

```python
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
model = DDP(torch.nn.Linear(8, 1).cuda(), device_ids=[local_rank])
dist.destroy_process_group()
```

**When it says nothing.** ``set_device`` comes first, ``init_process_group`` gets ``device_id=...``, the script sets
``CUDA_VISIBLE_DEVICES`` for each process, and programs of one process. With Gloo it is a warning: slow, but it works.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import INIT, backend_of, once, places_of, settings, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Entry, Script
    from rankwise.lint.topics.job_view import Place

_SETS = frozenset({"torch.cuda.set_device", "torch.accelerator.set_device_index", "torch.accelerator.set_device_idx", "torch.cuda.device",
                   "torch.set_default_device", "deepspeed.initialize", "deepspeed.init_distributed", "accelerate.Accelerator",
                   "accelerate.PartialState", "lightning.fabric.Fabric", "rankwise.init",
                   "transformers.TrainingArguments"})  # fmt: skip
_GUESSES = frozenset(
    "torch.distributed." + name
    for name in (
        "barrier",
        "broadcast_object_list",
        "all_gather_object",
        "gather_object",
        "scatter_object_list",
    )
)


def check(script: Script) -> Iterator[Finding]:
    """Uses of "the" GPU in ranks that have not set one."""
    if "CUDA_VISIBLE_DEVICES" in script.piece.code or _is_alone(script):
        return
    seen: set[ast.AST] = set()
    for entry in script.entries:
        init = next((call for call in entry.histories[-1].calls if call.name == INIT), None)
        if init is None or _has_device(init):
            continue
        for finding, node in _entry(script, entry, init):
            if node not in seen:
                seen.add(node)
                yield finding


def _is_alone(script: Script) -> bool:
    """Whether the script says that it is one process of one."""
    sizes = {str(one.value.const) for one in settings(script) if one.key == "WORLD_SIZE"}
    return sizes == {"1"}


def _has_device(init: Call) -> bool:
    device = init.arg(None, "device_id")
    return init.has_star or (device is not None and device.const is not None)


def _entry(script: Script, entry: Entry, init: Call) -> Iterator[tuple[Finding, ast.AST]]:
    history = entry.histories[-1]
    is_nccl = (backend_of(init) or "").endswith("nccl")
    severity: Severity = "error" if is_nccl else "warning"  # Gloo works, slowly, on one GPU
    setters = [call for call in history.calls if _sets_device(call)]
    fixed = next((place for place in places_of(entry, tuple(_SETS), script.module) if _is_fixed(place)), None)
    if fixed is not None and all(call.node is fixed.last.node for call in setters):
        message = f"`{text_of(fixed.last.node)}` gives each rank of a node the same GPU"
        yield script.finding(RULE, fixed.last.node, message, _FIX, severity=severity), fixed.last.node
        return
    set_at = min((call.index for call in setters), default=None)
    has_zero = False
    for place in once(places_of(entry, module=script.module)):
        node, text = _names_one_gpu(place, ignore_current=set_at is not None)
        if node is None or not place.is_made_by_all or has_zero:
            continue
        # One finding: the rest of the script follows from it.
        has_zero = True
        message = f"`{text}` is GPU 0 on each rank of a node: no rank has set its own GPU"
        yield script.finding(RULE, node, message, _FIX, severity=severity), node
    if has_zero or not is_nccl:
        return
    yield from _guesses(script, entry, init, set_at)


def _guesses(
    script: Script, entry: Entry, init: Call, set_at: int | None
) -> Iterator[tuple[Finding, ast.AST]]:
    for place in once(places_of(entry, tuple(_GUESSES), script.module)):
        call = place.last
        if not init.index < call.index or (set_at is not None and set_at < call.index):
            continue
        if any(name in call.kwargs for name in ("device_ids", "device", "group")):
            continue
        what = call.name.rpartition(".")[2]
        message = f"{what} runs on NCCL before this rank has set its GPU, so NCCL guesses one; a wrong guess can hang"
        yield (
            script.finding(RULE, call.node, message, _FIX, severity="warning", failure_class="C22"),
            call.node,
        )
        return


def _is_fixed(place: Place) -> bool:
    """Whether all ranks set the device of one number, whatever they are asked for."""
    values = [call.args[0] for call in place.calls if call.args]
    return (
        place.is_made_by_all
        and not place.last.tests
        and len(values) == len(place.calls)
        and all(type(value.const) is int and not value.spread and not value.origin for value in values)
    )


def _sets_device(call: Call) -> bool:
    name = call.name.rpartition(".")[2]
    if call.name == "transformers.HfArgumentParser":
        return "TrainingArguments" in ast.unparse(call.node)  # when they are made, they choose the device
    # A mesh gives each rank its GPU.
    return (
        call.name in _SETS
        or name == "init_device_mesh"
        or (call.name.startswith("?") and "device" in name and ("set" in name or "init" in name))
    )


def _names_one_gpu(place: Place, *, ignore_current: bool) -> tuple[ast.AST | None, str]:
    """The part of a call that names the same GPU on all ranks."""
    call = place.last
    node, given = _device_of(call)
    if given is None:
        is_plain = (
            call.name.endswith(".cuda")
            and not call.args
            and not call.kwargs
            and isinstance(call.node, ast.Call)
            and not call.node.args
        )
        return (call.node, text_of(call.node)) if is_plain and not ignore_current else (None, "")
    if given in ({"cuda:0", 0} if ignore_current else {"cuda", "cuda:0", 0}):
        return node, text_of(node)
    return None, ""


def _device_of(call: Call) -> tuple[ast.AST | None, object]:
    """Where a call takes a device, and which constant it is; the branch with CUDA counts."""
    position = 0 if call.name == "torch.device" or call.name.endswith((".to", ".cuda")) else None
    value, node = call.arg(position, "device"), call.arg_node(position, "device")
    if value is None or node is None:
        return None, None
    if call.name == "torch.device" and len(call.args) > 1:
        index = call.args[1].const
        return node, "cuda:0" if index == 0 and value.const == "cuda" and not call.args[1].spread else "other"
    if isinstance(node, ast.IfExp) and isinstance(node.body, ast.Constant):
        return node, node.body.value
    if value.spread or not isinstance(value.const, (str, int)) or isinstance(value.const, bool):
        return node, "other"
    if isinstance(value.const, int) and call.name != "torch.device" and not call.name.endswith(".cuda"):
        return node, "other"
    return node, value.const


_FIX = 'call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) first (in mp.spawn: its first argument)'

RULE: Rule[Script] = Rule(
    id="RW202",
    name="device-not-set",
    severity="error",
    classes=("R13", "C22"),
    summary="ranks use the GPU before each has set its own",
    check=check,
)
