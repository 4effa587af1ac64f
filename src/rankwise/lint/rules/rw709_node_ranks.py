"""The nodes of a job do not each have their own number, from 0 to one less than their count.

**Why it breaks.** With the static rendezvous each node gives its number. Two nodes with one number claim the same
ranks: the second fails with `address already in use`, or a wrong group trains. If a number is missing, all wait for
that node.

Bad:

```bash
torchrun --nnodes=2 --nproc_per_node=8 --master_addr=node0 --master_port=29617 train.py
```

Good:

```bash
torchrun --nnodes=2 --node_rank=$NODE_RANK --nproc_per_node=8 --master_addr=node0 --master_port=29617 train.py
```

Bad:

```bash
ssh node0 "torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=node0 train.py" &
ssh node1 "torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=node0 train.py" &
wait
```

Good:

```bash
ssh node0 "torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=node0 train.py" &
ssh node1 "torchrun --nnodes=2 --node_rank=1 --nproc_per_node=8 --master_addr=node0 train.py" &
wait
```

**When it says nothing.** The c10d rendezvous, which assigns the numbers; commands in different branches of an `if`;
jobs that run one after the other.
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
    meeting = [
        launch
        for launch in shell.launches
        if launch.is_elastic and launch.is_static and (launch.num_nodes or 0) > 1 and not launch.is_partial
    ]
    for launch in meeting:
        yield from _alone(shell, launch)
    for group in _jobs(meeting):
        yield from _doubled(shell, group)
        yield from _absent(shell, group)


def _alone(shell: Shell, launch: Launch) -> Iterator[Finding]:
    """One launch: whether it has a number, and a valid one."""
    nodes = launch.num_nodes or 0
    flag = launch.flag("node_rank")
    if flag is None:
        if "PET_NODE_RANK" in launch.command.env or not launch.flag("master_addr", "rdzv_endpoint"):
            return
        message = f"{nodes} nodes and no --node_rank: each one joins as node 0"
        fix = "--node_rank=$NODE_RANK with a different number on each node, or --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT"
        yield shell.finding(RULE, launch.word.span, message, fix)
        return
    text = launch.value("node_rank") or ""
    if text.isdecimal() and int(text) >= nodes and ":" not in (launch.value("nnodes") or ""):
        message = f"{flag.spelled} {text} with {nodes} nodes: they are numbered from 0 to {nodes - 1}"
        yield shell.finding(RULE, flag.word.span, message, f"0 to {nodes - 1}", failure_class="I11")


def _jobs(launches: list[Launch]) -> list[list[Launch]]:
    """Launches that are nodes of one job: they differ only in their number."""
    groups: dict[object, list[Launch]] = {}
    for launch in launches:
        if (launch.value("node_rank") or "").isdecimal():
            texts = [
                (flag.name, flag.value.text if flag.value else "")
                for flag in launch.flags
                if flag.name != "node_rank"
            ]
            script = launch.script.text if launch.script else None
            key = (
                tuple(sorted((name, str(text)) for name, text in texts)),
                script,
                tuple(word.raw for word in launch.args),
            )
            groups.setdefault(key, []).append(launch)
    return [group for group in groups.values() if len(group) > 1]


def _doubled(shell: Shell, group: list[Launch]) -> Iterator[Finding]:
    seen: dict[str, Launch] = {}
    for launch in group:
        rank = launch.value("node_rank") or ""
        earlier = seen.setdefault(rank, launch)
        flag = launch.flag("node_rank")
        if earlier is launch or flag is None or earlier.command.excludes(launch.command):
            continue
        if shell.is_script and not _is_beside(earlier) and not launch.runs_elsewhere():
            continue
        message = f"two nodes of this job have {flag.spelled} {rank}"
        also = [("the other one", shell.piece.path, earlier.word.span)]
        yield shell.finding(
            RULE, flag.word.span, message, "give each node a number of its own, from 0", also=also
        )


def _is_beside(launch: Launch) -> bool:
    """Whether the next command starts while this one runs."""
    return launch.command.is_background or any(command.is_background for command in launch.command.under)


def _absent(shell: Shell, group: list[Launch]) -> Iterator[Finding]:
    nodes = group[0].num_nodes or 0
    ranks = {int(launch.value("node_rank") or 0) for launch in group}
    missing = sorted(set(range(nodes)) - ranks)
    if not shell.is_script or len(ranks) < 2 or not missing or not all(_is_beside(one) for one in group[:-1]):
        return
    flag = group[-1].flag("nnodes")
    message = f"{nodes} nodes are given but {len(ranks)} are started: all wait for node {', '.join(map(str, missing))}"
    fix = f"--nnodes={len(ranks)}, or start node {missing[0]} too"
    yield shell.finding(
        RULE, flag.word.span if flag else group[-1].word.span, message, fix, failure_class="L10"
    )


RULE: Rule[Shell] = Rule(
    id="RW709",
    name="node-ranks",
    severity="error",
    classes=("I10", "I11", "L10"),
    summary="the nodes of a job do not each have their own number",
    looks_at="shell",
    check=_check,
)
