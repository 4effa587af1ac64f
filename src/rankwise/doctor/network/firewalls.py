"""Which firewall runs on this host, what it does with connections of other ranks, and the command that lets them in."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rankwise.doctor.network.iptables import read_iptables
from rankwise.doctor.network.nftables import read_nftables
from rankwise.doctor.network.rules import Packet, follow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.doctor.host import Host, Ran
    from rankwise.doctor.network.interfaces import Interface
    from rankwise.doctor.network.nftables import Table
    from rankwise.doctor.network.rules import Chain

Program = Literal["ufw", "firewalld", "iptables", "nftables", ""]
#: The kernel has no rules of this kind.
_NO_RULES = re.compile(r"not supported", re.IGNORECASE)
_REFUSED = re.compile(r"permi|root|denied|privilege", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Firewall:
    """What is known of this host's firewall.

    Attributes:
        program: By which it is ruled; empty if there is none, or none can be seen.
        tables: nftables' rules; ``chains`` are iptables'.
        why: Why its rules, or a part of them, can't be read; empty if they were.
    """

    program: Program = ""
    tables: tuple[Table, ...] = ()
    chains: dict[str, Chain] | None = None
    why: str = ""

    def drops(self, packet: Packet) -> bool | None:
        """Tell whether a packet does not come through; None if that depends on what can't be known here."""
        outcomes = [follow(self.chains, "INPUT", packet)] if self.chains else []
        # Of the tables that iptables has made, `iptables-save` tells more: only a certainty counts there.
        for table in self.tables:
            found = [follow(table.chains, name, packet) for name in table.inputs]
            outcomes += [one for one in found if one == {"drop"} or not (table.has_iptables and self.chains)]
        if {"drop"} in outcomes:
            return True
        return None if any(one & {"drop", "unknown"} for one in outcomes) else False


def find_firewall(host: Host) -> Firewall:
    """Ask the host's programs for its firewall and its rules; nothing is changed."""
    saved, listed = host.run("iptables-save"), host.run("nft", "--json", "list", "ruleset")
    chains = read_iptables(saved.out) if saved.is_good else None
    tables = tuple(table for table in read_nftables(listed.out) if table.inputs) if listed.is_good else ()
    return Firewall(
        program=_find_program(host, chains, tables), tables=tables, chains=chains, why=_explain_silence(saved, listed)
    )  # fmt: skip


def _explain_silence(saved: Ran, listed: Ran) -> str:
    """Say why rules may be there that were not told: a program is here, and did not tell those that it keeps."""
    asked = {"iptables-save": saved, "nft": listed}
    if all(_is_missing(told) for told in asked.values()):
        return "neither nft nor iptables can be queried here"
    failed = {
        name: told
        for name, told in asked.items()
        if not (told.is_good or _is_missing(told) or _NO_RULES.search(told.err))
    }
    if any(told.code is not None and _REFUSED.search(told.err) for told in failed.values()):
        return "only root may read the rules"
    said = [
        told.why or f"{name} ended with {told.code}: {' '.join(told.err.split())[:200]}"
        for name, told in failed.items()
    ]
    return "; ".join(said)


def _is_missing(told: Ran) -> bool:
    return told.code is None and "No such file" in told.why


def _find_program(host: Host, chains: dict[str, Chain] | None, tables: Sequence[Table]) -> Program:
    if "Status: active" in host.run("ufw", "status").out or re.search(
        r"^ENABLED=yes", host.read("/etc/ufw/ufw.conf"), re.MULTILINE
    ):
        return "ufw"
    if host.run("firewall-cmd", "--state").out.strip() == "running":
        return "firewalld"
    own = (chains or {}).get("INPUT")
    if own and (own.rules or own.policy == "drop"):
        return "iptables"
    return "nftables" if any(not table.has_iptables for table in tables) else ""


def suggest_opening(host: Host, networks: Sequence[str]) -> str:
    """Return the commands that let TCP in from some networks, one a line, for the firewall that runs on this host.

    Args:
        host: The host that shall be reached.
        networks: Whence, as ``10.0.0.0/24``.

    Returns:
        The commands; a comment with what to do if no firewall is found here.
    """
    firewall = find_firewall(host)
    lines = [line for network in networks for line in _open_for(firewall, network)]
    if not lines:
        return f"# let TCP in from {', '.join(networks)}: in the firewall of this host, or of the cloud (security group)"
    return "\n".join([*lines, "sudo firewall-cmd --reload"] if firewall.program == "firewalld" else lines)


def _open_for(firewall: Firewall, network: str) -> list[str]:
    is_ipv4 = ":" not in network
    match firewall.program:
        case "ufw":
            return [f"sudo ufw allow from {network} proto tcp"]
        case "firewalld":
            return [f"sudo firewall-cmd --permanent --zone=trusted --add-source={network}"]
        case "iptables":
            return [f"sudo {'iptables' if is_ipv4 else 'ip6tables'} -I INPUT -s {network} -p tcp -j ACCEPT"]
        case "nftables":
            family = "ip" if is_ipv4 else "ip6"
            return [
                f"sudo nft insert rule {table.family} {table.name} {name} {family} saddr {network} meta l4proto tcp accept"
                for table in firewall.tables for name in table.inputs if table.family in {"inet", family} and not table.has_iptables
            ]  # fmt: skip
        case _:
            return []


def make_packet(one: Interface, port: int) -> Packet | None:
    """Make the first packet of a neighbour's connection; None for an interface without neighbours of IPv4."""
    for address in one.reachable:
        network = ipaddress.ip_network(address.network)
        if address.is_ipv4 and network.num_addresses > 2:
            own = ipaddress.ip_address(address.ip)
            neighbour = own - 1 if own - 1 != network.network_address else own + 1
            return Packet(source=str(neighbour), target=address.ip, interface=one.name, port=port)
    return None
