"""Reads what `iptables-save` prints."""

from __future__ import annotations

import ipaddress
import shlex
from typing import TYPE_CHECKING

from rankwise.doctor.network.rules import Chain, Rule

if TYPE_CHECKING:
    from rankwise.doctor.network.rules import Action, Condition, Packet

_ACTIONS: dict[str, Action] = {
    "ACCEPT": "accept",
    "DROP": "drop",
    "REJECT": "drop",
    "TARPIT": "drop",
    "RETURN": "return",
}
#: Targets after which the rules go on.
_PASSING = {
    "LOG",
    "NFLOG",
    "ULOG",
    "MARK",
    "CONNMARK",
    "TRACE",
    "AUDIT",
    "CT",
    "NOTRACK",
    "TCPMSS",
    "CLASSIFY",
    "",
}
_PARTS = {
    "-m",
    "--match",
    "--comment",
    "--reject-with",
    "--log-prefix",
    "--log-level",
    "--nflog-group",
    "--nflog-prefix",
}
_BARE = {"--syn", "--log-ip-options"}


def read_iptables(text: str) -> dict[str, Chain]:
    """Return the chains of the table ``filter`` by name."""
    chains: dict[str, Chain] = {}
    table = ""
    for line in text.splitlines():
        if line.startswith("*"):
            table = line[1:].strip()
        elif table == "filter" and line.startswith(":"):
            name, policy = line[1:].split()[:2]
            chains[name] = Chain(
                policy="accept" if policy == "ACCEPT" else "drop" if policy == "DROP" else None
            )
        elif table == "filter" and line.startswith("-A "):
            words = shlex.split(line)
            chains.setdefault(words[1], Chain()).rules.append(_read_rule(words[2:], set(chains)))
    return chains


def _read_rule(words: list[str], chains: set[str]) -> Rule:
    conditions: list[Condition] = []
    action: Action = "none"
    target, is_not = "", False
    rest = iter(words)
    for option in rest:
        if option == "!":
            is_not = True
            continue
        value = "" if option in _BARE else next(rest, "")
        if option in {"-j", "--jump", "-g", "--goto"}:
            target = value
            action = _ACTIONS.get(value, "none" if value in _PASSING else "unknown")
            if value in chains:
                action = "jump" if option in {"-j", "--jump"} else "goto"
        elif option not in _PARTS:
            conditions.append(_read_condition(option, value, is_not=is_not))
        is_not = False
    return Rule(conditions=tuple(conditions), action=action, target=target)


def _read_condition(option: str, value: str, *, is_not: bool) -> Condition:
    def ask(packet: Packet) -> bool | None:
        answer = _ask(option, value, packet)
        return None if answer is None else answer != is_not

    return ask


def _ask(option: str, value: str, packet: Packet) -> bool | None:
    if option in {"-s", "--source", "-d", "--destination"}:
        ip = packet.source if option in {"-s", "--source"} else packet.target
        return any(
            ipaddress.ip_address(ip) in ipaddress.ip_network(one, strict=False) for one in value.split(",")
        )
    if option in {"-i", "--in-interface"}:
        return packet.interface.startswith(value[:-1]) if value.endswith("+") else packet.interface == value
    if option in {"--dport", "--destination-port", "--dports", "--destination-ports"}:
        return any(_is_in(packet.port, one) for one in value.split(","))
    answers: dict[str, bool] = {
        "-p": value in {"tcp", "all", "6", "0"},
        "--protocol": value in {"tcp", "all", "6", "0"},
        "--ctstate": "NEW" in value.split(","),
        "--state": "NEW" in value.split(","),
        "--syn": True,
        "--icmp-type": False,
    }
    if option == "--dst-type" and value == "LOCAL":
        return True
    return answers.get(option)


def _is_in(port: int, part: str) -> bool:
    low, colon, high = part.partition(":")
    first = int(low) if low.isdecimal() else 0
    last = (int(high) if high.isdecimal() else 65535) if colon else first
    return first <= port <= last
