"""How the GPUs are connected: the matrices of ``nvidia-smi topo``, the links of ``nvidia-smi nvlink``, and the bridges of ``lspci``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise.doctor.host import Host

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines the head of a matrix, whoever reads it


def read_matrix(text: str) -> dict[tuple[str, str], str]:
    """Read a matrix of ``nvidia-smi topo``: ``{("GPU0", "GPU1"): "NV18", ("GPU0", "NIC0"): "PIX", ...}``, without the diagonal."""
    lines = [_ESCAPES.sub("", line) for line in text.splitlines()]
    names: list[str] = []
    found: dict[tuple[str, str], str] = {}
    for line in lines:
        cells = line.split()
        if not cells or cells[0] == "Legend:":
            if found:
                break
            continue
        if not names:
            if cells[0] == "GPU0":
                names = [cell for cell in cells if re.fullmatch(r"(GPU|NIC)\d+|mlx5_\w+", cell)]
            continue
        row, cells = cells[0], cells[1:]
        found |= {(row, name): cell for name, cell in zip(names, cells, strict=False) if name != row}
    return found


def list_gpu_pairs(matrix: dict[tuple[str, str], str]) -> dict[tuple[int, int], str]:
    """Return the pairs of GPUs of a matrix, the lower number first."""
    found = {}
    for (a, b), cell in matrix.items():
        if a.startswith("GPU") and b.startswith("GPU") and int(a[3:]) < int(b[3:]):
            found[int(a[3:]), int(b[3:])] = cell
    return found


def read_links(text: str) -> dict[int, list[bool]]:
    """Read ``nvidia-smi nvlink -s``: by the number of the GPU, which of its links are active."""
    found: dict[int, list[bool]] = {}
    links: list[bool] = []
    for line in text.splitlines():
        gpu = re.match(r"GPU (\d+):", line)
        link = re.match(r"\s+Link \d+:\s*(\S+)", line)
        if gpu:
            links = found.setdefault(int(gpu[1]), [])
        elif link:
            links.append(link[1][:1].isdigit() and float(re.sub(r"[^\d.]", "", link[1]) or 0) > 0)
    return found


def list_bridges_with_acs(text: str) -> list[str]:
    """Return the PCI bridges of ``lspci -vvv`` that send the traffic between their devices up to the root: ``0000:16:00.0``."""
    found: list[str] = []
    place, is_bridge = "", False
    for line in text.splitlines():
        head = re.match(r"((?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]) (.*)", line)
        if head:
            place = head[1] if head[1].count(":") == 2 else f"0000:{head[1]}"
            is_bridge = "PCI bridge" in head[2]
        elif is_bridge and "ACSCtl:" in line and ("SrcValid+" in line or "ReqRedir+" in line):
            found.append(place)
    return found


def list_switches_above(host: Host, bus_id: str) -> list[str]:
    """Return the PCI bridges between a device and its root port, without that: what lies below decides whether peers go the short way."""
    path = host.path(f"/sys/bus/pci/devices/{bus_id}").resolve()
    above = [
        part for part in path.parts if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", part)
    ]
    return above[1:-1]


def is_translated(host: Host, bus_id: str) -> bool:
    """Return whether the IOMMU translates the addresses that a device uses."""
    kind = host.read(f"/sys/bus/pci/devices/{bus_id}/iommu_group/type")
    if kind:
        return kind in {"DMA", "DMA-FQ"}
    words = host.read("/proc/cmdline").split()
    is_off = {"iommu=pt", "iommu=off", "iommu.passthrough=1", "intel_iommu=off", "amd_iommu=off"} & set(words)
    return bool(host.names("/sys/class/iommu")) and not is_off


def is_virtual(host: Host) -> bool:
    """Return whether this host is a virtual machine: its PCI is not the real one."""
    return bool(re.search(r"^flags\s*:.*\bhypervisor\b", host.read("/proc/cpuinfo"), re.MULTILINE))
