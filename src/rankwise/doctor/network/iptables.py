"""Reads what `iptables-save` prints."""

from __future__ import annotations

import ipaddress
import re
import shlex
from dataclasses import dataclass, field
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
#: Matches that ask for nothing by themselves; ``-m socket`` alone does.
_PLAIN_MATCHES = {"tcp", "udp", "icmp", "multiport", "comment", "conntrack", "state", "addrtype"}
#: Texts, which may look like an option.
_TEXTS = {"--comment", "--log-prefix", "--nflog-prefix", "--reject-with", "--log-level", "--nflog-group"}
_OPTION = re.compile(r"--?[A-Za-z]")


@dataclass(slots=True)
class _Option:
    """An option of a rule with the words that belong to it: all up to the next option."""

    name: str
    is_not: bool = False
    values: list[str] = field(default_factory=list)


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
            name, rule = _read_rule(line, set(chains))
            chains.setdefault(name, Chain()).rules.append(rule)
    return chains


def _read_rule(line: str, chains: set[str]) -> tuple[str, Rule]:
    try:
        words = shlex.split(line)
    except ValueError:  # a quote that does not end
        return line.split()[1], Rule(conditions=(lambda _: None,), action="unknown")
    conditions: list[Condition] = []
    action: Action = "none"
    target = ""
    for option in _split_options(words[2:]):
        value = option.values[0] if len(option.values) == 1 else ""
        if option.name in {"-j", "--jump", "-g", "--goto"}:
            target = value
            action = _ACTIONS.get(value, "none" if value in _PASSING else "unknown")
            if value in chains:
                action = "jump" if option.name in {"-j", "--jump"} else "goto"
        elif option.name not in _TEXTS | {"--log-ip-options"} and not (
            option.name in {"-m", "--match"} and value in _PLAIN_MATCHES
        ):
            conditions.append(_read_condition(option))
    return words[1], Rule(conditions=tuple(conditions), action=action, target=target)


def _split_options(words: list[str]) -> list[_Option]:
    found: list[_Option] = []
    is_not = False
    for word in words:
        last = found[-1] if found else None
        if last is not None and last.name in _TEXTS and not last.values:
            last.values.append(word)
        elif word == "!":
            is_not = True
        elif last is None or _OPTION.match(word):
            found.append(_Option(word, is_not))
            is_not = False
        else:
            last.values += ["!", word] if is_not else [word]
            is_not = False
    return found


def _read_condition(option: _Option) -> Condition:
    def ask(packet: Packet) -> bool | None:
        answer = _ask(option.name, option.values, packet)
        return None if answer is None else answer != option.is_not

    return ask


def _ask(option: str, values: list[str], packet: Packet) -> bool | None:
    """Tell whether a packet has what an option asks for; None for an option that is not known with these words."""
    if option in {"--syn", "--tcp-flags"}:
        wanted = ["FIN,SYN,RST,ACK", "SYN"] if option == "--syn" and not values else values
        return _has_flags(wanted[0].split(","), wanted[1].split(",")) if len(wanted) == 2 else None
    if len(values) != 1:
        return None
    value = values[0]
    if option in {"-s", "--source", "-d", "--destination"}:
        return _is_in_networks(packet.source if option in {"-s", "--source"} else packet.target, value)
    if option in {"-i", "--in-interface"}:
        return packet.interface.startswith(value[:-1]) if value.endswith("+") else packet.interface == value
    if option in {"--dport", "--destination-port", "--dports", "--destination-ports"}:
        return any(_is_in(packet.port, one) for one in value.split(","))
    return _ask_kind(option, value)


def _ask_kind(option: str, value: str) -> bool | None:
    answers: dict[str, bool] = {
        "-p": value in {"tcp", "all", "6", "0"},
        "--protocol": value in {"tcp", "all", "6", "0"},
        "--ctstate": "NEW" in value.split(","),
        "--state": "NEW" in value.split(","),
        "--icmp-type": False,
    }
    if option == "--dst-type" and value == "LOCAL":
        return True
    return answers.get(option)


def _has_flags(looked_at: list[str], wanted: list[str]) -> bool:
    """Tell whether the first packet of a connection, which has the flag SYN alone, is one with these flags."""
    is_looked_at = "SYN" in looked_at or "ALL" in looked_at
    return {one for one in wanted if one != "NONE"} == ({"SYN"} if is_looked_at else set())


def _is_in_networks(ip: str, value: str) -> bool | None:
    try:
        networks = [ipaddress.ip_network(one, strict=False) for one in value.split(",")]
    except ValueError:  # a mask with holes
        return None
    return any(ipaddress.ip_address(ip) in one for one in networks)


def _is_in(port: int, part: str) -> bool:
    low, colon, high = part.partition(":")
    first = int(low) if low.isdecimal() else 0
    last = (int(high) if high.isdecimal() else 65535) if colon else first
    return first <= port <= last
