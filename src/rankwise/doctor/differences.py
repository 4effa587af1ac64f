"""Which hosts of a set differ in one fact, and how that is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.doctor.reading import Facts


def group_hosts(facts: Mapping[str, Facts], name: str) -> dict[str, list[str]]:
    """Return the hosts by the value of one fact, as text, the most common value first; hosts without it, or with an empty one, are left out."""
    found: dict[str, list[str]] = {}
    for host, told in facts.items():
        value = told.get(name)
        if value not in (None, "", [], {}):
            found.setdefault(str(value), []).append(host)
    return dict(sorted(found.items(), key=lambda one: -len(one[1])))


def say_groups(groups: Mapping[str, list[str]], *, most: int = 8) -> str:
    """Say which hosts have which value: ``2.13.0: a, b; 2.12.0: c``."""

    def name(hosts: list[str]) -> str:
        return ", ".join(hosts[:most]) + (f" and {len(hosts) - most} more" if len(hosts) > most else "")

    return "; ".join(f"{value or 'none'}: {name(hosts)}" for value, hosts in groups.items())


def find_odd_hosts(groups: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Return the hosts that are not of the most common value; all of them if no value is the most common."""
    sizes = [len(hosts) for hosts in groups.values()]
    first = 1 if sizes.count(max(sizes, default=0)) == 1 else 0
    return tuple(host for hosts in list(groups.values())[first:] for host in hosts)
