"""`rankwise doctor --hosts`: starts itself on other hosts over ssh, and takes part if this is one of them."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.deadline import OverdueError
from rankwise.base.environ import environ
from rankwise.base.errors import LaunchError
from rankwise.cli.doctor_hosts import look_alone, meet, read_job, say
from rankwise.doctor.host import Host
from rankwise.doctor.multi_host.cluster_report import from_json
from rankwise.doctor.multi_host.over_ssh import RemoteHosts
from rankwise.doctor.multi_host.plan import Plan
from rankwise.doctor.network.names import is_own
from rankwise.doctor.storage.mounts import find_current
from rankwise.doctor.variables.masking import mask_value
from rankwise.doctor.variables.places import DEFAULT_PORT

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from rankwise.doctor.multi_host.cluster_report import ClusterReport
    from rankwise.doctor.probe import Probe, Reading

#: Flags of the hosts that ssh starts are those of this one, less what it does itself.
_OF_HERE = (
    "--hosts",
    "--hostfile",
    "--ssh",
    "--format",
    "--master-addr",
    "--master-port",
    "--token-file",
)
_SWITCHES_OF_HERE = ("-v", "--verbose", "-q", "--quiet", "--strict")
#: What a job that is started from here would take along; the hosts' own settings stay where nothing is set here.
_TAKEN_ALONG = ("GLOO_", "NCCL_", "TP_SOCKET_IFNAME", "TORCH_NCCL_", "TORCH_GLOO_")

_RANKWISE = (sys.executable, "-m", "rankwise")
#: A rendezvous's phases have bounds of their own; a host that is frozen has none.
_RENDEZVOUS_S = 600.0


def look_over_ssh(
    args: argparse.Namespace, probes: Sequence[Probe], argv: Sequence[str], hosts: Sequence[str]
) -> ClusterReport:
    """Look at all hosts: those that ssh does not reach are named at once, and the others meet without them.

    Args:
        args: The flags, parsed.
        probes: What to look at.
        argv: The flags as typed.
        hosts: As ssh knows them; the first one that is reached holds the rendezvous.

    Returns:
        What has come of it.

    Raises:
        LaunchError: No host is reached, or the one that held the rendezvous has not answered.
    """
    here = Host(env=environ())
    names = {here.name, here.name.partition(".")[0]}
    bare = list(map(_bare, hosts))
    own = next((at for at, one in enumerate(bare) if one in names), None)
    if own is None:  # only then are names looked up, which may take seconds
        own = next((at for at, one in enumerate(bare) if is_own(one)), None)
    # A folder that has been deleted is left to the hosts: theirs may be there.
    remotes, is_over = RemoteHosts(args.ssh, find_current(here), say), threading.Event()
    try:
        others = [host for number, host in enumerate(hosts) if number != own]
        lost = {one.hosts[0]: one for one in remotes.try_all(others, [*_RANKWISE, "--version"], SYSTEM_CLOCK)}
        left = [host for host in hosts if host not in lost]
        if not left:
            # Each of them has been said with its reason.
            first = next(iter(lost.values()))
            none = f"none of the {len(lost)} hosts can" if len(lost) > 1 else f"{hosts[0]} can't"
            raise LaunchError(f"{none} be looked at", hint=first.fix)
        threading.Thread(target=_watch, args=(remotes, is_over), daemon=True).start()
        together = _meet(args, probes, argv, left, None if own is None else left.index(hosts[own]), remotes)
        return _add(together, tuple(lost.values()), remotes.look())
    finally:
        is_over.set()
        remotes.close(SYSTEM_CLOCK)


def _meet(
    args: argparse.Namespace,
    probes: Sequence[Probe],
    argv: Sequence[str],
    hosts: Sequence[str],
    own: int | None,
    remotes: RemoteHosts,
) -> ClusterReport:
    names = tuple(map(_bare, hosts))
    env = environ()
    plan = Plan(
        endpoint_host=args.master_addr or names[0], endpoint_port=args.master_port or DEFAULT_PORT, num_hosts=len(hosts), node_rank=own,
        is_coordinator=own == 0, expected=names, token=args.token or secrets.token_hex(8),
    )  # fmt: skip
    if len(hosts) == 1 and own is not None:
        return look_alone(Host(env=env, job=read_job(args, None, env)), probes)
    for number, host in enumerate(hosts):
        if number != own:
            command = [*_set_variables(env), *build_command(argv, plan, number)]
            remotes.start(host, command, keeps_output=number == 0, secret=plan.token)
    if own is None:
        return _read_answer(remotes, hosts[0], args.arrival_timeout + _RENDEZVOUS_S)
    return meet(args, probes, plan, env)[0]


def _add(together: ClusterReport, lost: tuple[Reading, ...], failed: Sequence[Reading]) -> ClusterReport:
    """Return the result with the hosts that ssh did not reach."""
    missing = tuple(_bare(one.hosts[0]) for one in lost)
    return replace(
        together,
        readings=(*lost, *failed, *together.readings),
        missing=tuple(dict.fromkeys((*together.missing, *missing))),
    )


def _bare(host: str) -> str:
    return host.rpartition("@")[2]


def _watch(remotes: RemoteHosts, is_over: threading.Event) -> None:
    while not is_over.wait(0.5):
        remotes.look()


def _set_variables(env: Mapping[str, str]) -> list[str]:
    """Return the words that set there what is set here; what looks like a secret is in no command line."""
    variables = [
        f"{name}={value}"
        for name, value in sorted(env.items())
        if name.startswith(_TAKEN_ALONG) and mask_value(name, value) == value
    ]
    return ["env", *variables] if variables else []


def build_command(argv: Sequence[str], plan: Plan, number: int) -> list[str]:
    """Return the command of one host: our own flags, less those that are for here only, and its place.

    Args:
        argv: The flags as typed.
        plan: Of the rendezvous.
        number: Which of the hosts it is.
    """
    kept, words = [], iter(argv)
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name in _OF_HERE:
            if "=" not in word:
                next(words, None)
        elif name not in _SWITCHES_OF_HERE:
            kept.append(word)
    place = {
        "--nnodes": str(plan.num_hosts), "--node-rank": str(number), "--master-addr": plan.endpoint_host, "--master-port": str(plan.endpoint_port),
        "--expect": ",".join(plan.expected), "--format": "json",
    }  # fmt: skip
    flags = [word for pair in place.items() for word in pair]
    return [*_RANKWISE, "doctor", *kept, *flags, "--token-from-input", "--end-with-input"]


def _read_answer(remotes: RemoteHosts, host: str, timeout_s: float) -> ClusterReport:
    try:
        return from_json(json.loads(remotes.take_output(host, timeout_s=timeout_s)))
    except (ValueError, OverdueError, subprocess.TimeoutExpired) as error:
        if failed := remotes.look():
            raise LaunchError(failed[0].what, hint=failed[0].fix) from error
        hint = f"start it there by hand: ssh {host}, then rankwise doctor"
        raise LaunchError(f"the doctor on {host} has not answered: {error}", hint=hint) from error
