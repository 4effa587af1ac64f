"""Whether the GPUs can reach each other's memory, and whether something is in the way.

**Why it matters.** NCCL lets GPUs on one PCIe switch copy directly into each other's memory. Where access control (ACS) or the IOMMU routes
these copies through the processor, they crawl, or never arrive: the first collective hangs with all GPUs at 100 %, with no error. Where GPUs can't
do it at all, as most GeForce cards, NCCL knows, and goes through the host's memory: that is slower, but not a fault.

**How it is checked.** The matrix of `nvidia-smi topo -p2p r`, the ways between the GPUs by `nvidia-smi topo -m`, what torch reports for each pair, the
control bits of the PCIe switches above the GPUs by `lspci -vvv` (which shows them to root only), and the kernel's IOMMU domain of each GPU. In a
virtual machine the real switches can't be seen. What could not be read is reported as skipped.

**What to do.** `NCCL_P2P_DISABLE=1` makes the job run at once, more slowly: if it helps, this is the cause. The cure is to switch ACS off on these switches
(`setpci`, until the next boot) or in the firmware, and to start the kernel with `iommu=pt`.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankwise.base.environ import is_on
from rankwise.doctor.gpu import nvidia
from rankwise.doctor.gpu.nvidia import NvidiaReport, Pairs
from rankwise.doctor.host import Host
from rankwise.doctor.probe import Probe, Reading, ok, skipped, warn
from rankwise.doctor.units import format_count

_NOW = "NCCL_P2P_DISABLE=1 rankwise run …  # at once, and slower"
_WHY = "NCCL takes the direct way, and the copies crawl or never arrive: the first collective hangs with all GPUs at 100 %"
_REASONS = {
    "CNS": "the chipset does not allow it", "GNS": "these GPUs can't", "TNS": "not on these paths", "NS": "not supported", "DR": "switched off",
}  # fmt: skip


def look(host: Host) -> Iterator[Reading]:
    report = host.nvidia
    if len(report.gpus) < 2:
        yield report.skip() if not report.gpus else ok("one GPU: no peer to reach")
        return
    access = nvidia.list_gpu_pairs(nvidia.read_matrix(nvidia.run_smi(host, "topo", "-p2p", "r").out))
    ways = nvidia.list_gpu_pairs(nvidia.read_matrix(nvidia.run_smi(host, "topo", "-m").out))
    if not access:
        why = "`nvidia-smi topo -p2p r` has no matrix"
        yield skipped("nvidia-smi does not report which GPUs reach each other", why)
        return
    direct = {pair: ways.get(pair, "") for pair, cell in access.items() if cell == "OK"}
    found = [*_check_links(access, ways), *_check_torch(host, access), *_check_bridges(host, report, direct)]
    yield from found
    if all(one.verdict == "skipped" for one in found):
        yield ok(_describe(access, direct), direct=len(direct), pairs=len(access))


def _describe(access: Pairs, direct: Pairs) -> str:
    if len(direct) == len(access):
        pairs = f"all {len(access)} pairs of GPUs" if len(access) > 1 else "both GPUs"
        return f"{pairs} reach each other directly"
    closed = sorted({*access.values()} - {"OK"})
    reasons = ", ".join(f"{cell}: {_REASONS.get(cell, 'unknown')}" for cell in closed)
    return f"{len(direct)} of {format_count(len(access), 'pair')} of GPUs reach each other directly ({reasons}); the others go through the host's memory"


def _check_links(access: Pairs, ways: Pairs) -> Iterator[Reading]:
    closed = [pair for pair, way in ways.items() if way.startswith("NV") and access.get(pair, "OK") != "OK"]
    if closed:
        a, b = closed[0]
        yield warn(
            f"{format_count(len(closed), 'pair')} of GPUs with NVLink that can't be used: GPU {a} and GPU {b} say {access[a, b]}",
            "NCCL goes through the host's memory instead, many times slower", "nvidia-smi topo -p2p n  # and: sudo systemctl status nvidia-fabricmanager"
        )  # fmt: skip


def _check_torch(host: Host, access: Pairs) -> Iterator[Reading]:
    info = host.torch
    # Only where torch sees the same GPUs in the same order can the two be held against each other.
    if "CUDA_VISIBLE_DEVICES" in host.env or len(info.peers) * (len(info.peers) - 1) // 2 != len(access):
        return
    peers = info.peers
    closed = [(a, b) for (a, b), cell in access.items() if cell == "OK" and not (peers[a][b] and peers[b][a])]
    if closed:
        a, b = closed[0]
        yield warn(
            f"the driver says that GPU {a} and GPU {b} reach each other, but CUDA says that they don't ({format_count(len(closed), 'such pair')})",
            "NCCL goes through the host's memory instead: slower", "NCCL_DEBUG=INFO rankwise run …  # shows the way that NCCL takes", "R12"
        )  # fmt: skip


def _check_bridges(host: Host, report: NvidiaReport, direct: Pairs) -> Iterator[Reading]:
    by_pcie = {pair: way for pair, way in direct.items() if way and not way.startswith("NV")}
    level = host.env.get("NCCL_P2P_LEVEL", "").upper()
    if not by_pcie or is_on("NCCL_P2P_DISABLE", env=host.env) or level in {"LOC", "NVL", "0"}:
        return
    if nvidia.is_virtual(host):
        yield skipped(
            "what is between the GPUs on PCIe can't be seen", "a virtual machine does not show the real switches",
        )  # fmt: skip
        return
    places = {one.index: one.bus_id for one in report.gpus}
    by_switch = {index for pair, way in by_pcie.items() if way in {"PIX", "PXB"} for index in pair}
    yield from _check_access_control(host, {places[index] for index in by_switch if index in places})
    indexes = sorted({index for pair in by_pcie for index in pair} & set(places))
    translated = [str(index) for index in indexes if nvidia.is_translated(host, places[index])]
    if translated:
        yield warn(
            f"the IOMMU translates the addresses of GPU {', '.join(translated)}, which reach others over PCIe", _WHY,
            f"{_NOW}\n# for good: iommu=pt on the kernel's command line, or the IOMMU off in the firmware", "R12"
        )  # fmt: skip


def _check_access_control(host: Host, places: set[str]) -> Iterator[Reading]:
    """Report the switches above some GPUs that send their copies up to the processor."""
    above = {bridge for place in places for bridge in nvidia.list_switches_above(host, place)}
    if not above:
        return
    ran = host.run("lspci", "-vvv", timeout_s=10.0)
    what = f"whether ACS is on at {format_count(len(above), 'PCIe switch', 'PCIe switches')} above the GPUs is not known"
    if not ran.is_good:
        why = ran.why or f"lspci ended with {ran.code}: {' '.join(ran.err.split())[:200]}"
        fix = "sudo apt-get install pciutils" if ran.code is None and "No such file" in ran.why else ""
        yield Reading("skipped", what, why, fix)
        return
    closed = [one for one in nvidia.list_bridges_with_acs(ran.out) if one in above]
    if closed:
        yield warn(
            f"ACS is on at {format_count(len(closed), 'PCIe switch', 'PCIe switches')} above the GPUs: {', '.join(closed[:8])}", _WHY,
            "\n".join([_NOW, *(f"sudo setpci -s {one} ECAP_ACS+0x6.w=0000" for one in closed[:8]), "# for good: switch ACS off in the firmware"]), "R12"
        )  # fmt: skip
    elif "<access denied>" in ran.out:
        yield Reading(
            "skipped", what, "only root may read it", "sudo $(command -v rankwise) doctor --only gpu-peer-access"
        )  # fmt: skip


PROBE = Probe("gpu-peer-access", "GPUs that reach each other's memory", "gpu", "slow", look, classes=("R12", "R9"))  # fmt: skip
