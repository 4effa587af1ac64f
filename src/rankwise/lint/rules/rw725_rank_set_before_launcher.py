"""RANK, WORLD_SIZE or LOCAL_RANK is set for a launcher, which sets them itself.

**Why it breaks.** The launcher gives every rank its own values, so these are ignored. `WORLD_SIZE=4 torchrun train.py`
starts one process.

Bad:

```bash
WORLD_SIZE=4 torchrun train.py
```

Good:

```bash
torchrun --nproc_per_node=4 train.py
```

**When it says nothing.** The script uses the variable itself, as in `--nnodes=$WORLD_SIZE`, or also starts Python
without a launcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding

_NAMES = {
    "WORLD_SIZE": "--nproc_per_node=N",
    "RANK": "--node_rank=N",
    "LOCAL_RANK": "nothing",
    "LOCAL_WORLD_SIZE": "--nproc_per_node=N",
}


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    used = {one.name for one in shell.reading.references}
    for launch in shell.launches:
        if not launch.is_elastic:
            continue
        for name, instead in _NAMES.items():
            setting = launch.command.env.get(name)
            if setting is None or name in used or setting.value.text is None:
                continue
            if not setting.is_prefix and any(other.launcher == "python" for other in shell.launches):
                continue  # it may be meant for these
            message = (
                f"{launch.label} gives each rank its own {name}, so {name}={setting.value.raw} is ignored"
            )
            fix = f"remove it; use {instead}" if instead != "nothing" else "remove it"
            yield shell.finding(RULE, setting.span, message, fix)


RULE: Rule[Shell] = Rule(
    id="RW725",
    name="rank-set-before-launcher",
    severity="warning",
    classes=("L12",),
    summary="RANK or WORLD_SIZE is set for a launcher, which sets it itself",
    looks_at="shell",
    check=_check,
)
