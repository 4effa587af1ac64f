"""Finds what is wrong between several hosts: a pure function of their facts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.host import is_loopback
from rankwise.doctor.reading import Reading, ok
from rankwise.doctor.rendezvous.cluster_report import NO_SENSE
from rankwise.doctor.rendezvous.judging_links import find_blocked, judge_links
from rankwise.doctor.rendezvous.judging_names import judge_addresses, judge_clocks, judge_names
from rankwise.doctor.rendezvous.judging_speed import find_suspects, judge_speed
from rankwise.doctor.rendezvous.wire import INTERRUPTED
from rankwise.doctor.units import format_rate, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.doctor.rendezvous.cluster_report import ClusterReport
    from rankwise.doctor.rendezvous.plan import Plan

__all__ = ["find_blocked", "find_suspects", "judge"]


def judge(found: ClusterReport, plan: Plan) -> tuple[Reading, ...]:
    """Return the findings about a set of hosts.

    Args:
        found: The facts.
        plan: What was to come together.

    Returns:
        Readings of ``meeting``, ``names``, ``links``, ``clocks``, ``speed`` and ``all-reduce``.
    """
    is_simulated = bool(plan.listen_address)
    message = {
        "meeting": [*_judge_arrival(found, plan), *_judge_numbers(found, plan), *_judge_losses(found)],
        "names": [*judge_names(found, plan), *([] if is_simulated else judge_addresses(found))],
        "links": judge_links(found),
        "clocks": judge_clocks(found),
        "speed": judge_speed(found, is_simulated=is_simulated),
        "all-reduce": _judge_all_reduce(found),
    }
    names = [one.name for one in found.hosts]
    return tuple(one.of(probe, *names) for probe, readings in message.items() for one in readings)


def _judge_arrival(found: ClusterReport, plan: Plan) -> Iterator[Reading]:
    count = len(found.hosts)
    if not found.missing:
        if count > 1:
            yield ok(f"{count} hosts reached {plan.endpoint}")
        return
    missing = ", ".join(found.missing)
    message = f"{missing} did not reach {plan.endpoint} within {plan.arrival_timeout_s:.0f} s; arrived: {', '.join(one.name for one in found.hosts)}"
    why = "a job waits for it in init_process_group, silently, until its timeout"
    if is_loopback(plan.endpoint_host) and not plan.listen_address:
        address = next((ip for name, ip in found.hosts[0].interfaces if ":" not in ip), "") or "ADDRESS"
        yield Reading(
            verdict="fail", what=message, class_id="I4", hosts=found.missing,
            why=f"on each host {plan.endpoint_host} is that host itself: each waits for the others",
            fix=f"export MASTER_ADDR={address}  # on all hosts: the address of {found.hosts[0].name}",
        )  # fmt: skip
        return
    host, port = plan.endpoint_host, plan.endpoint_port
    probe = f"timeout 3 bash -c '</dev/tcp/{host}/{port}' && echo open  # while the doctor waits there"
    yield Reading(
        verdict="fail", what=message, why=why, class_id="I1", hosts=found.missing,
        fix=f"# on {missing}: is it up, and was the doctor started there?\n{probe}",
    )  # fmt: skip


def _judge_numbers(found: ClusterReport, plan: Plan) -> Iterator[Reading]:
    for first, second, rank in found.doubled:
        yield Reading(
            verdict="fail", what=f"{first} and {second} both claim node rank {rank}; {second} was rejected", class_id="I10",
            why="two processes claim one rank: the job hangs, or trains in a wrong group", hosts=(first, second),
            fix=f"# on {second}: give it a node rank of its own, from 0: --node-rank R",
        )  # fmt: skip
    message = {one.name: one.num_hosts for one in found.hosts if one.num_hosts is not None}
    if len(set(message.values())) > 1:
        counts = sorted(set(message.values()), key=lambda one: -list(message.values()).count(one))
        odd = tuple(name for name, count in message.items() if count != counts[0])
        yield Reading(
            verdict="fail", what="the hosts wait for different numbers of hosts: " + ", ".join(f"{name} for {count}" for name, count in message.items()),
            why="ranks with different world sizes wait for each other forever", class_id="I12", hosts=odd,
            fix="\n".join(f"# on {name}: the same number of nodes as on the others" for name in odd),
        )  # fmt: skip
    count = plan.num_hosts or len(found.hosts)
    for one in found.hosts:
        if one.node_rank is not None and one.node_rank >= max(count, one.num_hosts or 0):
            yield Reading(
                verdict="fail", what=f"{one.name} claims node rank {one.node_rank} of {count}", class_id="I11", hosts=(one.name,),
                why="node ranks count from 0: no host waits for this one",
                fix=f"# on {one.name}: a node rank from 0 to {count - 1}",
            )  # fmt: skip


def _judge_losses(found: ClusterReport) -> Iterator[Reading]:
    for one in found.hosts:
        if one.lost:
            what = f"{one.name} was lost: {one.lost}"
            if one.lost.startswith(NO_SENSE):
                yield Reading(
                    verdict="fail", what=what, hosts=(one.name,),
                    why="the doctors use different protocols: this host's findings are not in the result, and nothing is known about its links",
                    fix=f"# on {one.name} and on the others: is it the same version of rankwise on all hosts?\nrankwise --version",
                )  # fmt: skip
                continue
            if one.lost == INTERRUPTED:
                yield Reading(
                    verdict="fail", what=what, hosts=(one.name,),
                    why="somebody pressed Ctrl-C there, or what started it ended: what it had not sent yet is not in the result",
                    fix="# start the doctor on all hosts again",
                )  # fmt: skip
                continue
            yield Reading(
                verdict="fail", what=what, hosts=(one.name,),
                why="when a host dies, the others of a job wait in their next collective, or fail with 'Connection closed by peer'",
                fix=f"# on {one.name}: is it up? Why did the doctor end there?\ndmesg -T | tail -n 20",
            )  # fmt: skip


def _judge_all_reduce(found: ClusterReport) -> Iterator[Reading]:
    reduced = found.all_reduce
    if reduced is None:
        return
    if reduced.why:
        is_broken = bool(reduced.backend)
        yield Reading(
            verdict="fail" if is_broken else "skipped", what="torch's all-reduce over all hosts " + ("failed" if is_broken else "was not done"),
            why=reduced.why, class_id=reduced.class_id, fix="# see the links and the names above" if is_broken else "",
        )  # fmt: skip
        return
    yield ok(
        f"torch's all-reduce ({reduced.backend}, {reduced.num_ranks} ranks): {format_seconds(reduced.latency_s)} for 4 bytes, "
        f"{format_rate(reduced.bytes_per_s)} for {reduced.size_bytes >> 20} MiB"
    )
    for name, late_s in reduced.waited_s:
        if late_s > 0.5:
            yield Reading(
                verdict="warn", what=f"in each round of the all-reduce the others waited {late_s:.1f} s for {name}", hosts=(name,),
                why="each step of a job takes as long as its slowest host", fix=f"# on {name}: who else uses its cores?\ntop -b -n 1 | head -n 15",
            )  # fmt: skip
