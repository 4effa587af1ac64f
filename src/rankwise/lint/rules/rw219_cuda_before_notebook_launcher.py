"""CUDA is used before `notebook_launcher` forks its processes.

**Why it breaks.** `notebook_launcher` forks the notebook. A process that has used CUDA can't be forked: the launcher
refuses ("CUDA has been initialized before the `notebook_launcher`"), or each rank fails with "Cannot re-initialize CUDA
in forked subprocess".

Bad:

```python
import torch
from accelerate import Accelerator, notebook_launcher

model = torch.nn.Linear(4, 1).cuda()


def train():
    accelerator = Accelerator()
    accelerator.print(accelerator.num_processes)


notebook_launcher(train, num_processes=2)
```

Good:

```python
import torch
from accelerate import Accelerator, notebook_launcher


def train():
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    accelerator.print(accelerator.num_processes, model)


notebook_launcher(train, num_processes=2)
```

**When it says nothing.** Queries that do not start CUDA (`torch.cuda.is_available()`, `device_count()`); CUDA inside
the launched function; one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.paths.words import place, written
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

_LAUNCHERS = ("accelerate.notebook_launcher", "accelerate.launchers.notebook_launcher")
#: Calls that only query the driver, or are deferred until CUDA is used.
_HARMLESS = frozenset(
    {"is_available", "device_count", "manual_seed", "manual_seed_all", "is_bf16_supported", "is_initialized"}
)


def check(script: Script) -> Iterator[Finding]:
    """Calls that initialise CUDA in the program before it launches."""
    for entry in script.entries:
        calls = entry.histories[0].calls
        for launch in calls:
            if launch.name not in _LAUNCHERS or launch.module is not script.module or _is_alone(launch):
                continue
            used = next((one for one in calls if one.index < launch.index and _uses_cuda(one)), None)
            if used is not None and used.module is script.module:
                yield script.finding(
                    RULE,
                    used.node,
                    f"`{written(used.node)}` starts CUDA in this process, which notebook_launcher then forks: the forked ranks"
                    " can't use CUDA",
                    f"move `{written(used.node)}` into the launched function, and restart the kernel",
                    also=[place("the processes are forked here", launch.node, launch.module)],
                )


def _is_alone(launch: Call) -> bool:
    number = launch.arg(2, "num_processes")
    return number is not None and number.const in {0, 1}


def _uses_cuda(call: Call) -> bool:
    last = call.name.rpartition(".")[2]
    if call.stack and any("notebook_launcher" in written(site.node) for site in call.stack):
        return False
    if call.name.startswith("torch.cuda."):
        return last not in _HARMLESS and not last[:1].isupper()
    device = call.arg(0, "device")
    if last == "to" or "device" in call.kwargs:
        device = call.kwargs.get("device", device)
        return device is not None and isinstance(device.const, str) and device.const.startswith("cuda")
    return last == "cuda" and not call.name.startswith("torch.version")


RULE: Rule[Script] = Rule(
    id="RW219",
    name="cuda-before-notebook-launcher",
    severity="error",
    classes=("L14",),
    summary="CUDA is used before notebook_launcher forks",
    check=check,
)
