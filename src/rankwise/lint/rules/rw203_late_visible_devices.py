"""CUDA_VISIBLE_DEVICES is set after CUDA has read it, or hides the GPU that is used next.

**Why it breaks.** CUDA reads the variable once, when it starts. Set later it has no effect, and all ranks see all GPUs,
or the wrong ones. If each process sees one GPU, that GPU is number 0 there: index ``local_rank`` then fails with ``CUDA
error: invalid device ordinal`` on all but the first.

Bad:

```python
import os

import torch

print(torch.cuda.get_device_name(0))
os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"
```

Good:

```python
import os

os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"

import torch

print(torch.cuda.get_device_name(0))
```

**When it says nothing.** The variable is set before CUDA is used, even if ``torch`` is imported already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import line_of, places, settings, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script
    from rankwise.lint.topics.job_view import Setting

#: These do not start CUDA, or do so only to look.
_HARMLESS = frozenset({"is_available", "manual_seed", "manual_seed_all", "is_initialized", "device_count", "is_bf16_supported", "Stream",
                       "amp", "autocast", "GradScaler", "empty_cache"})  # fmt: skip


def check(script: Script) -> Iterator[Finding]:
    """Settings of CUDA_VISIBLE_DEVICES that are too late or leave no such index."""
    for setting in settings(script):
        if setting.key != "CUDA_VISIBLE_DEVICES":
            continue
        calls = setting.place.entry.histories[-1].calls
        at = setting.place.last.index
        # A child that is started afterwards reads its own copy.
        touched = next(
            (call for call in calls[:at] if _starts_cuda(call) and _same_process(call, setting)), None
        )
        if touched is not None:
            yield script.finding(
                RULE,
                setting.node,
                f"CUDA_VISIBLE_DEVICES is set after `{text_of(touched.node)}` (line {line_of(touched)}) has started CUDA: it has no effect",
                "set it before anything uses CUDA, preferably in the shell that starts the script",
            )
        elif setting.value.spread and "," not in str(setting.value.const):
            yield from _index_gone(script, setting)


def _same_process(call: Call, setting: Setting) -> bool:
    return ("spawned" in call.contexts) == ("spawned" in setting.place.last.contexts)


def _starts_cuda(call: Call) -> bool:
    last = call.name.rpartition(".")[2]
    if call.name.startswith("torch.cuda."):
        return last not in _HARMLESS and "amp" not in call.name.split(".")
    if call.name.endswith(".cuda") and call.name != "torch.cuda":
        return True
    device = call.arg(0 if last == "to" else None, "device")
    return (
        device is not None
        and isinstance(device.const, str)
        and device.const.startswith("cuda")
        and call.name != "torch.device"
    )


def _index_gone(script: Script, setting: Setting) -> Iterator[Finding]:
    if not {"rank", "local_rank"} & setting.value.origin or setting.place.num_ranks == 1:
        return
    for place in places(script, "torch.cuda.set_device"):
        call = place.last
        index = call.args[0] if call.args else None
        if (
            place.entry is setting.place.entry
            and index is not None
            and isinstance(index.const, int)
            and index.const
            and index.spread
        ):
            yield script.finding(
                RULE,
                setting.node,
                f"each process sees one GPU, which is number 0 there, but line {line_of(call)} asks for `{text_of(call.arg_node(0))}`",
                "leave CUDA_VISIBLE_DEVICES alone and use the local rank, or use index 0",
            )
            return


RULE: Rule[Script] = Rule(
    id="RW203",
    name="late-visible-devices",
    severity="error",
    classes=("L11",),
    summary="CUDA_VISIBLE_DEVICES is set too late or hides the GPU that is used",
    check=check,
)
