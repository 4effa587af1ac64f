"""The command that lets this host's connections out, where its own firewall is in their way."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rankwise.doctor.network.firewalls import find_firewall
from rankwise.doctor.network.nftables import read_nftables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.doctor.host import Host
    from rankwise.doctor.network.rules import Chain
    from rankwise.doctor.reading import Fact

_OPEN_UFW = "sudo ufw prepend allow out proto tcp to {network}"
_MAKE_POLICY = (
    "sudo firewall-cmd --permanent --new-policy=ranks-out",
    "sudo firewall-cmd --permanent --policy=ranks-out --add-ingress-zone=HOST",
    "sudo firewall-cmd --permanent --policy=ranks-out --add-egress-zone=ANY",
)
_OPEN_POLICY = "sudo firewall-cmd --permanent --policy=ranks-out --add-rich-rule='rule family={family} destination address={network} accept'"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    """A chain of nftables that all packets go through on their way out."""

    family: str
    table: str
    name: str


def suggest_outgoing(host: Host, networks: Sequence[str]) -> str:
    """Return the commands that let TCP out to some networks, one a line, for what stands in its way on this host.

    Each chain at the way out decides alone, and a drop in one is not undone by another: all that may drop are opened.

    Args:
        host: The host that shall reach the others.
        networks: Whither, as ``10.0.0.0/24``.

    Returns:
        The commands; a comment with what to do if nothing here is in the way.
    """
    firewall = find_firewall(host)
    chains = firewall.chains or {}
    has_tables = _may_drop(chains, "OUTPUT")
    outputs = _list_outputs(host, skip_iptables="OUTPUT" in chains)
    lines = []
    for network in networks:
        family = "ip6" if ":" in network else "ip"
        if has_tables and firewall.program == "ufw":
            lines.append(_OPEN_UFW.format(network=network))
        elif has_tables:
            command = "iptables" if family == "ip" else "ip6tables"
            lines.append(f"sudo {command} -I OUTPUT -p tcp -d {network} -j ACCEPT")
        lines += [
            f"sudo nft insert rule {one.family} {one.table} {one.name} {family} daddr {network} meta l4proto tcp accept"
            for one in outputs if one.family in {"inet", family} and one.table != "firewalld"
        ]  # fmt: skip
    if any(one.table == "firewalld" for one in outputs):
        lines += [*_MAKE_POLICY, *(_OPEN_POLICY.format(family="ipv6" if ":" in one else "ipv4", network=one) for one in networks)]  # fmt: skip
        lines.append("sudo firewall-cmd --reload")
    return (
        "\n".join(lines)
        or f"# let TCP out to {', '.join(networks)}: in the firewall of this host, or of the cloud (security group)"
    )


def _list_outputs(host: Host, *, skip_iptables: bool) -> list[_Output]:
    """Return the chains of nftables at the way out that may drop something."""
    listed = host.run("nft", "--json", "list", "ruleset")
    if not listed.is_good:
        return []
    tables = {(one.family, one.name): one for one in read_nftables(listed.out)}
    found = []
    for chain in _list_base_chains(listed.out):
        one = _Output(family=str(chain["family"]), table=str(chain["table"]), name=str(chain["name"]))
        # iptables keeps its rules there, too: it tells more of them.
        is_iptables = skip_iptables and (one.family, one.table, one.name) == ("ip", "filter", "OUTPUT")
        table = tables.get((one.family, one.table))
        if not is_iptables and (table is None or _may_drop(table.chains, one.name)):
            found.append(one)
    return found


def _list_base_chains(text: str) -> list[Mapping[str, Fact]]:
    try:
        told = json.loads(text)
    except ValueError:
        return []
    entries = cast("list[dict[str, dict[str, Fact]]]", told.get("nftables") if isinstance(told, dict) else [])
    chains = [one["chain"] for one in entries or [] if "chain" in one]
    return [one for one in chains if one.get("hook") == "output" and one.get("type") == "filter"]


def _may_drop(chains: Mapping[str, Chain], name: str) -> bool:
    """Tell whether a chain, or one that it leads to, drops anything, or does what can't be told."""
    seen, waiting = set[str](), [name]
    while waiting:
        name = waiting.pop()
        chain = chains.get(name)
        if chain is None or name in seen:
            continue
        seen.add(name)
        if chain.policy == "drop" or any(one.action in {"drop", "unknown"} for one in chain.rules):
            return True
        waiting += [one.target for one in chain.rules if one.action in {"jump", "goto"}]
    return False
