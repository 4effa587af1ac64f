"""The variables by which launchers tell a process its rank, and which of them contradict each other.

**Why it matters.** A `RANK` that was exported once is the same in every task of `srun`: two processes claim one rank, and the rest wait forever. `MASTER_ADDR=localhost` is a different host on each node. A launcher in each of several tasks
on a node builds worlds that overlap. A misspelt name is silently ignored.

**How it is checked.** The environment alone: what torchrun, Slurm, the kinds of MPI, Kubernetes, TF_CONFIG, SageMaker and SkyPilot say is
read as `rankwise.init()` reads it, and compared. Where they differ rightly, as for torchrun inside a step of Slurm, nothing is reported.
Where a launcher is to be started, only what it does not set itself is looked at.
Secrets are never shown.

**What to do.** `rankwise env` shows each value with the variable that it came from, and the command that fits a node on which a launcher is to
be started. Unset what is left over; look for its `export` in `~/.bashrc` and in the job script.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankwise.doctor.host import Host
from rankwise.doctor.probe import Probe, Reading, ok
from rankwise.doctor.variables.contradictions import find_contradictions, find_launch_contradictions, may_have_gpus
from rankwise.doctor.variables.table import report_misspellings
from rankwise.doctor.variables.understanding import understand


def look(host: Host) -> Iterator[Reading]:
    job = host.job
    if job.is_launch:
        wrong = find_launch_contradictions(host.env, num_nodes=job.num_nodes)
    else:
        wrong = find_contradictions(host.env, backend=job.backend, has_gpus=may_have_gpus(host))
    found = [*wrong, *report_misspellings(host.env, but=("NCCL_", "TORCH_"))]
    yield from found
    if found:
        return
    it = understand(host.env)
    if it.role == "rank":
        rank, world = it.values[0], it.values[1]
        yield ok(f"rank {rank.value} of {world.value} ({rank.how}, {world.how})")
    elif it.place is not None:
        node, nodes = it.place.node_rank, it.place.num_nodes
        where = "" if node is None else f": node {node}" + (f" of {nodes}" if nodes else "")
        yield ok(f"{it.place.what}{where}, where a launcher is to be started")
    else:
        yield ok("no variable says that this process is one of several")


PROBE = Probe(
    "launcher-variables",
    "variables of launchers",
    "environment",
    "instant",
    look,
    classes=("I1", "I3", "I4", "I10", "I11", "I12", "I24", "L7", "L16"),
)
