"""Attributes bad links: to what lies between groups of hosts, to one host, to single pairs of hosts, or to everything."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from rankwise.doctor.multi_host.cluster_report import Way


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """What explains some bad ways.

    Attributes:
        kind: ``in``, ``out``, ``both``: a host's ways; ``link``: between two hosts, one way or both; ``split``: between
            groups of hosts; ``all``: none is good.
        hosts: The host; of a link both of them, the source first; of a split all that are in its groups.
        bad: The ways that it explains.
        tried: How many of this kind were tried.
        groups: Of a split: hosts whose ways to each other are good.
    """

    kind: Literal["in", "out", "both", "link", "split", "all"]
    hosts: tuple[str, ...]
    bad: tuple[Way, ...]
    tried: int
    groups: tuple[tuple[str, ...], ...] = ()


def find_blames(tried: Collection[Way], bad: Collection[Way]) -> list[Blame]:
    """Explain bad ways, of all that were tried, by as few culprits as possible.

    Returns:
        What lies between groups of hosts that are well among themselves; hosts of which most ways in or out are bad,
        those with the most first; then links. With two hosts there are only links.
    """
    hosts = sorted({host for way in tried for host in way})
    left = set(bad)
    if len(hosts) > 2 and left and left == set(tried):
        return [Blame(kind="all", hosts=tuple(hosts), bad=tuple(sorted(left)), tried=len(tried))]
    remaining, found = set(tried), list[Blame]()
    # Before single hosts: of two halves, each host has half of its links bad, and none of them is the cause.
    split = _find_split(hosts, remaining, left)
    if split is not None:
        left -= set(split.bad)
        remaining -= set(split.bad)
    while left and (blame := _find_worst(hosts, remaining, left)) is not None:
        found.append(blame)
        left -= set(blame.bad)
        # Its other links say nothing about other hosts.
        remaining -= {way for way in remaining if way[blame.kind == "in"] == blame.hosts[0]}
    return [*([split] if split else []), *_join_sides(found), *_list_links(left, tried)]


def _find_split(hosts: list[str], tried: set[Way], bad: set[Way]) -> Blame | None:
    """Return groups of two hosts and more between which nothing is good, one way at least."""
    groups = _find_groups(hosts, tried - bad, bad)
    shut = set[Way]()
    parted = set[int]()
    for one, group in enumerate(groups):
        for other, target in enumerate(groups):
            between = {way for way in product(group, target) if way in tried} if one != other else set()
            # Where few ways were tried, two bad links would look like it.
            if 2 * len(between) >= len(group) * len(target) and between and between <= bad:
                shut |= between
                parted |= {one, other}
    if not parted:
        return None
    found = tuple(tuple(groups[index]) for index in sorted(parted))
    named = tuple(sorted(host for group in found for host in group))
    return Blame(kind="split", hosts=named, bad=tuple(sorted(shut)), tried=len(shut), groups=found)


def _find_groups(hosts: list[str], good: set[Way], bad: set[Way]) -> list[list[str]]:
    """Return the hosts that are joined by ways of which none is bad, either way, where they are two and more."""
    place = {host: {host} for host in hosts}
    for source, target in good:
        if (target, source) not in bad and place[source] is not place[target]:
            merged = place[source] | place[target]
            place |= dict.fromkeys(merged, merged)
    groups = {id(group): group for group in place.values()}
    return [sorted(group) for group in groups.values() if len(group) > 1]


def _find_worst(hosts: list[str], tried: set[Way], bad: set[Way]) -> Blame | None:
    found = []
    # A firewall mostly blocks what comes in: that is tried first, and wins a draw.
    ends: tuple[tuple[Literal["in", "out"], int], ...] = (("in", 1), ("out", 0))
    for host, (kind, end) in product(hosts, ends):
        own = [way for way in tried if way[end] == host]
        own_bad = sorted(way for way in own if way in bad)
        if len(own_bad) >= 2 and 2 * len(own_bad) > len(own):
            found.append(Blame(kind=kind, hosts=(host,), bad=tuple(own_bad), tried=len(own)))
    return max(found, key=lambda one: (len(one.bad), len(one.bad) / one.tried, one.kind == "in"), default=None)


def _join_sides(blames: list[Blame]) -> list[Blame]:
    found: dict[tuple[str, ...], Blame] = {}
    for blame in blames:
        twin = found.get(blame.hosts)
        found[blame.hosts] = (
            blame
            if twin is None
            else replace(blame, kind="both", bad=twin.bad + blame.bad, tried=twin.tried + blame.tried)
        )
    return [*found.values()]


def _list_links(left: set[Way], tried: Collection[Way]) -> list[Blame]:
    found = []
    for pair in sorted({(min(way), max(way)) for way in left}):
        bad = tuple(way for way in (pair, pair[::-1]) if way in left)
        both = sum(way in tried for way in (pair, pair[::-1]))
        found.append(Blame(kind="link", hosts=(bad[0][0], bad[0][1]), bad=bad, tried=both))
    return found
