"""A variable disables one of NCCL's fast paths: a test that was left in.

**Why it breaks.** `NCCL_P2P_DISABLE=1` is a useful test on a host whose GPUs can't reach each other. As a permanent
setting it sends all traffic through host memory, on healthy hosts too; `NCCL_IB_DISABLE=1` leaves InfiniBand unused.
Training is slower, without any error.

Bad:

```bash
export NCCL_P2P_DISABLE=1
torchrun --nproc_per_node=8 train.py
```

Good:

```bash
torchrun --nproc_per_node=8 train.py
```

**When it says nothing.** The value 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding

_PATHS = {
    "NCCL_P2P_DISABLE": "direct traffic between GPUs",
    "NCCL_IB_DISABLE": "InfiniBand",
    "NCCL_SHM_DISABLE": "shared memory",
}


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for setting in shell.reading.settings:
        if setting.name in _PATHS and setting.value.text == "1":
            message = f"{setting.name}=1 disables {_PATHS[setting.name]} on every host that runs this"
            yield shell.finding(RULE, setting.span, message, "remove it unless the job can't run without it")


RULE: Rule[Shell] = Rule(
    id="RW723",
    name="fast-paths-switched-off",
    severity="hint",
    classes=("R12",),
    summary="one of NCCL's fast paths is disabled",
    looks_at="shell",
    check=_check,
)
