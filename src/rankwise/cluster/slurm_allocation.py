"""A job inside an allocation that the user already has, from `salloc` or in a batch script of his own: one step on each of its nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import UsageError
from rankwise.base.host_list import expand_hosts
from rankwise.cluster import unscheduled
from rankwise.cluster.launch_command import RendezvousPlace
from rankwise.cluster.tools import run_tool

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.cluster.handles import JobRecord
    from rankwise.cluster.job import JobSpec
    from rankwise.cluster.job_process import Plan

#: One task with all of the node, beside whatever else runs there.
_STEP = ("--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--unbuffered")


def is_inside(env: Mapping[str, str]) -> bool:
    """Tell whether we are in an allocation, but not in a step of it with several tasks: each of them would submit the job."""
    return (
        bool(env.get("SLURM_JOB_ID") and env.get("SLURM_JOB_NODELIST")) and env.get("SLURM_STEP_NUM_TASKS", "1") == "1"
    )


def start(spec: JobSpec, record: JobRecord, env: Mapping[str, str]) -> JobRecord:
    """Start the job in our allocation.

    Args:
        spec: The job. Its queue, nodes' size and account have been settled by the allocation.
        record: Ours of it.
        env: Ours.

    Raises:
        UsageError: It can't be a part of the allocation.
        LaunchError: It could not be started.
    """
    spec = replace(spec, time_s=_find_time(spec, env["SLURM_JOB_ID"]))
    return unscheduled.start(make_plan(spec, record.id, env, record.client), record)


def make_plan(spec: JobSpec, job_id: str, env: Mapping[str, str], client: int = 0) -> Plan:
    """Return what is started: a step on each node.

    Args:
        spec: The job.
        job_id: Ours.
        env: Ours, which tells of the allocation.
        client: The process that the job is to end with, or 0.

    Raises:
        UsageError: It can't be a part of the allocation.
    """
    allocation, hosts = env["SLURM_JOB_ID"], expand_hosts(env["SLURM_JOB_NODELIST"])
    if spec.own.text("array"):
        raise UsageError(
            f"an array can't be a part of allocation {allocation}",
            hint="submit it outside of salloc",
        )
    if len(hosts) < spec.min_nodes + spec.standby:
        raise UsageError(
            f"the job needs {spec.min_nodes + spec.standby} nodes, and allocation {allocation} has {len(hosts)}: {env['SLURM_JOB_NODELIST']}",
            hint="ask salloc for more, or submit it to the queue: env -u SLURM_JOB_ID rankwise submit …",
        )
    hosts = hosts[: spec.num_nodes]
    spec = replace(spec, max_nodes=len(hosts) - spec.standby)
    place = RendezvousPlace(endpoint=f"{hosts[0]}:{unscheduled.pick_port(job_id)}", run_id=job_id)
    # A shell of salloc may be a step itself, and so may be another job.
    step = ("srun", f"--jobid={allocation}", *_STEP)
    ways = {host: (*step, f"--nodelist={host}", "sh", "-c") for host in hosts}
    return unscheduled.make_plan(spec, ways, place, client)


def _find_time(spec: JobSpec, allocation: str) -> int:
    """Return how long the job may run: until the allocation ends, or as long as it says itself; 0: without limit."""
    words = ["squeue", "--noheader", "--jobs", allocation, "--format", "%e"]
    end = run_tool(words, doing=f"ask for allocation {allocation}").strip()
    if not end or end in {"NONE", "N/A"}:
        return spec.time_s
    left_s = int(run_tool(["date", "--date", end, "+%s"], doing=f"read the time {end}")) - int(SYSTEM_CLOCK.time())
    return max(1, min(left_s, spec.time_s or left_s))
