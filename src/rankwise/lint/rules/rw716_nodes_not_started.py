"""A batch job has several nodes, but the launcher is started on the first one only, or on a different number of nodes than it waits for.

**Why it breaks.** Slurm runs a batch script on the job's first node only. A launcher that is not started by `srun`
waits there for nodes where nothing runs, until the rendezvous times out. If it is started for one node, the others are
idle.

Bad:

```bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=$HEAD:29617 train.py
```

Good:

```bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
srun torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=$HEAD:29617 train.py
```

**When it says nothing.** The script starts the nodes by ssh or pdsh, starts itself by srun, or the launch is in a
function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.slurm import tasks_of
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.shell.model import Launch


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for launch in shell.launches:
        if launch.is_elastic and not launch.is_partial and not launch.command.in_function:
            if not launch.flag("standalone"):
                yield from _first_only(shell, launch)
            yield from _other_number(shell, launch)


def _first_only(shell: Shell, launch: Launch) -> Iterator[Finding]:
    nodes = shell.batch.num_nodes
    if nodes is None or nodes < 2 or launch.runs_elsewhere() or launch.command.under or _starts_itself(shell):
        return
    asked = launch.num_nodes
    also = [(f"#SBATCH --nodes={nodes}", shell.piece.path, shell.batch.spans["nodes"])]
    fix = f"srun --ntasks-per-node=1 {launch.label} …"
    if asked == 1:
        message = f"{launch.label} runs on the first of {nodes} nodes only; the others are idle"
        yield shell.finding(
            RULE, launch.word.span, message, fix + f" --nnodes={nodes}", severity="warning", also=also
        )
    else:
        message = f"a batch script runs on its first node only, so {launch.label} waits for nodes where nothing is started"
        yield shell.finding(RULE, launch.word.span, message, fix, also=also)


def _starts_itself(shell: Shell) -> bool:
    for command in shell.reading.commands:
        raws = [word.raw for word in command.words]
        if any(raw.startswith("srun") for raw in raws) and any(
            "$0" in raw or "BASH_SOURCE" in raw for raw in raws
        ):
            return True
    return False


def _other_number(shell: Shell, launch: Launch) -> Iterator[Finding]:
    """One launcher runs on each node, but they wait for a different number of nodes."""
    flag, asked = launch.flag("nnodes"), launch.num_nodes
    tasks = tasks_of(launch, shell.batch)
    if flag is None or asked is None or tasks is None or tasks.tasks is None or tasks.per_node != 1:
        return
    if asked < 2 or tasks.tasks >= asked or ":" in (launch.value("nnodes") or "") or tasks.where is None:
        return
    beside = [other for other in shell.launches if other.is_elastic and other.word.span != launch.word.span]
    if launch.command.is_background or launch.command.under or any(one.num_nodes == asked for one in beside):
        return  # several steps may make up the job
    message = f"{asked} nodes are expected, but srun starts {launch.label} {tasks.tasks} time{'s' * (tasks.tasks > 1)}"
    also = [(tasks.where[0], shell.piece.path, tasks.where[1])]
    yield shell.finding(
        RULE, flag.word.span, message, f"--nnodes={tasks.tasks}, or give srun {asked} tasks", also=also
    )


RULE: Rule[Shell] = Rule(
    id="RW716",
    name="nodes-not-started",
    severity="error",
    classes=("L10",),
    summary="a launcher is started on fewer nodes than it waits for",
    looks_at="shell",
    check=_check,
)
