"""Plain hosts over ssh as a cluster: looked at first, then one launcher on each, which ends with the process that started it here."""

from __future__ import annotations

import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from rankwise.base.errors import UsageError
from rankwise.base.host_list import expand_hosts, find_fault
from rankwise.base.ssh import read_ssh, write_ssh, write_ssh_test
from rankwise.cluster import host_check, unscheduled
from rankwise.cluster.job_fields import Word
from rankwise.cluster.launch_command import RendezvousPlace, join_endpoint
from rankwise.cluster.tools import run_tool

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.cluster.cluster import Document
    from rankwise.cluster.handles import JobRecord
    from rankwise.cluster.job import JobSpec
    from rankwise.cluster.job_process import Plan

WORDS: Mapping[str, Word] = {
    "hosts": Word("Names or addresses, as ssh knows them; short forms as gpu[01-16].", metavar="HOST,…", is_names=True),
    "ssh": Word("The ssh command with its options (default: ssh).", metavar="COMMAND"),
    "master_addr": Word("Address of the first host, as the others know it; by default what ssh connects to."),
    "port": Word("Where the nodes meet on it; by default one drawn for the job.", "number", "PORT"),
}
stays, state, logs, cancel = unscheduled.stays, unscheduled.state, unscheduled.logs, unscheduled.cancel
_SYNC_S = 3600.0


def render(spec: JobSpec, job_id: str) -> list[Document]:
    """Return the commands that are run here: the copies first, then one a host."""
    hosts, ssh = _find_hosts(spec)
    copies = [_write_copy(spec, host, ssh) for host in hosts if spec.files]
    return unscheduled.render_plan(_plan(spec, _look(spec, job_id, hosts, ssh), job_id), copies)


def submit(spec: JobSpec, record: JobRecord) -> JobRecord:
    """Copy the files, look at all hosts, and start the job.

    Raises:
        LaunchError: A host is not reached.
        UsageError: The hosts differ, or lack something.
    """
    hosts, ssh = _find_hosts(spec)
    look = _look(spec, record.id, hosts, ssh)
    if spec.files:
        host_check.ask_all(spec, look)  # makes the folder
        with ThreadPoolExecutor(host_check.MOST_AT_ONCE) as pool:
            list(pool.map(lambda host: _copy(spec, host, ssh), hosts))
    host_check.check_hosts(spec, look)
    return unscheduled.start(_plan(spec, look, record.id, record.client), record)


def _find_hosts(spec: JobSpec) -> tuple[list[str], list[str]]:
    """Return the hosts of the job, and the ssh command."""
    unscheduled.refuse_unscheduled(spec)
    text = spec.own.text("hosts")
    if fault := find_fault(text):
        raise UsageError(f"hosts: {fault}", hint="names with commas between them, or a short form as gpu[01-16]")
    hosts = list(expand_hosts(text))
    if len(set(hosts)) < len(hosts):
        twice = next(host for host in hosts if hosts.count(host) > 1)
        raise UsageError(f"hosts names {twice} twice", hint="raise ranks_per_node for more ranks on a host")
    if len(hosts) < spec.num_nodes or not hosts:
        wanted = f"{spec.num_nodes} nodes are asked for" + (
            f", {spec.standby} of them to stand by" if spec.standby else ""
        )
        raise UsageError(
            f"{wanted}, and hosts names {len(hosts)}", hint="--hosts gpu0,gpu1, or hosts below [ssh] in job.toml"
        )
    return hosts[: spec.num_nodes], read_ssh(spec.own.text("ssh", "ssh"))


def _find_address(spec: JobSpec, hosts: list[str], ssh: list[str]) -> str:
    """Return where the others find the first host: what ssh connects to, by ~/.ssh/config too."""
    if given := spec.own.text("master_addr"):
        return given
    if shutil.which(ssh[0]) is None:
        return hosts[0].rpartition("@")[2]  # to show what would be run, on a machine that can't
    settings = run_tool([*ssh, "-G", hosts[0]], doing=f"read ssh's settings for {hosts[0]}", timeout_s=20)
    named = [line.split(maxsplit=1)[1] for line in settings.splitlines() if line.startswith("hostname ")]
    return named[0] if named else hosts[0].rpartition("@")[2]


def _look(spec: JobSpec, job_id: str, hosts: list[str], ssh: list[str]) -> host_check.Look:
    return host_check.Look(
        ways={host: write_ssh(ssh, host) for host in hosts},
        python=sys.executable,
        address=_find_address(spec, hosts, ssh) if len(hosts) > 1 else "",
        port=spec.own.number("port") or unscheduled.pick_port(job_id),
        test=write_ssh_test(ssh, hosts[0]),
    )


def _plan(spec: JobSpec, look: host_check.Look, job_id: str, client: int = 0) -> Plan:
    place = RendezvousPlace(endpoint=join_endpoint(look.address, look.port), run_id=job_id)
    return unscheduled.make_plan(spec, look.ways, place, client)


def _copy(spec: JobSpec, host: str, ssh: list[str]) -> None:
    run_tool(_write_copy(spec, host, ssh), doing=f"copy {', '.join(spec.files)} to {host}", timeout_s=_SYNC_S)


def _write_copy(spec: JobSpec, host: str, ssh: list[str]) -> list[str]:
    paths = [f"{spec.workdir.rstrip('/')}/./{file}" for file in spec.files]
    # Before 3.2.4 the shell of the host reads the path.
    protect = [] if shlex.quote(spec.workdir) == spec.workdir else ["--protect-args"]
    return [
        "rsync",
        "--archive",
        "--relative",
        *protect,
        "--rsh",
        shlex.join(ssh),
        "--",
        *paths,
        f"{host}:{spec.workdir.rstrip('/')}/",
    ]
