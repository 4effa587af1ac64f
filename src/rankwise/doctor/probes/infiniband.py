"""InfiniBand and RoCE: ports, their speed, and whether ranks may use them.

**Why it matters.** Where no port is active, or a container lacks `/dev/infiniband`, NCCL falls back to TCP, many times slower, and says so only
with `NCCL_DEBUG=INFO`. If a process may lock only little memory, NCCL fails: `ibv_reg_mr failed`, `Cannot allocate memory`.

**How it is checked.** The kernel's files in `/sys/class/infiniband`, the device files, and the limit of locked memory. Of several hosts,
the number of active ports and their speed are compared. Amazon's EFA, which needs a plugin of NCCL, is left out.

**What to do.** `ibstat` shows more about a port that is down; check the cable, the switch, and the subnet manager (`opensm`).
Containers get the devices by `--device=/dev/infiniband`, and the right to lock memory by `--cap-add=IPC_LOCK --ulimit memlock=-1`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rankwise.doctor.differences import report_difference
from rankwise.doctor.network.gloo_nccl import list_rdma_devices, uses_nccl
from rankwise.doctor.probe import Probe, Reading, ok, skipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rankwise.doctor.host import Host
    from rankwise.doctor.probe import Facts

_CAP_IPC_LOCK = 1 << 14
_LITTLE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Port:
    name: str
    state: str
    physical: str
    rate: str
    layer: str

    @property
    def is_active(self) -> bool:
        return self.state.endswith("ACTIVE")

    def __str__(self) -> str:
        info = (
            self.rate.partition(" (")[0]
            if self.is_active
            else f"{self.state.partition(': ')[2]} ({self.physical.partition(': ')[2]})"
        )
        return f"{self.name} {info}"


def look(host: Host) -> Iterator[Reading]:
    """Report the ports of InfiniBand and RoCE, and whether ranks may use them."""
    devices = list_rdma_devices(host)
    if not devices:
        yield replace(
            skipped("InfiniBand", "this host has no InfiniBand or RoCE device"), facts={"active": 0}
        )
        return
    ports = [
        _read_port(host, device, number)
        for device in devices
        for number in host.names(f"/sys/class/infiniband/{device}/ports")
    ]
    active = [port for port in ports if port.is_active]
    info = ", ".join(map(str, ports)) or f"{', '.join(devices)} without a port"
    if not active and uses_nccl(host):
        yield Reading(
            verdict="warn", what=f"no InfiniBand port is active: {info}", why="NCCL falls back to TCP, many times slower", fix="ibstat",
            facts={"active": 0},
        )  # fmt: skip
    else:
        yield ok(info, active=len(active), rate=", ".join(sorted({port.rate for port in active})))
    if active and uses_nccl(host):
        yield from _judge_access(host)


def _read_port(host: Host, device: str, number: str) -> _Port:
    folder = f"/sys/class/infiniband/{device}/ports/{number}"
    return _Port(
        name=f"{device}:{number}", state=host.read(f"{folder}/state"), physical=host.read(f"{folder}/phys_state"),
        rate=host.read(f"{folder}/rate"), layer=host.read(f"{folder}/link_layer"),
    )  # fmt: skip


def _judge_access(host: Host) -> Iterator[Reading]:
    if not any(name.startswith("uverbs") for name in host.names("/dev/infiniband")):
        yield Reading(
            verdict="warn", what="there are InfiniBand ports, but no /dev/infiniband/uverbs0", why="NCCL falls back to TCP, many times slower",
            fix="docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1 …  # outside of a container: sudo modprobe ib_uverbs",
        )  # fmt: skip
    limit = next(
        (
            line.split()
            for line in host.read("/proc/self/limits").splitlines()
            if line.startswith("Max locked memory")
        ),
        [],
    )
    capable = next(
        (
            line.split()[1]
            for line in host.read("/proc/self/status").splitlines()
            if line.startswith("CapEff:")
        ),
        "0",
    )
    may_lock = int(capable, 16) & _CAP_IPC_LOCK
    if len(limit) > 3 and limit[3].isdecimal() and int(limit[3]) < _LITTLE_BYTES and not may_lock:
        yield Reading(
            verdict="warn", what=f"a process may lock {int(limit[3]) >> 10} KiB of memory (ulimit -l), and InfiniBand needs it",
            why="NCCL fails when ranks connect: `ibv_reg_mr failed`, `Cannot allocate memory`",
            fix="ulimit -l unlimited  # if refused: '* - memlock unlimited' in /etc/security/limits.conf, or LimitMEMLOCK=infinity of the service",
        )  # fmt: skip


def _compare(facts: Mapping[str, Facts]) -> Iterator[Reading]:
    for fact, words in {
        "active": "active ports of InfiniBand",
        "rate": "the speed of InfiniBand's ports",
    }.items():
        why = "all hosts are as slow as the slowest one"
        yield from report_difference(
            facts, fact, f"{words} differ", why, "ibstat  # on the hosts that have less"
        )


PROBE = Probe("infiniband", "InfiniBand and RoCE", "network", "instant", look, compare=_compare)
