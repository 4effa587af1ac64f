"""`SLURM_LAUNCH_NODE_IPADDR` is used as the address of the job's first node.

**Why it breaks.** It is the address of the host where srun was run. On a login node (`salloc`, or srun by hand) no rank
runs, so all ranks wait for a host where nothing listens.

Bad:

```bash
export MASTER_ADDR=$SLURM_LAUNCH_NODE_IPADDR
srun python train.py
```

Good:

```bash
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun python train.py
```

**When it says nothing.** The variable is only printed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding

_NAME = "SLURM_LAUNCH_NODE_IPADDR"
_FIX = 'scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1'


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    message = f"{_NAME} is the host on which srun was run, which may not be a node of the job"
    direct = False
    for setting in shell.reading.settings:
        if setting.name in {"MASTER_ADDR", "MASTER_IP", "HEAD_NODE_IP"} and _NAME in setting.value.names:
            direct = True
            yield shell.finding(RULE, setting.span, message, f"MASTER_ADDR=$({_FIX})")
    for launch in shell.launches:
        for flag in launch.flags:
            is_meeting = flag.is_known and flag.name in {"master_addr", "rdzv_endpoint", "main_process_ip"}
            if is_meeting and not direct and flag.value is not None and _NAME in flag.value.names:
                yield shell.finding(RULE, flag.word.span, message, f"use the first name of: {_FIX}")


RULE: Rule[Shell] = Rule(
    id="RW717",
    name="address-of-the-login-node",
    severity="warning",
    classes=("I24",),
    summary="SLURM_LAUNCH_NODE_IPADDR may not be a node of the job",
    looks_at="shell",
    check=_check,
)
