"""Finds what is wrong between several hosts: a pure function of their facts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rankwise.base.host import is_loopback
from rankwise.doctor.multi_host.cluster_report import ClusterReport, HostReport, NameLookup
from rankwise.doctor.multi_host.judging_links import judge_links
from rankwise.doctor.multi_host.judging_speed import judge_speed
from rankwise.doctor.multi_host.peer import short_name
from rankwise.doctor.multi_host.plan import Plan
from rankwise.doctor.multi_host.wire import INTERRUPTED, INVALID_ANSWER
from rankwise.doctor.network.names import is_loopback_address, map_name
from rankwise.doctor.probe import Reading, fail, ok, on_host, warn


def judge(found: ClusterReport, plan: Plan) -> tuple[Reading, ...]:
    """Return the findings about a set of hosts: readings of ``rendezvous``, ``names``, ``links``, ``clocks``, ``speed`` and ``all-reduce``."""
    message = {
        "rendezvous": [*_judge_arrival(found, plan), *_judge_numbers(found, plan), *_judge_losses(found)],
        "names": judge_names(found, plan),
        "links": judge_links(found),
        "clocks": judge_clocks(found),
        "speed": judge_speed(found),
        "all-reduce": _judge_all_reduce(found),
    }
    names = [one.name for one in found.hosts]
    return tuple(one.of(probe, *names) for probe, readings in message.items() for one in readings)


def _judge_arrival(found: ClusterReport, plan: Plan) -> Iterator[Reading]:
    names = ", ".join(one.name for one in found.hosts)
    if not found.missing:
        if len(found.hosts) > 1:
            yield ok(f"{len(found.hosts)} hosts reached {plan.endpoint}")
        return
    missing, host = ", ".join(found.missing), plan.endpoint_host
    class_id, why = "I1", "a job waits for it in init_process_group, silently, until its timeout"
    fix = f"# on {missing}: is it up, and was the doctor started there?\ntimeout 3 bash -c '</dev/tcp/{host}/{plan.endpoint_port}' && echo open  # while the doctor waits there"
    if is_loopback(host) and not plan.listen_address:
        class_id, why = "I4", f"on each host {host} is that host itself: each waits for the others"
        address = next((ip for name, ip in found.hosts[0].interfaces if ":" not in ip), "") or "ADDRESS"
        fix = f"export MASTER_ADDR={address}  # on all hosts: the address of {found.hosts[0].name}"
    yield fail(
        f"{missing} did not reach {plan.endpoint} within {plan.arrival_timeout_s:.0f} s; arrived: {names}", why, fix, class_id, hosts=found.missing
    )  # fmt: skip


def _judge_numbers(found: ClusterReport, plan: Plan) -> Iterator[Reading]:
    for first, second, rank in found.doubled:
        yield fail(
            f"{first} and {second} both claim node rank {rank}; {second} was rejected",
            "two processes claim one rank: the job hangs, or trains in a wrong group",
            f"# on {second}: give it a node rank of its own, from 0: --node-rank R", "I10", hosts=(first, second)
        )  # fmt: skip
    message = {one.name: one.num_hosts for one in found.hosts if one.num_hosts is not None}
    if len(set(message.values())) > 1:
        counts = sorted(set(message.values()), key=lambda one: -list(message.values()).count(one))
        odd = tuple(name for name, count in message.items() if count != counts[0])
        yield fail(
            "the hosts wait for different numbers of hosts: " + ", ".join(f"{name} for {count}" for name, count in message.items()),
            "ranks with different world sizes wait for each other forever",
            "\n".join(f"# on {name}: the same number of nodes as on the others" for name in odd), "I12", hosts=odd
        )  # fmt: skip
    count = plan.num_hosts or len(found.hosts)
    for one in found.hosts:
        if one.node_rank is not None and one.node_rank >= max(count, one.num_hosts or 0):
            yield fail(
                f"{one.name} claims node rank {one.node_rank} of {count}", "node ranks count from 0: no host waits for this one",
                f"# on {one.name}: a node rank from 0 to {count - 1}", "I11", hosts=(one.name,)
            )  # fmt: skip


def _judge_losses(found: ClusterReport) -> Iterator[Reading]:
    for one in found.hosts:
        if not one.lost:
            continue
        why = "when a host dies, the others of a job wait in their next collective, or fail with 'Connection closed by peer'"
        fix = f"# on {one.name}: is it up? Why did the doctor end there?\ndmesg -T | tail -n 20"
        if one.lost.startswith(INVALID_ANSWER):
            why = "the doctors use different protocols: this host's findings are not in the result, and nothing is known about its links"
            fix = f"# on {one.name} and on the others: is it the same version of rankwise on all hosts?\nrankwise --version"
        elif one.lost == INTERRUPTED:
            why = (
                "somebody pressed Ctrl-C there, or what started it ended: what it had not sent yet is not in the result"
            )
            fix = "# start the doctor on all hosts again"
        yield fail(f"{one.name} was lost: {one.lost}", why, fix, hosts=(one.name,))


def _judge_all_reduce(found: ClusterReport) -> Iterator[Reading]:
    reduced = found.all_reduce
    if reduced is None:
        return
    if reduced.why:
        is_broken = bool(reduced.backend)
        yield Reading(
            "fail" if is_broken else "skipped", "torch's all-reduce over all hosts " + ("failed" if is_broken else "was not done"), reduced.why,
            "# see the links and the names above" if is_broken else "", reduced.class_id
        )  # fmt: skip
        return
    yield ok(f"torch's all-reduce {reduced.summary}")
    for name, late_s in reduced.waited_s:
        if late_s > 0.5:
            yield warn(
                f"in each round of the all-reduce the others waited {late_s:.1f} s for {name}", "each step of a job takes as long as its slowest host",
                f"# on {name}: who else uses its cores?\ntop -b -n 1 | head -n 15", hosts=(name,)
            )  # fmt: skip


#: torch's c10d rendezvous takes a node for dead after 3 heartbeats of 5 s, by the wall clocks of both.
_APART_S, _FAR_APART_S = 1.0, 5.0


def judge_names(found: ClusterReport, plan: Plan) -> Iterator[Reading]:
    """Report hosts that know others by wrong addresses; a name without an address harms nobody."""
    reports = {one.name: one for one in found.hosts}
    named = [one.own_name for one in found.hosts]
    good = bool(found.names)
    for look in found.names:
        target = reports.get(look.target)
        if target is not None and named.count(look.name) < 2:
            readings = [*_judge_name(look, target, found, plan)]
            good = good and not readings
            yield from readings
    if good:
        yield ok("the hosts resolve each other's names to the right addresses, or not at all")


def _judge_name(look: NameLookup, target: HostReport, found: ClusterReport, plan: Plan) -> Iterator[Reading]:
    own = {target.address, target.gloo_address, *(ip for _, ip in target.interfaces)}
    if not look.got or own & set(look.got):
        return
    right = target.address
    others = (one for one in found.hosts if one.name != target.name)
    known = ((one.name, {one.address, *(ip for _, ip in one.interfaces)}) for one in others)
    other = next((name for name, ips in known if ips & set(look.got)), "")
    whose = f"that is {other}'s address" if other else "no host of these has that address"
    if is_loopback_address(look.got[0]):
        whose = f"that is {look.source} itself"
        other = look.source
    is_master = short_name(plan.endpoint_host) == short_name(look.name) or target.name == found.hosts[0].name
    matters, name = bool(other) or is_master, look.name
    where = f"in {look.source}'s /etc/hosts" if look.is_written else f"by {look.source}'s name server"
    yield Reading(
        "fail" if matters else "warn", f"{where} {name} is {', '.join(look.got)}, and {whose}; {target.name} is {right}",
        f"what connects to {name} from there reaches the wrong place: the ranks if {name} is the master (torchrun takes the name of node 0), ssh and mpirun always",
        on_host(look.source, map_name(name, right)), "I2" if matters else "", hosts=(look.source,)
    )  # fmt: skip


def judge_clocks(found: ClusterReport) -> Iterator[Reading]:
    """Report clocks that differ."""
    alive = [one for one in found.hosts if not one.lost]
    offsets = {it.name: (it.clock_ahead_s, it.clock_error_s) for it in alive if it.clock_ahead_s is not None}
    if len(offsets) < 2:
        return
    # Most hosts are right: the middle one is, if the coordinator's own clock is wrong, too.
    usual_s = statistics.median_low(ahead for ahead, _ in offsets.values()) if len(offsets) > 2 else 0.0
    good = True
    for name, (ahead_s, error_s) in offsets.items():
        off_s = ahead_s - usual_s
        if abs(off_s) - error_s <= _APART_S:
            continue
        good = False
        first = found.hosts[0].name
        hosts = (name,) if len(offsets) > 2 else (first, name)
        than = "the other hosts'" if len(offsets) > 2 else f"{first}'s"
        lines = [on_host(host, "sudo timedatectl set-ntp true && sudo chronyc makestep") for host in hosts]
        yield Reading(
            "fail" if abs(off_s) - error_s > _FAR_APART_S else "warn",
            f"{name}'s clock is {abs(off_s):.1f} s {'ahead of' if off_s > 0 else 'behind'} {than} (± {error_s * 1000:.0f} ms)",
            "torchrun's c10d rendezvous considers a node dead whose heartbeat is 15 s old by its own clock, and restarts again and again; files and logs are out of order" + ("" if len(offsets) > 2 else ". With two hosts either clock may be wrong"),
            "\n".join(lines), "I23", hosts=hosts
        )  # fmt: skip
    if good:
        worst_s = max(abs(ahead_s - usual_s) for ahead_s, _ in offsets.values())
        yield ok(f"the clocks of {len(offsets)} hosts agree within {worst_s * 1000:.0f} ms")
