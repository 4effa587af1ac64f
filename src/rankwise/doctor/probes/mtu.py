"""The largest packet of each interface (MTU).

**Why it matters.** Where one host sends packets of 9000 bytes and another, or a switch between them, takes 1500, small messages pass and
large ones vanish: the rendezvous succeeds, and the first large collective hangs.

**How it is checked.** The MTU of the interfaces that other hosts reach. 1500 is usual, 9000 is for fast networks, 1400 to 1450 is for
tunnels between virtual machines or pods. Of several hosts, those of the same network are compared.

**What to do.** Give the interface the MTU of the other hosts of its network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rankwise.doctor.host import Host
from rankwise.doctor.probe import Fact, Facts, Probe, Reading, ok, warn

#: The least that IPv6 takes; some tunnels have just that.
_LEAST = 1280


def look(host: Host) -> Iterator[Reading]:
    shown = [one for one in host.interfaces() if one.is_candidate and one.mtu]
    networks: dict[str, Fact] = {network: [one.name, one.mtu] for one in shown for network in one.networks}
    info = ", ".join(f"{one.name} {one.mtu}" for one in shown) or "no interface for other hosts"
    yield ok(info, networks=networks)
    for one in shown:
        if one.mtu < _LEAST:
            yield warn(
                f"{one.name} sends packets of {one.mtu} bytes at most", "transfers are slow, and IPv6 does not work",
                f"sudo ip link set dev {one.name} mtu 1500"
            )  # fmt: skip


def _compare(facts: Mapping[str, Facts]) -> Iterator[Reading]:
    by_network: dict[str, dict[str, tuple[str, int]]] = {}
    for host, info in facts.items():
        networks = info.get("networks")
        for network, value in networks.items() if isinstance(networks, dict) else ():
            if isinstance(value, list) and len(value) == 2:
                by_network.setdefault(network, {})[host] = (str(value[0]), int(str(value[1])))
    for network, hosts in by_network.items():
        sizes = sorted(mtu for _, mtu in hosts.values())
        common = max(sizes, key=sizes.count)
        odd = {host: one for host, one in hosts.items() if one[1] != common}
        if odd:
            yield warn(
                f"in {network} most hosts have MTU {common}, and " + ", ".join(f"{host} {name} {mtu}" for host, (name, mtu) in odd.items()),
                "small messages pass and large ones may vanish: the first large collective hangs, or is slow",
                "\n".join(f"sudo ip link set dev {name} mtu {common}  # on {host}" for host, (name, _) in odd.items()), hosts=tuple(odd)
            )  # fmt: skip


PROBE = Probe("mtu", "packet sizes", "network", "instant", look, compare=_compare)
