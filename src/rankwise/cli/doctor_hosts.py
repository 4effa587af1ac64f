"""How `rankwise doctor` looks at one host, at several that start it themselves, or at several that it starts by ssh."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.environ import environ
from rankwise.base.errors import LaunchError, UsageError
from rankwise.base.identity import read_identity
from rankwise.cli.doctor_flags import read_hostfile
from rankwise.doctor.examine import examine
from rankwise.doctor.host import Host, JobShape
from rankwise.doctor.meeting.examining import examine_together
from rankwise.doctor.meeting.over_ssh import RemoteHosts, find_own
from rankwise.doctor.meeting.plan import Plan
from rankwise.doctor.meeting.together import HostCard, Together
from rankwise.doctor.meeting.together_json import from_json
from rankwise.doctor.meeting.whereabouts import (
    DEFAULT_PORT,
    Bystander,
    Wish,
    find_plan,
    is_batch_script,
    with_limits,
)
from rankwise.doctor.network.interfaces import list_interfaces, resolve

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from rankwise.doctor.probe import Probe

#: Flags of the hosts that ssh starts are those of this one, less what it does itself.
_OF_HERE = (
    "--hosts",
    "--hostfile",
    "--ssh",
    "--html",
    "--format",
    "--master-addr",
    "--master_addr",
    "--master-port",
    "--master_port",
)
_SWITCHES_OF_HERE = ("-v", "--verbose", "-q", "--quiet", "--strict")


def look(
    args: argparse.Namespace, probes: Sequence[Probe], argv: Sequence[str]
) -> tuple[Together, bool] | None:
    """Look at all hosts that the flags and the environment name.

    Args:
        args: The flags, parsed.
        probes: What to look at.
        argv: The flags as typed.

    Returns:
        What has come of it, and whether this process tells it; None if another process of this host takes part.

    Raises:
        UsageError: It is not said where the hosts meet.
        RendezvousError: This host did not find the others.
    """
    if args.end_with_input:
        threading.Thread(target=_end_with_input, daemon=True).start()
    if hosts := args.hosts or (read_hostfile(args.hostfile) if args.hostfile else ()):
        return _look_over_ssh(args, probes, argv, hosts), True
    env = environ()
    wish = Wish(
        num_hosts=args.nnodes, node_rank=args.node_rank, master_addr=args.master_addr, master_port=args.master_port, endpoint=args.rdzv_endpoint
    )  # fmt: skip
    plan = find_plan(wish, env)
    if isinstance(plan, Bystander):
        return None
    if plan is None:
        if is_batch_script(env) and env.get("SLURM_NNODES", "1") != "1":
            say(
                f"rankwise: only this node is looked at; for all {env['SLURM_NNODES']}: srun --ntasks-per-node 1 rankwise doctor"
            )
        return _look_alone(Host(env=env, job=read_job(args, None, env)), probes), True
    plan = _limit(args, replace(plan, expected=args.expect or plan.expected), probes)
    together = examine_together(Host(env=env, job=read_job(args, plan, env)), probes, plan, say)
    return together, plan.is_holder is not False and _is_first(together, plan)


def say(line: str) -> None:
    """Show a line beside the report."""
    print(line, file=sys.stderr, flush=True)


def read_job(args: argparse.Namespace, plan: Plan | None, env: Mapping[str, str]) -> JobShape:
    """Return the job of the flags, and of the environment where they say nothing."""
    told = read_identity(env)
    return JobShape(
        num_ranks=args.nproc_per_node or (told.local_world_size if told else None), num_nodes=(plan.num_hosts or 2) if plan else 1,
        num_workers=args.workers, master_addr=plan.endpoint_host if plan else args.master_addr,
        master_port=plan.endpoint_port if plan else args.master_port, is_master=plan.is_holder if plan else None,
        checkpoints=args.checkpoints, python=args.python, backend=args.backend, script=args.script,
    )  # fmt: skip


def _look_alone(host: Host, probes: Sequence[Probe]) -> Together:
    if all(one.look is None for one in probes):
        names = ", ".join(one.id for one in probes)
        raise UsageError(
            f"on one host there is nothing to see by {names}",
            hint="several hosts: --hosts node0,node1, or --nnodes 2 --node-rank R --master-addr node0 on each of them",
        )
    begin_s = host.clock.monotonic()
    readings = tuple(examine(host, probes))
    card = HostCard(name=host.name, readings=readings)
    return Together(hosts=(card,), took_s=host.clock.monotonic() - begin_s)


def _limit(args: argparse.Namespace, plan: Plan, probes: Sequence[Probe]) -> Plan:
    chosen = {one.id for one in probes}
    measure = not args.no_measure and "speed" in chosen
    all_reduce = not (args.no_all_reduce or args.no_measure) and "all-reduce" in chosen
    return with_limits(
        plan, arrival_timeout_s=args.arrival_timeout, measure=measure, all_reduce=all_reduce, token=args.token
    )


def _is_first(together: Together, plan: Plan) -> bool:
    if plan.is_holder is not None:
        return plan.is_holder
    return bool(together.hosts) and together.hosts[0].name == Host().name


def _look_over_ssh(
    args: argparse.Namespace, probes: Sequence[Probe], argv: Sequence[str], hosts: Sequence[str]
) -> Together:
    """Start the others, and take part if this is one of them; else the first one's answer is the answer."""
    here = Host(env=environ())
    own_addresses = [address.ip for one in list_interfaces(here) for address in one.addresses]
    own = find_own(hosts, here.name, own_addresses, resolve)
    names = tuple(host.rpartition("@")[2] for host in hosts)
    plan = Plan(
        endpoint_host=args.master_addr or names[0], endpoint_port=args.master_port or DEFAULT_PORT, num_hosts=len(hosts), node_rank=own,
        is_holder=own == 0, expected=names, token=secrets.token_hex(8),
    )  # fmt: skip
    remotes = RemoteHosts(args.ssh, say)
    watch = threading.Event()
    try:
        for number, host in enumerate(hosts):
            if number != own:
                words = _build_command(argv, plan, number)
                remotes.start(host, words, folder=Path.cwd(), keeps_output=number == 0)
        threading.Thread(target=_watch, args=(remotes, watch), daemon=True).start()
        if own is None:
            together = _read_answer(remotes, hosts[0])
        else:
            own_plan = _limit(args, plan, probes)
            together = examine_together(
                Host(env=environ(), job=read_job(args, own_plan, environ())), probes, own_plan, say
            )
        return replace(together, readings=(*remotes.look(), *together.readings))
    finally:
        watch.set()
        remotes.close(SYSTEM_CLOCK)


def _watch(remotes: RemoteHosts, is_over: threading.Event) -> None:
    while not is_over.wait(0.5):
        remotes.look()


def _build_command(argv: Sequence[str], plan: Plan, number: int) -> list[str]:
    """Return the command of one host: our own flags, less those that are for here only, and its place."""
    kept, words = [], iter(argv)
    for word in words:
        name = word.partition("=")[0]
        if name in _OF_HERE:
            if "=" not in word:
                next(words, None)
        elif name not in _SWITCHES_OF_HERE:
            kept.append(word)
    place = [
        "--nnodes",
        str(plan.num_hosts),
        "--node-rank",
        str(number),
        "--master-addr",
        plan.endpoint_host,
        "--master-port",
        str(plan.endpoint_port),
    ]
    return [
        sys.executable,
        "-m",
        "rankwise",
        "doctor",
        *kept,
        *place,
        "--expect",
        ",".join(plan.expected),
        "--token",
        plan.token,
        "--format",
        "json",
        "--end-with-input",
    ]


def _read_answer(remotes: RemoteHosts, host: str) -> Together:
    told = remotes.take_output(host)
    try:
        return from_json(json.loads(told))
    except ValueError as error:
        failed = remotes.look()
        if failed:
            raise LaunchError(failed[0].what, hint=failed[0].fix) from error
        raise LaunchError(
            f"the doctor on {host} has not answered",
            hint=f"start it there by hand: ssh {host}, then rankwise doctor",
        ) from error


def _end_with_input() -> None:
    """End when whoever has started us over the network has gone: then our standard input ends."""
    # By its descriptor: a thread that waits in sys.stdin when the interpreter ends makes it abort.
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    signal.raise_signal(signal.SIGINT)
