"""`CUDA_VISIBLE_DEVICES` lists too few devices for the ranks, one device twice, or more than are used.

**Why it breaks.** Rank 3 uses `cuda:3`, but only two devices are visible: `CUDA error: invalid device ordinal`. With a
device listed twice CUDA sees none, or two ranks share one. Devices without a rank are idle.

Bad:

```bash
CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=4 train.py
```

Good:

```bash
CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node=4 train.py
```

**When it says nothing.** An empty list or -1, which hide all devices; values that are set elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.shell.model import Launch, Setting

_NAMES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for setting in shell.reading.settings:
        devices = _devices(setting)
        twice = sorted({one for one in devices if devices.count(one) > 1})
        if setting.name in _NAMES and twice:
            message = f"{setting.name}={setting.value.text} lists {', '.join(twice)} twice"
            yield shell.finding(RULE, setting.span, message, "list each device once", failure_class="R13")
    for launch in shell.launches:
        for name in _NAMES:
            listed = launch.command.env.get(name)
            if listed is not None and _devices(listed):
                yield from _count(shell, launch, listed)


def _devices(setting: Setting) -> list[str]:
    text = (setting.value.text or "").strip()
    found = [one.strip() for one in text.split(",")]
    return [] if not text or text.startswith("-") or any(not one for one in found) else found


def _ranks(launch: Launch) -> int | None:
    if launch.launcher == "accelerate":
        text = launch.value("num_processes") or ""
        is_one = launch.flag("num_machines") is None or launch.value("num_machines") == "1"
        return int(text) if text.isdecimal() and is_one and not launch.flag("cpu") else None
    return launch.num_per_node if launch.is_elastic else None


def _count(shell: Shell, launch: Launch, setting: Setting) -> Iterator[Finding]:
    ranks, devices = _ranks(launch), _devices(setting)
    if ranks is None or ranks == len(devices):
        return
    flag = launch.flag("nproc_per_node", "num_processes")
    span = flag.word.span if flag else launch.word.span
    also = [("the devices", shell.piece.path, setting.span)]
    listed = f"{len(devices)} device{'s' * (len(devices) > 1)}"
    spelled = flag.spelled if flag else "--nproc-per-node"
    if ranks > len(devices):
        message = f"{ranks} ranks and {listed}: rank {len(devices)} has no device"
        yield shell.finding(
            RULE, span, message, f"{spelled}={len(devices)}, or list {ranks} devices", also=also
        )
    elif flag is None:
        message = f"one rank and {listed}: without --nproc-per-node one process is started"
        yield shell.finding(
            RULE, span, message, f"--nproc-per-node={len(devices)}", severity="warning", also=also
        )
    else:
        message = f"{ranks} rank{'s' * (ranks > 1)} and {listed}: the others are idle"
        yield shell.finding(RULE, span, message, f"{spelled}={len(devices)}", severity="hint", also=also)


RULE: Rule[Shell] = Rule(
    id="RW720",
    name="visible-devices",
    severity="error",
    classes=("L7", "R13"),
    summary="CUDA_VISIBLE_DEVICES does not match the number of ranks",
    looks_at="shell",
    check=_check,
)
