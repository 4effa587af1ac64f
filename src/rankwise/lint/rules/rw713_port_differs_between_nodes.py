"""Each node or rank draws its own random port for the rendezvous.

**Why it breaks.** The script runs once on each node, and `$RANDOM` is a different number each time. Every node waits on
its own port for the others.

Bad:

```bash
torchrun --nnodes=2 --node_rank=$NODE_RANK --nproc_per_node=8 --master_addr=node0 --master_port=$RANDOM train.py
```

Good:

```bash
torchrun --nnodes=2 --node_rank=$NODE_RANK --nproc_per_node=8 --master_addr=node0 --master_port=29617 train.py
```

**When it says nothing.** One node; a batch script that draws the port once and starts the nodes itself, by srun or ssh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.shell.model import Launch


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for launch in shell.launches:
        flag = launch.flag("master_port", "rdzv_endpoint", "main_process_port")
        if flag is None or flag.value is None or not flag.value.is_random or not _is_on_several(launch):
            continue
        if shell.batch.is_batch or (launch.runs_elsewhere() and not _is_thrown_there(shell, launch)):
            continue
        message = f"{flag.value.raw} is a different number on each node, so the nodes use different ports"
        yield shell.finding(RULE, flag.word.span, message, "choose one port for all nodes, such as 29617")


def _is_on_several(launch: Launch) -> bool:
    nodes = launch.num_nodes
    if nodes is not None:
        return nodes > 1
    rank = launch.flag("node_rank", "machine_rank")
    return rank is not None and launch.flag("nnodes", "num_machines") is not None


def _is_thrown_there(shell: Shell, launch: Launch) -> bool:
    """Whether a shell on the other host draws the number: ``ssh host 'torchrun … $RANDOM'``."""
    if not launch.command.under:
        return False
    command = launch.command.span
    inside = [
        one
        for one in shell.reading.references
        if one.name == "RANDOM" and command.line <= one.span.line <= command.end_line
    ]
    texts = [word.raw for word in launch.command.under[-1].words]
    return bool(inside) and any(text.startswith("'") or "\\$" in text for text in texts)


RULE: Rule[Shell] = Rule(
    id="RW713",
    name="port-differs-between-nodes",
    severity="error",
    classes=("I27", "I2"),
    summary="each node draws its own random port, so they never connect",
    looks_at="shell",
    check=_check,
)
