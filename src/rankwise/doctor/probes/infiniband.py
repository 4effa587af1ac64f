"""InfiniBand and RoCE: ports, their speed, and whether ranks may use them.

**Why it matters.** Where no port is active, or a container lacks `/dev/infiniband`, NCCL falls back to TCP, many times slower, and says so only
with `NCCL_DEBUG=INFO`. If a process may lock only little memory, NCCL fails: the probe `limits` looks at that.

**How it is checked.** The kernel's files in `/sys/class/infiniband`, and the device files. Of several hosts,
the number of active ports and their speed are compared. Amazon's EFA, which needs a plugin of NCCL, is left out.

**What to do.** `ibstat` shows more about a port that is down; check the cable, the switch, and the subnet manager (`opensm`).
Containers get the devices by `--device=/dev/infiniband`, and the right to lock memory by `--cap-add=IPC_LOCK --ulimit memlock=-1`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rankwise.doctor.differences import report_difference
from rankwise.doctor.host import Host
from rankwise.doctor.network.gloo_nccl import list_rdma_devices, uses_nccl
from rankwise.doctor.probe import Facts, Probe, Reading, ok, warn


def look(host: Host) -> Iterator[Reading]:
    root = "/sys/class/infiniband"
    devices = list_rdma_devices(host)
    if not devices:
        why = "this host has no InfiniBand or RoCE device"
        yield Reading("skipped", "InfiniBand", why, facts={"active": 0})
        return
    info, rates = [], []
    for port in (f"{one}/ports/{number}" for one in devices for number in host.names(f"{root}/{one}/ports")):
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
        yield warn(f"no InfiniBand port is active: {what}", why, "ibstat", facts={"active": 0})
        return
    yield ok(what, active=len(rates), rate=", ".join(sorted(set(rates))))
    has_files = any(name.startswith("uverbs") for name in host.names("/dev/infiniband"))
    if rates and not has_files and uses_nccl(host):
        yield warn(
            "there are InfiniBand ports, but no /dev/infiniband/uverbs0", why,
            "docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1 …  # outside of a container: sudo modprobe ib_uverbs"
        )  # fmt: skip


def _compare(facts: Mapping[str, Facts]) -> Iterator[Reading]:
    why, fix = "all hosts are as slow as the slowest one", "ibstat  # on the hosts that have less"
    yield from report_difference(facts, "active", "active ports of InfiniBand differ", why, fix)
    yield from report_difference(facts, "rate", "the speed of InfiniBand's ports differ", why, fix)


PROBE = Probe("infiniband", "InfiniBand and RoCE", "network", "instant", look, compare=_compare)
