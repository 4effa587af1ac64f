"""Several nodes have no rendezvous address that all of them can reach.

**Why it breaks.** `localhost` is a different host on each node, and it is the default. Every node waits on itself for
the others, usually without a line of output, until the rendezvous times out.

Bad:

```bash
torchrun --nnodes=2 --node_rank=$NODE_RANK --nproc_per_node=8 --master_addr=localhost train.py
```

Good:

```bash
torchrun --nnodes=2 --node_rank=$NODE_RANK --nproc_per_node=8 --master_addr=10.0.0.1 train.py
```

Bad:

```bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
export MASTER_ADDR=127.0.0.1
srun python train.py
```

Good:

```bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun python train.py
```

**When it says nothing.** One script starts all nodes on this host, as a local test does; addresses that are set
elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.host import is_loopback
from rankwise.lint.rule import Rule
from rankwise.lint.shell.slurm import tasks_of
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.shell.model import Flag, Launch


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    here = [one for one in shell.launches if not one.runs_elsewhere() and (one.num_nodes or 0) > 1]
    is_rehearsal = any(one.command.is_background for one in here) and len(here) > 1
    for launch in shell.launches:
        if launch.launcher == "python":
            yield from _by_slurm(shell, launch)
        elif (launch.num_nodes or 0) > 1 and not launch.flag("standalone"):
            if is_rehearsal and not launch.runs_elsewhere():
                continue
            yield from _several(shell, launch)


def _several(shell: Shell, launch: Launch) -> Iterator[Finding]:
    nodes = launch.num_nodes
    flag, host = _meeting(launch)
    if flag is None:
        if launch.is_elastic and not launch.is_partial and not _by_variable(launch):
            yield _nowhere(shell, launch)
        return
    if host is None or not is_loopback(host):
        return
    is_first = launch.value("node_rank", "machine_rank") == "0"
    message = f"{nodes} nodes use {host} as the rendezvous, which is a different host on each"
    fix = f"{flag.spelled} with the address of node 0, the same on all nodes"
    yield shell.finding(RULE, flag.word.span, message, fix, severity="warning" if is_first else None)


def _meeting(launch: Launch) -> tuple[Flag | None, str | None]:
    """The flag with the rendezvous, and the host in it."""
    if launch.launcher == "deepspeed":
        return None, None
    for name in ("rdzv_endpoint", "master_addr", "main_process_ip"):
        flag = launch.flag(name)
        if flag is None or (name == "master_addr" and not launch.is_static):
            continue
        text = launch.value(name)
        if name == "rdzv_endpoint" and flag.value is not None:
            head = flag.value.head
            return flag, head.rpartition(":")[0] or (text if text else None) if ":" in head else text
        return flag, text
    return None, None


def _by_variable(launch: Launch) -> bool:
    return any(name in launch.command.env for name in ("PET_MASTER_ADDR", "PET_RDZV_ENDPOINT"))


def _nowhere(shell: Shell, launch: Launch) -> Finding:
    flag = launch.flag("nnodes")
    span = flag.word.span if flag else launch.word.span
    if launch.is_static:
        message = f"{launch.num_nodes} nodes and no --master_addr: each one waits on its own 127.0.0.1"
        if "MASTER_ADDR" in launch.command.env:
            message += f"; {launch.label} does not read MASTER_ADDR"
        return shell.finding(RULE, span, message, "--master_addr=ADDRESS-OF-NODE-0, the same on all nodes")
    message = f"{launch.num_nodes} nodes and no --rdzv_endpoint: each one waits on itself"
    return shell.finding(
        RULE, span, message, "--rdzv_endpoint=HOST:PORT, the same on all nodes", failure_class="I21"
    )


def _by_slurm(shell: Shell, launch: Launch) -> Iterator[Finding]:
    setting = launch.command.env.get("MASTER_ADDR")
    if setting is None or not is_loopback(setting.value.text or "unknown"):
        return
    tasks = tasks_of(launch, shell.batch)
    if tasks and tasks.nodes and tasks.nodes > 1:
        message = f"ranks on {tasks.nodes} nodes use {setting.value.text} as the rendezvous, which is a different host on each"
        fix = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        yield shell.finding(RULE, setting.span, message, fix)


RULE: Rule[Shell] = Rule(
    id="RW710",
    name="no-place-to-meet",
    severity="error",
    classes=("I4", "I21"),
    summary="several nodes have no rendezvous address that all can reach",
    looks_at="shell",
    check=_check,
)
