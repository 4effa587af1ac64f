"""How `rankwise doctor` looks at one host, or takes part where several meet."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.base.environ import environ
from rankwise.base.errors import UsageError
from rankwise.base.identity import read_identity
from rankwise.doctor.examine import examine
from rankwise.doctor.host import Host, JobShape
from rankwise.doctor.multi_host.cluster_report import ClusterReport, HostReport
from rankwise.doctor.multi_host.plan import JoinError, Requested, find_plan, is_batch_script, read_place
from rankwise.doctor.variables.masking import make_mask
from rankwise.doctor.variables.places import try_read

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from rankwise.doctor.multi_host.plan import Plan
    from rankwise.doctor.probe import Probe


#: A word; what is longer is none.
_MOST_TOKEN_BYTES = 4096


def look(args: argparse.Namespace, probes: Sequence[Probe]) -> tuple[ClusterReport, bool] | None:
    """Look at this host, or take part where several meet, as the flags and the environment say.

    Args:
        args: The flags, parsed.
        probes: What to look at.

    Returns:
        What has come of it, and whether this process tells it; None if another process of this host takes part.

    Raises:
        UsageError: It is not said where the hosts meet.
    """
    if args.token_from_input:
        args.token = _read_line()
    if args.end_with_input:
        threading.Thread(target=_end_with_input, daemon=True).start()
    env = environ()
    plan = find_plan(_read_requested(args), env)
    if plan == "bystander":
        return None
    if plan is None:
        host = Host(env=env, job=read_job(args, None, env))
        if is_batch_script(env) and env.get("SLURM_NNODES", "1") != "1":
            say(
                f"rankwise: only this node is looked at; for all {env['SLURM_NNODES']}: srun --ntasks-per-node 1 rankwise doctor"
            )
        elif args.rdzv_endpoint and args.nnodes is None:
            say(
                "rankwise: only this host is looked at: --rdzv-endpoint without --nnodes, which says how many hosts there are"
            )
        return look_alone(host, probes), True
    report, have_met = meet(args, probes, replace(plan, expected=args.expect or plan.expected), env)
    return report, not have_met or _is_first(report, plan)


def meet(
    args: argparse.Namespace, probes: Sequence[Probe], plan: Plan, env: Mapping[str, str]
) -> tuple[ClusterReport, bool]:
    """Take part where several meet; return what has come of it, and whether this host has found the others: else it is looked at alone."""
    chosen = {one.id for one in probes}
    plan = replace(
        plan, arrival_timeout_s=args.arrival_timeout, measure="speed" in chosen, all_reduce="all-reduce" in chosen, token=args.token or plan.token
    )  # fmt: skip
    host = Host(env=env, job=read_job(args, plan, env))
    from rankwise.doctor.multi_host.examine_hosts import examine_hosts  # noqa: PLC0415 - asyncio, which one host alone does not need

    try:
        return examine_hosts(host, probes, plan, say), True
    except JoinError as error:
        return _tell_unmet(look_alone(host, probes), error), False


def _read_requested(args: argparse.Namespace) -> Requested:
    return Requested(
        num_hosts=args.nnodes, node_rank=args.node_rank, master_addr=args.master_addr, master_port=args.master_port, endpoint=args.rdzv_endpoint
    )  # fmt: skip


def say(line: str) -> None:
    """Show a line beside the report."""
    print(make_mask(environ())(line), file=sys.stderr, flush=True)


def read_job(args: argparse.Namespace, plan: Plan | None, env: Mapping[str, str]) -> JobShape:
    """Return the job of the flags, and of the environment where they say nothing."""
    identity = try_read(read_identity, env)
    host, port = (plan.endpoint_host, plan.endpoint_port) if plan else read_place(_read_requested(args))
    return JobShape(
        num_ranks=args.nproc_per_node or (identity.local_world_size if identity else None), num_nodes=(plan.num_hosts or 2) if plan else 1,
        num_workers=args.workers, master_addr=host, master_port=port, is_master=plan.is_coordinator if plan else None,
        checkpoints=args.checkpoints, python=args.python, backend=args.backend, script=args.script, is_launch=args.nproc_per_node is not None,
    )  # fmt: skip


def look_alone(host: Host, probes: Sequence[Probe]) -> ClusterReport:
    """Look at this host only.

    Raises:
        UsageError: There is nothing to see on one host.
    """
    if all(one.look is None for one in probes):
        names = ", ".join(one.id for one in probes)
        raise UsageError(
            f"on one host there is nothing to see by {names}",
            hint="several hosts: --hosts node0,node1, or --nnodes 2 --node-rank R --master-addr node0 on each of them",
        )
    begin_s = host.clock.monotonic()
    readings = tuple(examine(host, probes))
    card = HostReport(name=host.name, readings=readings)
    return ClusterReport(hosts=(card,), took_s=host.clock.monotonic() - begin_s)


def _tell_unmet(alone: ClusterReport, error: JoinError) -> ClusterReport:
    """Return what is to be seen of a host that did not find the others: that it did not, and why, before all else.

    That the master's name has no address is told once: the probe of that address has seen the same.
    """
    reading, card = error.to_reading().of("rendezvous", alone.hosts[0].name), alone.hosts[0]
    others = tuple(
        one for one in card.readings if not (one.probe == "master-address" and one.class_id == reading.class_id == "I3")
    )
    return replace(alone, hosts=(replace(card, readings=others),), readings=(reading,))


def _is_first(report: ClusterReport, plan: Plan) -> bool:
    if plan.is_coordinator is not None:
        return plan.is_coordinator
    return bool(report.hosts) and report.hosts[0].name == Host().name


def _read_line() -> str:
    """Return the first line of standard input, and take nothing of what follows it."""
    line = b""
    while len(line) < _MOST_TOKEN_BYTES and (sign := os.read(0, 1)) not in {b"", b"\n"}:
        line += sign
    return line.decode(errors="replace")


def _end_with_input() -> None:
    """End when whoever has started us over the network has gone: then our standard input ends."""
    # By its descriptor: a thread that waits in sys.stdin when the interpreter ends makes it abort.
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    signal.raise_signal(signal.SIGINT)
