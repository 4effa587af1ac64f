"""`--standalone` is given for several nodes.

**Why it breaks.** `--standalone` creates a rendezvous on this host that no other node knows. The launcher waits there
for the other nodes, without a line of output.

Bad:

```bash
torchrun --standalone --nnodes=2 --nproc_per_node=8 train.py
```

Good:

```bash
torchrun --standalone --nnodes=1 --nproc_per_node=8 train.py
```

**When it says nothing.** One node, or a number that is set elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for launch in shell.launches:
        flag, nodes = launch.flag("standalone"), launch.num_nodes
        if launch.is_elastic and flag and nodes is not None and nodes > 1:
            message = f"--standalone means one node, but {nodes} are given: it waits for the others forever"
            fix = "replace --standalone by --rdzv-backend c10d --rdzv-endpoint HOST:PORT, or use one node"
            yield shell.finding(RULE, flag.word.span, message, fix)


RULE: Rule[Shell] = Rule(
    id="RW707",
    name="standalone-with-nodes",
    severity="error",
    classes=("L8",),
    summary="--standalone with several nodes waits forever",
    looks_at="shell",
    check=_check,
)
