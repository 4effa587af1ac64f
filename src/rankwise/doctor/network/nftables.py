"""Reads what `nft --json list ruleset` prints."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from rankwise.doctor.network.rules import Chain, Rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.doctor.network.rules import Action, Condition, Packet
    from rankwise.doctor.reading import Fact

    Part = Mapping[str, Fact]

_VERDICTS: dict[str, Action] = {
    "accept": "accept", "drop": "drop", "reject": "drop", "return": "return", "jump": "jump", "goto": "goto", "queue": "unknown"
}  # fmt: skip
#: Of these a connection by TCP over IPv4 has no field at all.
_OTHER_PROTOCOLS = {
    "udp",
    "udplite",
    "icmp",
    "icmpv6",
    "igmp",
    "ip6",
    "sctp",
    "dccp",
    "esp",
    "ah",
    "comp",
    "arp",
}
#: Statements that decide nothing.
_PASSING = {"counter", "log", "comment", "notrack", "mangle", "meter"}


@dataclass(slots=True, kw_only=True)
class Table:
    """One table of nftables.

    Attributes:
        family, name: As in ``inet filter``.
        chains: By name.
        inputs: Those that packets to this host go through.
        has_iptables: Whether iptables has made it; then `iptables-save` tells more of it.
    """

    family: str
    name: str
    chains: dict[str, Chain] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    has_iptables: bool = False


def read_nftables(text: str) -> list[Table]:
    """Return the tables that IPv4 goes through; none if the text is something else."""
    try:
        told = json.loads(text)
    except ValueError:
        return []
    entries = (
        cast("list[dict[str, dict[str, Fact]]]", told.get("nftables") if isinstance(told, dict) else None)
        or []
    )
    tables: dict[tuple[str, str], Table] = {}
    sets = {
        (str(told["family"]), str(told["table"]), str(told["name"])): told.get("elem")
        for one in entries
        for kind in ("set", "map")
        if (told := one.get(kind)) is not None
    }
    for entry in entries:
        for kind in ("chain", "rule"):
            one = entry.get(kind)
            if one is not None and one.get("family") in {"ip", "inet"}:
                key = str(one["family"]), str(one["table"])
                table = tables.setdefault(key, Table(family=key[0], name=key[1]))
                own = {name: elements for (*where, name), elements in sets.items() if tuple(where) == key}
                _add_chain(table, one) if kind == "chain" else _add_rule(table, one, own)
    return list(tables.values())


def _add_chain(table: Table, one: Part) -> None:
    name = str(one["name"])
    is_base = "hook" in one
    table.chains[name] = Chain(
        policy=("drop" if one.get("policy") == "drop" else "accept") if is_base else None
    )
    if one.get("hook") == "input" and one.get("type") == "filter":
        table.inputs.append(name)


def _add_rule(table: Table, one: Part, sets: Mapping[str, Fact]) -> None:
    conditions: list[Condition] = []
    action: Action = "none"
    target = ""
    rules: list[Rule] = []
    expressions = one.get("expr")
    for part in expressions if isinstance(expressions, list) else []:
        if not isinstance(part, dict):
            continue
        key, value = next(iter(part.items()))
        if key in _VERDICTS:
            action, target = _read_verdict(part)
        elif key == "match" and isinstance(value, dict):
            conditions.append(_read_match(value, sets))
        elif key == "vmap" and isinstance(value, dict):
            rules += _read_map(value, sets, tuple(conditions))
        elif key not in _PASSING:
            conditions.append(lambda _: None)
            action = "unknown" if key == "xt" else action
            table.has_iptables |= key == "xt"
    rules.append(Rule(conditions=tuple(conditions), action=action, target=target))
    table.chains.setdefault(str(one["chain"]), Chain()).rules.extend(rules)


def _read_verdict(part: Part) -> tuple[Action, str]:
    key, value = next(iter(part.items()))
    target = str(value["target"]) if isinstance(value, dict) and "target" in value else ""
    return _VERDICTS.get(key, "unknown"), target


def _read_map(vmap: Part, sets: Mapping[str, Fact], conditions: tuple[Condition, ...]) -> list[Rule]:
    """Read ``ct state vmap { established : accept, invalid : drop }``: one rule for each key, as the keys exclude each other."""
    told = vmap.get("data")
    elements = sets.get(told[1:]) if isinstance(told, str) and told.startswith("@") else told
    if isinstance(elements, dict):
        elements = elements.get("set")
    if not isinstance(elements, list):
        return [Rule(conditions=(*conditions, lambda _: None), action="unknown")]
    found: list[Rule] = []
    for pair in elements:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[1], dict):
            return [Rule(conditions=(*conditions, lambda _: None), action="unknown")]
        action, target = _read_verdict(pair[1])
        fits = _read_match({"op": "==", "left": vmap.get("key"), "right": pair[0]}, sets)
        # ``continue`` goes on to the next rule, and "none" does, too.
        action = "none" if "continue" in pair[1] else action
        found.append(Rule(conditions=(*conditions, fits), action=action, target=target))
    return found


def _read_match(match: Part, sets: Mapping[str, Fact]) -> Condition:
    left, right, sign = match.get("left"), match.get("right"), match.get("op")

    def ask(packet: Packet) -> bool | None:
        value = _find_value(left, packet) if isinstance(left, dict) else None
        if value is None or isinstance(value, bool):
            return value
        wanted = sets.get(right[1:]) if isinstance(right, str) and right.startswith("@") else right
        if sign in {"<", ">", "<=", ">="}:
            return _compare(value, str(sign), wanted)
        answer = _is_among(value, wanted)
        return None if answer is None else answer != (sign == "!=")

    return ask


def _find_value(left: Part, packet: Packet) -> str | int | bool | None:
    """Return what a packet has in a field; False if it has no such field, None if that can't be told."""
    kind, told = next(iter(left.items()))
    if not isinstance(told, dict):
        return None
    name = str(told.get("key") or told.get("field") or "")
    if kind == "ct":
        # Nobody has translated the address of a packet that is meant for us.
        return {"state": "new", "status": "none"}.get(name)
    if kind == "meta":
        return {
            "iifname": packet.interface,
            "iif": packet.interface,
            "l4proto": "tcp",
            "nfproto": "ipv4",
            "protocol": "ip",
        }.get(name)
    if kind != "payload":
        return None
    fields: dict[str, dict[str, str | int]] = {
        "tcp": {"dport": packet.port}, "th": {"dport": packet.port}, "ip": {"saddr": packet.source, "daddr": packet.target, "protocol": "tcp"},
    }  # fmt: skip
    protocol = str(told.get("protocol"))
    return (
        fields[protocol].get(name) if protocol in fields else False if protocol in _OTHER_PROTOCOLS else None
    )


def _compare(value: str | int, sign: str, wanted: Fact) -> bool | None:
    if not isinstance(value, int) or not isinstance(wanted, int):
        return None
    return {"<": value < wanted, ">": value > wanted, "<=": value <= wanted, ">=": value >= wanted}[sign]


def _is_among(value: str | int, wanted: Fact) -> bool | None:
    """Tell whether a value is one of those that a rule names: itself, a list, a set, a range, a network."""
    if isinstance(wanted, list):
        answers = [_is_among(value, one) for one in wanted]
        return True if True in answers else None if None in answers else False
    if isinstance(wanted, dict):
        return _is_in(value, wanted)
    if wanted is None:
        return None
    return str(value) == str(wanted) or (
        isinstance(wanted, str) and wanted.endswith("*") and str(value).startswith(wanted[:-1])
    )


def _is_in(value: str | int, wanted: Part) -> bool | None:
    kind, told = next(iter(wanted.items()))
    if kind == "set":
        return _is_among(value, told)
    if kind == "elem" and isinstance(told, dict):
        return _is_among(value, told.get("val"))
    if kind == "range" and isinstance(told, list) and len(told) == 2:
        return _is_between(value, told[0], told[1])
    if kind == "prefix" and isinstance(told, dict) and isinstance(value, str):
        return _is_between_network(value, f"{told.get('addr')}/{told.get('len')}")
    return None


def _is_between(value: str | int, low: Fact, high: Fact) -> bool | None:
    if isinstance(value, int) and isinstance(low, int) and isinstance(high, int):
        return low <= value <= high
    try:
        first, ip, last = (int(ipaddress.ip_address(str(one))) for one in (low, value, high))
    except ValueError:
        return None
    return first <= ip <= last


def _is_between_network(ip: str, network: str) -> bool | None:
    try:
        return ipaddress.ip_address(ip) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return None
