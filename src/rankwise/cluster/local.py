"""This machine as a cluster: to try a job before it is sent away."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rankwise.cluster import host_check, unscheduled
from rankwise.cluster.launch_command import RendezvousPlace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.cluster.cluster import Document
    from rankwise.cluster.handles import JobRecord
    from rankwise.cluster.job import JobSpec
    from rankwise.cluster.job_fields import Word
    from rankwise.cluster.job_process import Plan

WORDS: Mapping[str, Word] = {}
stays, state, logs, cancel = unscheduled.stays, unscheduled.state, unscheduled.logs, unscheduled.cancel


def render(spec: JobSpec, job_id: str) -> list[Document]:
    """Return the commands, one a node."""
    return unscheduled.render_plan(_plan(spec, job_id))


def submit(spec: JobSpec, record: JobRecord) -> JobRecord:
    """Start the job; several nodes are several launchers here.

    Raises:
        UsageError: This machine has not what the job asks for.
        LaunchError: It could not be started.
    """
    plan = _plan(spec, record.id, record.client)
    host_check.check_hosts(spec, host_check.Look(ways={"this machine": ["sh", "-c"]}, python=sys.executable))
    return unscheduled.start(plan, record)


def _plan(spec: JobSpec, job_id: str, client: int = 0) -> Plan:
    unscheduled.refuse_unscheduled(spec)
    here = "127.0.0.1"
    place = RendezvousPlace(endpoint=f"{here}:{unscheduled.pick_port(job_id)}", run_id=job_id, local_addr=here)
    ways = {f"node{number}": ("sh", "-c") for number in range(spec.num_nodes)}
    return unscheduled.make_plan(spec, ways, place, client)
