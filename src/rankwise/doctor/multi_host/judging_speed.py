"""Finds which links are slow, far or lossy, and at which host.

No threshold is a ratio alone: on a busy host anything may take several times as long as it should.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from rankwise.doctor.multi_host.blaming import Blame, find_blames
from rankwise.doctor.multi_host.cluster_report import LOSSY, ClusterReport, HostReport, Measure, Way
from rankwise.doctor.probe import Reading, ok, warn
from rankwise.doctor.units import format_rate, format_seconds, join_names

#: Slow is a host's links, or a single one, below this share of what the better links reach; and below so many bytes in
#: a second.
_HOST_SHARE, _HOST_FLOOR, _LINK_SHARE, _LINK_FLOOR = 1 / 3, 250e6, 1 / 5, 100e6
#: Below this all are slow: 100 Mbit/s.
_ALL_FLOOR = 12.5e6
#: Far is a round trip that takes so many times as long as elsewhere, and so much longer; or so long at all.
_FAR_TIMES, _FAR_MORE_S, _ALL_FAR_S = 10.0, 0.02, 0.05
#: Shares of packets that were sent again.
_VERY_LOSSY = 0.01
#: So many links of a host are measured again; no host is blamed for links that were not.
_SAMPLE, _LEAST_TRIES = 3, 2


def find_suspects(found: ClusterReport) -> list[Measure]:
    """Return the links that seem bad, and are to be measured again before a host is blamed."""
    measures = _list_alive(found)
    bad = _find_slow(measures, _HOST_SHARE, _HOST_FLOOR) | _find_far(measures) | _find_lossy(measures)
    chosen: list[Measure] = []
    count: Counter[tuple[str, int]] = Counter()
    for one in measures:
        ends = (one.source, 0), (one.target, 1)
        # Some links say as much about a host as all of them.
        is_enough = max(count[end] for end in ends) >= _SAMPLE
        is_stalled = not one.bytes_per_s and one.tries < _LEAST_TRIES
        if is_enough or not (is_stalled or one.way in bad):
            continue
        count.update(ends)
        chosen.append(one)
    return chosen


def judge_speed(found: ClusterReport) -> Iterator[Reading]:
    """Report slow, far and lossy links."""
    # A stream that brings nothing at all has no speed: the link is reported as stalled.
    measures = [one for one in _list_alive(found) if one.bytes_per_s]
    if not measures:
        return
    reports = {one.name: one for one in found.hosts}
    # Loss makes a link slow, in both directions, since acknowledgements get lost, too: it is reported once.
    lossy = {way for blame in _blame_loss(measures) for way in blame.bad}
    clean = [one for one in measures if not {one.way, one.way[::-1]} & lossy]
    bad = [*_report_lossy(measures, reports), *_report_slow(clean, reports), *_report_far(clean, reports)]
    yield from bad
    speed = statistics.median(one.bytes_per_s for one in measures)
    latency_s = statistics.median(one.latency_s for one in measures)
    message = f"{len(measures)} ways measured: {format_rate(speed)} by one stream and {format_seconds(latency_s)} for a round trip (medians)"
    if not bad and speed >= _ALL_FLOOR and latency_s <= _ALL_FAR_S:
        yield ok(message)
    elif not bad:
        yield warn(
            message, "all links are slow: each step waits for the gradients of all ranks to pass them",
            f"ip route get {found.hosts[-1].address}  # which interface is it, and is there a faster one? Then:\nexport GLOO_SOCKET_IFNAME=… NCCL_SOCKET_IFNAME=…"
        )  # fmt: skip


def _list_alive(found: ClusterReport) -> list[Measure]:
    lost = {one.name for one in found.hosts if one.lost}
    return [one for one in found.measures if one.source not in lost and one.target not in lost]


def _find_reference(measures: Sequence[Measure]) -> float:
    """Return what the better links reach: the upper quarter begins there.

    With three hosts a slow one has four of six links.
    """
    speeds = sorted(one.bytes_per_s for one in measures)
    return speeds[min(len(speeds) - 1, 3 * len(speeds) // 4)] if speeds else 0.0


def _find_slow(measures: Sequence[Measure], share: float, floor: float) -> set[Way]:
    limit = min(share * _find_reference(measures), floor)
    return {one.way for one in measures if 0 < one.bytes_per_s < limit}


def _find_far(measures: Sequence[Measure]) -> set[Way]:
    trips = sorted(one.latency_s for one in measures)
    usual_s = trips[len(trips) // 4] if trips else 0.0
    limit_s = max(_FAR_TIMES * usual_s, usual_s + _FAR_MORE_S)
    return {one.way for one in measures if one.latency_s > limit_s}


def _find_lossy(measures: Sequence[Measure]) -> set[Way]:
    return {one.way for one in measures if (one.resent or 0.0) > LOSSY}


def _blame(measures: Sequence[Measure], tried: Collection[Way], bad: set[Way]) -> list[Blame]:
    """Return which hosts are to blame, by links that stayed bad when they were measured again."""
    sure = {one.way for one in measures if one.tries >= _LEAST_TRIES}
    return [one for one in find_blames(tried, bad) if sure & set(one.bad)]


def _report_slow(measures: Sequence[Measure], reports: dict[str, HostReport]) -> Iterator[Reading]:
    speeds = {one.way: one.bytes_per_s for one in measures}
    reference = _find_reference(measures)
    for blame in _blame(measures, speeds, _find_slow(measures, _HOST_SHARE, _HOST_FLOOR)):
        worst = min(speeds[way] for way in blame.bad)
        if blame.kind == "link" and worst >= min(_LINK_SHARE * reference, _LINK_FLOOR):
            continue
        speed = statistics.median(speeds[way] for way in blame.bad)
        does = {"in": "receives", "out": "sends", "both": "sends and receives"}.get(blame.kind, "")
        if does:
            what = f"{blame.hosts[0]} is slow: it {does} at {format_rate(speed)} ({len(blame.bad)} of {blame.tried} ways), other links reach {format_rate(reference)}"
        else:
            noun = "the way" if blame.kind == "split" else "the link"
            what = (
                f"{noun} {_name_way(blame)} is slow: {format_rate(speed)}, other links reach {format_rate(reference)}"
            )
        yield warn(
            what, "a ring is as fast as its slowest link: in each all-reduce all hosts wait for this one" + _either_side(blame, reports),
            _look_at_interfaces(blame, reports), hosts=blame.hosts
        )  # fmt: skip


def _report_far(measures: Sequence[Measure], reports: dict[str, HostReport]) -> Iterator[Reading]:
    trips = {one.way: one.latency_s for one in measures}
    for blame in _blame(measures, trips, _find_far(measures)):
        late_s = statistics.median(trips[way] for way in blame.bad)
        usual_s = sorted(trips.values())[len(trips) // 4]
        target = reports[blame.bad[0][1]]
        yield warn(
            f"a round trip {_name_way(blame)} takes {format_seconds(late_s)}, elsewhere {format_seconds(usual_s)}",
            "each collective makes several round trips: small ones are that much slower on all hosts" + _either_side(blame, reports),
            f"# on {blame.bad[0][0]}:\ntraceroute {target.address}  # which way do the packets take?", hosts=blame.hosts
        )  # fmt: skip


def _blame_loss(measures: Sequence[Measure]) -> list[Blame]:
    tried = [one.way for one in measures if one.resent is not None]
    return _blame(measures, tried, _find_lossy(measures))


def _report_lossy(measures: Sequence[Measure], reports: dict[str, HostReport]) -> Iterator[Reading]:
    resent = {one.way: one.resent or 0.0 for one in measures}
    for blame in _blame_loss(measures):
        share = statistics.median(resent[way] for way in blame.bad)
        yield Reading(
            "fail" if share > _VERY_LOSSY else "warn",
            f"packets {_name_way(blame)} get lost: {share:.1%} had to be sent again ({len(blame.bad)} of {blame.tried} ways)",
            "TCP slows down to a fraction at each loss, and a lost packet holds all ranks up for 0.2 s and more" + _either_side(blame, reports),
            _look_at_interfaces(blame, reports), hosts=blame.hosts
        )  # fmt: skip


def _name_way(blame: Blame) -> str:
    if blame.kind == "all":
        return "on all ways"
    if blame.kind == "split":
        *groups, last = map(join_names, blame.groups)
        return f"between {', '.join(groups)} and, on the other side, {last}"
    if blame.kind != "link":
        return {"in": "to", "out": "from"}.get(blame.kind, "from and to") + f" {blame.hosts[0]}"
    source, target = blame.hosts
    return f"between {source} and {target}" if len(blame.bad) == 2 else f"from {source} to {target}"


def _either_side(blame: Blame, reports: dict[str, HostReport]) -> str:
    return ". With two hosts either side may be the cause" * (blame.kind == "link" and len(reports) == 2)


def _look_at_interfaces(blame: Blame, reports: dict[str, HostReport]) -> str:
    if blame.kind == "split":
        source, target = blame.bad[0]
        return f"# the way from {source} to {target}: how fast is what is between their switches?\ntraceroute {reports[target].address}"
    lines = []
    for name in blame.hosts if blame.kind != "all" else blame.hosts[:1]:
        taken = reports[name].find_interface(reports[name].gloo_address, reports[name].address) or "IFACE"
        lines += [
            f"# on {name}: speed and errors of its cable, and what shapes or drops its traffic",
            f"ip -s link show dev {taken}; tc -s qdisc show dev {taken}",
            f"ethtool {taken} | grep -E 'Speed|Duplex'; sudo nft list ruleset",
        ]
    return "\n".join(lines)
