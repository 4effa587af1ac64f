"""Which hosts of a set differ in one fact, and the finding about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rankwise.doctor.probe import Fact, Facts, Reading

#: So many hosts are named.
_MOST = 8


def report_difference(
    facts: Mapping[str, Facts], name: str, what: str, why: str, fix: str, class_id: str = ""
) -> Iterator[Reading]:
    """Yield a reading if the hosts differ in a fact: a failure if it leads to a failure class.

    In ``fix``, ``{most}`` stands for the most common value.
    """
    groups = group_hosts(facts, name)
    if len(groups) > 1:
        what, fix = f"{what}: {format_groups(groups)}", fix.replace("{most}", next(iter(groups)))
        yield Reading("fail" if class_id else "warn", what, why, fix, class_id, hosts=find_odd_hosts(groups))


def group_hosts(facts: Mapping[str, Facts], name: str) -> dict[str, list[str]]:
    """Return the hosts by the value of one fact: see `group_values`."""
    return group_values({host: info.get(name) for host, info in facts.items()})


def group_values(values: Mapping[str, Fact]) -> dict[str, list[str]]:
    """Return the hosts by their values, as text, the most common value first; hosts without one, or with an empty one, are left out."""
    found: dict[str, list[str]] = {}
    for host, value in values.items():
        if value not in (None, "", [], {}):
            found.setdefault(str(value), []).append(host)
    return dict(sorted(found.items(), key=lambda one: -len(one[1])))


def format_groups(groups: Mapping[str, list[str]]) -> str:
    """Describe which hosts have which value: ``2.13.0: a, b; 2.12.0: c``."""
    more = {value: f" and {len(hosts) - _MOST} more" * (len(hosts) > _MOST) for value, hosts in groups.items()}
    return "; ".join(f"{value or 'none'}: {', '.join(hosts[:_MOST])}{more[value]}" for value, hosts in groups.items())


def find_odd_hosts(groups: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Return the hosts that are not of the most common value; all of them if no value is the most common."""
    sizes = [len(hosts) for hosts in groups.values()]
    first = 1 if sizes.count(max(sizes, default=0)) == 1 else 0
    return tuple(host for hosts in list(groups.values())[first:] for host in hosts)
