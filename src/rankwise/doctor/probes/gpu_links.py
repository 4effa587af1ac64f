"""How the GPUs are connected with each other and with the network, and whether something is in the way.

**Why it matters.** All GPUs of a ring run at the speed of its slowest link. A broken NVLink, or a fabric of NVSwitch that is not set up, makes
the job many times slower or end with `system not yet initialized` (error 802). NCCL lets GPUs on one PCIe switch copy directly into each other's
memory: where access control (ACS) or the IOMMU routes these copies through the processor, they crawl, or never arrive, and the first collective
hangs with all GPUs at 100 %, with no error. Where GPUs can't do it at all, as most GeForce cards, NCCL knows, and goes through the host's
memory: that is slower, but not a fault. GPUs that reach each other only over the link between the processors (`SYS`) are slow by nature.

**How it is checked.** `nvidia-smi topo -m` and `nvidia-smi topo -p2p r`, `nvidia-smi nvlink -s`, the state of the fabric, the
control bits of the PCIe switches above the GPUs by `lspci -vvv` (which shows them to root only), and the kernel's IOMMU domain of each GPU. A GPU that
has fewer active links than the others of its model on this host has lost some. In a virtual machine the real switches can't be seen. What could
not be read is reported as skipped.

**What to do.** Start `nvidia-fabricmanager`, in the version of the driver. Lost links usually need a reset of the GPU, or repair.
`NCCL_P2P_DISABLE=1` makes a job that hangs run at once, more slowly: if it helps, ACS or the IOMMU is the cause. The cure is to switch ACS off on these switches
(`setpci`, until the next boot) or in the firmware, and to start the kernel with `iommu=pt`. A job on fewer GPUs than there are is faster on those
that are near each other: choose them by `CUDA_VISIBLE_DEVICES`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rankwise.base.environ import is_on
from rankwise.doctor.gpu import nvidia
from rankwise.doctor.gpu.nvidia import Matrix, NvidiaReport, Pairs, query_nvidia
from rankwise.doctor.host import Host
from rankwise.doctor.probe import Probe, Reading, fail, ok, skipped, warn
from rankwise.doctor.units import format_count

_NOW = "NCCL_P2P_DISABLE=1 rankwise run …  # at once, and slower"
_WHY = (
    "NCCL takes the direct way, and the copies crawl or never arrive: the first collective hangs with all GPUs at 100 %"
)
_REASONS = {
    "CNS": "the chipset does not allow it", "GNS": "these GPUs can't", "TNS": "not on these paths", "NS": "not supported", "DR": "switched off",
}  # fmt: skip
#: From near to far.
_NEAR = ("PIX", "PXB", "PHB", "NODE", "SYS")
#: The fabric of hosts without NVSwitch says one of these, or nothing.
_SETTLED = {"completed", "n/a", "[n/a]", "not supported", "[not supported]", ""}


def look(host: Host) -> Iterator[Reading]:
    report = host.ask(query_nvidia)
    if not report.gpus:
        yield report.skip()
        return
    yield from _check_fabric(host)
    if len(report.gpus) == 1:
        yield ok("one GPU: no links to others")
        return
    yield from _check_lost_links(host, report)
    matrix = nvidia.read_matrix(nvidia.run_smi(host, "topo", "-m").out)
    access = nvidia.list_gpu_pairs(nvidia.read_matrix(nvidia.run_smi(host, "topo", "-p2p", "r").out))
    ways = nvidia.list_gpu_pairs(matrix)
    for words, found in (("topo -m", ways), ("topo -p2p r", access)):
        if not found:
            yield skipped("how the GPUs reach each other is unknown", f"`nvidia-smi {words}` has no matrix")
    direct = {pair: ways.get(pair, "") for pair, cell in access.items() if cell == "OK"}
    bad = [*_check_closed_links(access, ways), *_check_bridges(host, report, direct)]
    yield from bad
    if (access or ways) and all(one.verdict == "skipped" for one in bad):
        yield ok("; ".join([*_describe_ways(report, ways, matrix), *_describe_access(access, direct)]))


def _describe_ways(report: NvidiaReport, pairs: Pairs, matrix: Matrix) -> Iterator[str]:
    counts = sorted(Counter(pairs.values()).items(), key=lambda one: (one[0] in _NEAR, one[0]))
    if counts:
        ways = ", ".join(f"{count} by {way}" for way, count in counts)
        yield f"{len(report.gpus)} GPUs, {format_count(len(pairs), 'pair')}: {ways}"
    nics = {a for a, _ in matrix if not a.startswith("GPU")}
    near = {a for (a, b), way in matrix.items() if a not in nics and b in nics and way in {"PIX", "PXB"}}
    if nics:
        yield f"{format_count(len(near), 'GPU')} with a network card near"


def _describe_access(access: Pairs, direct: Pairs) -> Iterator[str]:
    if access and len(direct) == len(access):
        pairs = f"all {len(access)} pairs of GPUs" if len(access) > 1 else "both GPUs"
        yield f"{pairs} reach each other directly"
    elif access:
        closed = sorted({*access.values()} - {"OK"})
        reasons = ", ".join(f"{cell}: {_REASONS.get(cell, 'unknown')}" for cell in closed)
        yield f"{len(direct)} of {format_count(len(access), 'pair')} of GPUs reach each other directly ({reasons}); the others go through the host's memory"


def _check_fabric(host: Host) -> Iterator[Reading]:
    states = {index: info["fabric.state"] for index, info in nvidia.query(host, "fabric.state").items()}
    late = {index: state for index, state in states.items() if state.strip().lower() not in _SETTLED}
    if late:
        yield fail(
            f"the NVLink fabric of GPU {', '.join(map(str, late))} is not set up: {next(iter(late.values()))}",
            "CUDA can't be used: `system not yet initialized` (error 802)", "sudo systemctl start nvidia-fabricmanager  # of the driver's version"
        )  # fmt: skip


def _check_lost_links(host: Host, report: NvidiaReport) -> Iterator[Reading]:
    links = nvidia.read_links(nvidia.run_smi(host, "nvlink", "-s").out)
    models = {one.index: one.name for one in report.gpus}
    for index, active in sorted(links.items()):
        alike = [sum(theirs) for other, theirs in links.items() if models.get(other) == models.get(index)]
        # Cards that are joined in pairs by a bridge may have none at all: only a part that is missing is a loss.
        if 0 < sum(active) < max(alike):
            dead = ", ".join(str(at) for at, is_active in enumerate(active) if not is_active)
            which = f"; inactive: {dead}" if dead else ""
            yield warn(
                f"GPU {index} has {format_count(sum(active), 'active NVLink')}, others of its model here have {max(alike)}{which}",
                "all GPUs wait for the slowest link: collectives are slower by as much",
                "nvidia-smi nvlink -e  # counts its errors\nsudo nvidia-smi --gpu-reset  # when idle"
            )  # fmt: skip


def _check_closed_links(access: Pairs, ways: Pairs) -> Iterator[Reading]:
    closed = [pair for pair, way in ways.items() if way.startswith("NV") and access.get(pair, "OK") != "OK"]
    if closed:
        a, b = closed[0]
        yield warn(
            f"{format_count(len(closed), 'pair')} of GPUs with NVLink that can't be used: GPU {a} and GPU {b} say {access[a, b]}",
            "NCCL goes through the host's memory instead, many times slower", "nvidia-smi topo -p2p n  # and: sudo systemctl status nvidia-fabricmanager"
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
    what = (
        f"whether ACS is on at {format_count(len(above), 'PCIe switch', 'PCIe switches')} above the GPUs is not known"
    )
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
            "skipped", what, "only root may read it", "sudo $(command -v rankwise) doctor --only gpu-links"
        )  # fmt: skip


PROBE = Probe("gpu-links", "links between the GPUs", "gpu", "slow", look, classes=("R12", "R9"))
