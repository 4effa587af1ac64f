"""InfiniBand and RoCE: ports, their speed, and whether ranks may use them.

**Why it matters.** Where no port is active, or a container lacks `/dev/infiniband`, NCCL falls back to TCP, many times slower, and says so only
with `NCCL_DEBUG=INFO`. If a process may lock only little memory, NCCL fails: the probe `limits` looks at that.

**How it is checked.** The kernel's files in `/sys/class/infiniband`, and the device files. Of several hosts,
the number of active ports and their speed are compared. Amazon's EFA, which needs a plugin of NCCL, is left out.

**What to do.** `ibstat` shows more about a port that is down; check the cable, the switch, and the subnet manager (`opensm`).
Containers get the devices by `--device=/dev/infiniband`, and the right to lock memory by `--cap-add=IPC_LOCK --ulimit memlock=-1`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.doctor.differences import report_difference
from rankwise.doctor.network.gloo_nccl import list_rdma_devices, uses_nccl
from rankwise.doctor.probe import Probe, Reading, ok, skipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rankwise.doctor.host import Host
    from rankwise.doctor.probe import Facts


def look(host: Host) -> Iterator[Reading]:
    """Report the ports of InfiniBand and RoCE, and whether ranks may use them."""
    root = "/sys/class/infiniband"
    devices = list_rdma_devices(host)
    if not devices:
        yield replace(
            skipped("InfiniBand", "this host has no InfiniBand or RoCE device"), facts={"active": 0}
        )
        return
    info, rates = [], []
    for port in (
        f"{device}/ports/{number}" for device in devices for number in host.names(f"{root}/{device}/ports")
    ):
        state, rate = host.read(f"{root}/{port}/state"), host.read(f"{root}/{port}/rate")
        if state.endswith("ACTIVE"):
            rates.append(rate)
            state = rate.partition(" (")[0]
        else:
            physical = host.read(f"{root}/{port}/phys_state")
            state = f"{state.partition(': ')[2]} ({physical.partition(': ')[2]})"
        info.append(f"{port.replace('/ports/', ':')} {state}")
    what = ", ".join(info) or f"{', '.join(devices)} without a port"
    why = "NCCL falls back to TCP, many times slower"
    if not rates and uses_nccl(host):
        yield Reading(
            verdict="warn", what=f"no InfiniBand port is active: {what}", why=why, fix="ibstat", facts={"active": 0},
        )  # fmt: skip
        return
    yield ok(what, active=len(rates), rate=", ".join(sorted(set(rates))))
    has_files = any(name.startswith("uverbs") for name in host.names("/dev/infiniband"))
    if rates and not has_files and uses_nccl(host):
        yield Reading(
            verdict="warn", what="there are InfiniBand ports, but no /dev/infiniband/uverbs0", why=why,
            fix="docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1 …  # outside of a container: sudo modprobe ib_uverbs",
        )  # fmt: skip


def _compare(facts: Mapping[str, Facts]) -> Iterator[Reading]:
    for fact, words in (
        ("active", "active ports of InfiniBand"),
        ("rate", "the speed of InfiniBand's ports"),
    ):
        why, fix = "all hosts are as slow as the slowest one", "ibstat  # on the hosts that have less"
        yield from report_difference(facts, fact, f"{words} differ", why, fix)


PROBE = Probe("infiniband", "InfiniBand and RoCE", "network", "instant", look, compare=_compare)
