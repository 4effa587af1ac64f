"""A variable that chooses the network interface has a value that can't work.

**Why it breaks.** `^lo,docker0` (all but these) and `=eth0` are NCCL's syntax. Gloo reads them as a name and fails with
`Unable to find address for: ^lo`. And `lo` reaches no other node, so ranks on several nodes can't connect.

Bad:

```bash
export GLOO_SOCKET_IFNAME=^lo,docker0
torchrun --nproc_per_node=4 train.py
```

Good:

```bash
export GLOO_SOCKET_IFNAME=eth0
torchrun --nproc_per_node=4 train.py
```

**When it says nothing.** NCCL's variable in NCCL's syntax; `lo` for one node.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding

_NCCL_ONLY = re.compile(r"(?:^|,)([\^=])")
_LOOPBACK = {"lo", "lo0", "=lo"}


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    nodes = [launch.num_nodes or 0 for launch in shell.launches] + [shell.batch.num_nodes or 0]
    for setting in shell.reading.settings:
        text = setting.value.text or setting.value.head
        if setting.name in {"GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"} and (odd := _NCCL_ONLY.search(text)):
            message = f"{setting.name}={setting.value.raw}: '{odd[1]}' is NCCL's syntax, but Gloo looks for an interface of that name"
            yield shell.finding(
                RULE, setting.span, message, f"{setting.name}=NAME-OF-THE-INTERFACE, such as eth0"
            )
        elif (
            setting.name in {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
            and text in _LOOPBACK
            and max(nodes) > 1
        ):
            message = f"{setting.name}={text} with {max(nodes)} nodes: that interface reaches no other node"
            fix = f"{setting.name}=NAME-OF-THE-INTERFACE, such as eth0"
            yield shell.finding(RULE, setting.span, message, fix, failure_class="I7")


RULE: Rule[Shell] = Rule(
    id="RW718",
    name="network-interface",
    severity="error",
    classes=("I6", "I7"),
    summary="GLOO_SOCKET_IFNAME in NCCL's syntax, or lo for several nodes",
    looks_at="shell",
    check=_check,
)
