"""Which firewall runs on this host, its rules that name a port or a network, and the commands that let TCP through.

Rules are not followed: whether connections get through, the hosts try together.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rankwise.doctor.host import Host, ProgramResult


Program = Literal["ufw", "firewalld", "iptables", "nftables", ""]
Hook = Literal["input", "output"]
#: The kernel has no rules of this kind.
_NO_RULES = re.compile(r"not supported", re.IGNORECASE)
_REFUSED = re.compile(r"permi|root|denied|privilege", re.IGNORECASE)
_DROPS = re.compile(r"\b(drop|reject|tarpit|queue)\b", re.IGNORECASE)
_DROPS_ALL = re.compile(r"(-A \S+ -j )?(drop|reject)\b(?!.*\b(saddr|dport|-s|-p)\b)", re.IGNORECASE)
_ACCEPTS = re.compile(r"\b(accept|jump|goto|-[jg])\b", re.IGNORECASE)
#: Of an interface or of all: what has no other condition than the protocol.
_ACCEPTS_ALL = re.compile(
    r'(?:-A INPUT )?(?:(?:-i|iif|iifname) "?([^\s"]+)"? ?)?(?:-p tcp |meta l4proto tcp )?(?:counter packets \d+ bytes \d+ )?(?:-j ACCEPT|accept)'
)
_CALLS = re.compile(r"(?:\b(?:jump|goto)|-[jg]) (\S+)")
_FIREWALLD_OUT = (
    "sudo firewall-cmd --permanent --new-policy=ranks-out",
    "sudo firewall-cmd --permanent --policy=ranks-out --add-ingress-zone=HOST",
    "sudo firewall-cmd --permanent --policy=ranks-out --add-egress-zone=ANY",
)


@dataclass(slots=True, kw_only=True)
class Chain:
    """A chain of rules, as its program prints them; ``hook`` is where packets enter it, empty if other chains call it."""

    program: Literal["iptables", "nftables"]
    family: str
    table: str
    name: str
    hook: str = ""
    is_closed: bool = False
    rules: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Firewall:
    """What is known of this host's firewall; ``why`` says why its rules, or some of them, can't be read."""

    program: Program = ""
    chains: tuple[Chain, ...] = ()
    why: str = ""

    def is_closed(self) -> bool:
        """Return whether what comes in is dropped unless a rule accepts it."""
        own = [one for one in self.chains if one.hook == "input"]
        return any(one.is_closed or any(map(_DROPS_ALL.match, one.rules)) for one in own)

    def list_rules(self, port: int | None) -> list[str]:
        """Return the rules that name a port."""
        return [rule for one in self.chains for rule in one.rules if port and re.search(rf"\b{port}\b", rule)]

    def accepts(self, networks: Iterable[str], interface: str) -> bool:
        """Return whether a rule that names no port accepts one of some IPv4 networks, or a part of it, or all that comes in by their interface."""
        whole = (
            found for one in self.chains if one.hook == "input" for found in map(_ACCEPTS_ALL.fullmatch, one.rules)
        )
        if any(fnmatch(interface, (found[1] or "*").replace("+", "*")) for found in whole if found):
            return True
        own = [ipaddress.IPv4Network(one) for one in networks]
        named = [
            ipaddress.IPv4Network(word, strict=False)
            for one in self.chains for rule in one.rules if _ACCEPTS.search(rule) and not _DROPS.search(rule) and "dport" not in rule
            for word in re.findall(r"(?:-s|saddr) (\d+(?:\.\d+){3}(?:/\d+)?)", rule)
        ]  # fmt: skip
        return any(one.overlaps(other) for one in own for other in named)

    def list_dropping(self, hook: Hook) -> list[Chain]:
        """Return the chains at a hook that drop something, themselves or by a chain that they call."""
        return [one for one in self.chains if one.hook == hook and self._may_drop(one, set())]

    def _may_drop(self, chain: Chain, seen: set[str]) -> bool:
        if chain.is_closed or any(map(_DROPS.search, chain.rules)):
            return True
        called = {name for rule in chain.rules for name in _CALLS.findall(rule)} - seen
        return any(
            one.name in called and (one.program, one.family, one.table) == (chain.program, chain.family, chain.table)
            and self._may_drop(one, seen | called)
            for one in self.chains
        )  # fmt: skip


def find_firewall(host: Host) -> Firewall:
    """Query the host's programs for its firewall and its rules; nothing is changed."""
    saved, listed = host.run("iptables-save"), host.run("nft", "list", "ruleset")
    chains = _read_iptables(saved.out) if saved.is_good else []
    names = {one.name for one in chains}
    # What iptables keeps in nftables, iptables-save has printed already.
    nft = [
        one
        for one in (_read_nftables(listed.out) if listed.is_good else [])
        if (one.family, one.table) != ("ip", "filter") or one.name not in names
    ]
    why = _explain_silence(saved, listed)
    return Firewall(program=_find_program(host, chains, nft), chains=(*chains, *nft), why=why)


def suggest(firewall: Firewall, networks: Sequence[str], hook: Hook) -> str:
    """Return the commands that let TCP in from some networks (``10.0.0.0/24``), or out to them, one a line.

    Each chain decides alone, and a drop in one is not undone by another: all that may drop are opened. If nothing here
    is in the way, it is a comment with what to do.
    """
    is_in, chains, lines = hook == "input", firewall.list_dropping(hook), list[str]()
    for network in networks:
        family = "ip6" if ":" in network else "ip"
        if firewall.program == "ufw" and (is_in or any(one.program == "iptables" for one in chains)):
            lines.append(
                f"sudo ufw allow from {network} proto tcp" if is_in else f"sudo ufw prepend allow out proto tcp to {network}"
            )  # fmt: skip
        elif any(one.program == "iptables" for one in chains):
            command, side = "iptables" if family == "ip" else "ip6tables", "-s" if is_in else "-d"
            lines.append(f"sudo {command} -I {hook.upper()} -p tcp {side} {network} -j ACCEPT")
        lines += [
            f"sudo nft insert rule {one.family} {one.table} {one.name} {family} {'saddr' if is_in else 'daddr'} {network} meta l4proto tcp accept"
            for one in chains if one.program == "nftables" and one.table != "firewalld" and one.family in {"inet", family}
        ]  # fmt: skip
    if any(one.table == "firewalld" for one in chains) or (is_in and firewall.program == "firewalld"):
        lines += _open_firewalld(networks, is_in=is_in)
    way = "in from" if is_in else "out to"
    where = "in the firewall of this host, or of the cloud (security group)"
    return "\n".join(lines) or f"# let TCP {way} {', '.join(networks)}: {where}"


def _open_firewalld(networks: Sequence[str], *, is_in: bool) -> list[str]:
    if is_in:
        lines = [f"sudo firewall-cmd --permanent --zone=trusted --add-source={one}" for one in networks]
    else:
        rule = "sudo firewall-cmd --permanent --policy=ranks-out --add-rich-rule='rule family={} destination address={} accept'"
        lines = [*_FIREWALLD_OUT, *(rule.format("ipv6" if ":" in one else "ipv4", one) for one in networks)]
    return [*lines, "sudo firewall-cmd --reload"]


def _read_iptables(text: str) -> list[Chain]:
    """Read the table ``filter`` of what iptables-save prints."""
    found: dict[str, Chain] = {}
    table = ""
    for line in text.splitlines():
        words = line.split()
        if line.startswith("*"):
            table = line[1:].strip()
        elif table == "filter" and line.startswith(":") and len(words) > 1:
            name, hooks = words[0][1:], {"INPUT": "input", "OUTPUT": "output"}
            found[name] = Chain(
                program="iptables", family="ip", table=table, name=name, hook=hooks.get(name, ""), is_closed=words[1] == "DROP"
            )  # fmt: skip
        elif table == "filter" and words[:1] == ["-A"] and words[1] in found:
            found[words[1]].rules.append(line)
    return list(found.values())


def _read_nftables(text: str) -> list[Chain]:
    """Read what ``nft list ruleset`` prints."""
    found: list[Chain] = []
    family = table = ""
    is_chain = False
    for line in map(str.strip, text.splitlines()):
        words = line.split()
        if words[:1] == ["table"] and len(words) > 2:
            family, table = words[1:3]
        elif words[:1] == ["chain"]:
            found.append(Chain(program="nftables", family=family, table=table, name=words[1]))
        elif is_chain and words[:2] == ["type", "filter"] and len(words) > 3:
            found[-1].hook, found[-1].is_closed = words[3], "policy drop" in line
        elif is_chain and words and words[0] not in {"type", "}"}:
            found[-1].rules.append(line)
        if words and words[-1] in {"{", "}"} and words[0] in {"chain", "table", "set", "map", "}"}:
            is_chain = words[0] == "chain"
    return found


def _explain_silence(saved: ProgramResult, listed: ProgramResult) -> str:
    """Describe why there may be rules that were not printed: a program is here, and did not print those that it keeps."""
    asked = {"iptables-save": saved, "nft": listed}
    if all(_is_missing(ran) for ran in asked.values()):
        return "neither nft nor iptables can be queried here"
    bad = ((name, ran) for name, ran in asked.items() if not ran.is_good and not _is_missing(ran))
    failed = {name: ran for name, ran in bad if not _NO_RULES.search(ran.err)}
    if any(ran.code is not None and _REFUSED.search(ran.err) for ran in failed.values()):
        return "only root may read the rules"
    return "; ".join(
        ran.why or f"{name} ended with {ran.code}: {' '.join(ran.err.split())[:200]}" for name, ran in failed.items()
    )  # fmt: skip


def _is_missing(ran: ProgramResult) -> bool:
    return ran.code is None and "No such file" in ran.why


def _find_program(host: Host, iptables: Sequence[Chain], nftables: Sequence[Chain]) -> Program:
    enabled = re.search(r"^ENABLED=yes", host.read("/etc/ufw/ufw.conf"), re.MULTILINE)
    if "Status: active" in host.run("ufw", "status").out or enabled:
        return "ufw"
    if host.run("firewall-cmd", "--state").out.strip() == "running":
        return "firewalld"
    if any(one.hook == "input" and (one.rules or one.is_closed) for one in iptables):
        return "iptables"
    return "nftables" if any(one.hook == "input" for one in nftables) else ""
