"""`srun` or `mpirun` starts a launcher more than once on a node, and each launcher starts all the ranks.

**Why it breaks.** torchrun starts the ranks of its node itself, so a node needs only one launcher. With
`--ntasks-per-node=8` there are eight launchers with eight ranks each: ports clash, eight ranks share each GPU, or
several small jobs train side by side.

Bad:

```bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
srun torchrun --nproc_per_node=8 train.py
```

Good:

```bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
srun torchrun --nproc_per_node=8 train.py
```

Bad:

```bash
mpirun -np 4 torchrun --nproc_per_node=4 train.py
```

Good:

```bash
torchrun --nproc_per_node=4 train.py
```

**When it says nothing.** Numbers of tasks that are set elsewhere; tasks that are separate runs and say so by
`SLURM_PROCID`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.launches import base_name
from rankwise.lint.shell.slurm import tasks_of
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.shell.model import Launch

_MPI = {"mpirun", "mpiexec", "mpiexec.hydra", "orterun"}
_NUMBERS = {"-np", "-n", "--np", "-c"}


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for launch in shell.launches:
        if launch.launcher != "python" and not launch.is_partial and not _is_sweep(launch):
            yield from _by_srun(shell, launch)
            yield from _by_mpi(shell, launch)


def _is_sweep(launch: Launch) -> bool:
    words = [
        *launch.args,
        *(
            flag.value
            for flag in launch.flags
            if flag.value and flag.name not in {"node_rank", "machine_rank"}
        ),
    ]
    return any({"SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK"} & set(word.names) for word in words)


def _by_srun(shell: Shell, launch: Launch) -> Iterator[Finding]:
    tasks = tasks_of(launch, shell.batch)
    if tasks is None or tasks.tasks is None or tasks.tasks < 2:
        return
    if launch.num_nodes == tasks.tasks and launch.launcher != "deepspeed":
        return  # one launcher for each node that the job is said to have
    each = tasks.per_node
    also = [(tasks.where[0], shell.piece.path, tasks.where[1])] if tasks.where else []
    if each is not None and each > 1:
        message = (
            f"srun starts {launch.label} {each} times on a node, and each one starts all ranks of the node"
        )
        yield shell.finding(
            RULE,
            launch.word.span,
            message,
            "srun --ntasks-per-node=1, or #SBATCH --ntasks-per-node=1",
            also=also,
        )
    elif launch.num_nodes == 1 and launch.is_elastic:
        message = (
            f"srun starts {launch.label} on {tasks.tasks} nodes, and each one is a separate job of one node"
        )
        fix = f"--nnodes={tasks.tasks} --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT"
        yield shell.finding(RULE, launch.word.span, message, fix, also=also)


def _by_mpi(shell: Shell, launch: Launch) -> Iterator[Finding]:
    words = launch.wraps
    if not any(base_name(word) in _MPI for word in words):
        return
    counts = [then.text or "" for word, then in itertools.pairwise(words) if word.text in _NUMBERS]
    if counts and counts[0].isdecimal() and int(counts[0]) > 1 and launch.num_nodes == 1:
        message = f"mpirun starts {launch.label} {counts[0]} times, and each one is a separate job"
        fix = f"remove mpirun: {launch.label} starts the ranks"
        yield shell.finding(RULE, launch.word.span, message, fix)


RULE: Rule[Shell] = Rule(
    id="RW715",
    name="launcher-started-too-often",
    severity="error",
    classes=("I24",),
    summary="srun or mpirun starts a launcher several times on a node",
    looks_at="shell",
    check=_check,
)
