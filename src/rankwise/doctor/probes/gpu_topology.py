"""How the GPUs are connected with each other and with the network.

**Why it matters.** All GPUs of a ring run at the speed of its slowest link. A broken NVLink, or a fabric of NVSwitch that is not set up, makes
the job many times slower or end with `system not yet initialized` (error 802). GPUs that reach each other only over the link between the processors
(`SYS`) are slow by nature.

**How it is checked.** `nvidia-smi topo -m`, `nvidia-smi nvlink -s`, and the state of the fabric. A GPU that has fewer active links than the
others of its model on this host has lost some.

**What to do.** Start `nvidia-fabricmanager`, in the version of the driver. Lost links usually need a reset of the GPU, or repair. A job on fewer GPUs
than there are is faster on those that are near each other: choose them by `CUDA_VISIBLE_DEVICES`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rankwise.doctor.gpu import nvidia
from rankwise.doctor.gpu.nvidia import Matrix, NvidiaReport, Pairs
from rankwise.doctor.host import Host
from rankwise.doctor.probe import Probe, Reading, fail, ok, skipped, warn
from rankwise.doctor.units import format_count

#: From near to far.
_NEAR = ("PIX", "PXB", "PHB", "NODE", "SYS")
#: The fabric of hosts without NVSwitch says one of these, or nothing.
_SETTLED = {"completed", "n/a", "[n/a]", "not supported", "[not supported]", ""}


def look(host: Host) -> Iterator[Reading]:
    report = host.nvidia
    if not report.gpus:
        yield report.skip()
        return
    yield from _check_fabric(host)
    if len(report.gpus) == 1:
        yield ok("one GPU: no links to others")
        return
    yield from _check_links(host, report)
    matrix = nvidia.read_matrix(nvidia.run_smi(host, "topo", "-m").out)
    pairs = nvidia.list_gpu_pairs(matrix)
    if not pairs:
        yield skipped("the links between the GPUs are unknown", "`nvidia-smi topo -m` has no matrix")
        return
    yield ok(_describe(report, pairs, matrix), ways=", ".join(sorted(set(pairs.values()))))


def _check_fabric(host: Host) -> Iterator[Reading]:
    states = {index: info["fabric.state"] for index, info in nvidia.query(host, "fabric.state").items()}
    late = {index: state for index, state in states.items() if state.strip().lower() not in _SETTLED}
    if late:
        yield fail(
            f"the NVLink fabric of GPU {', '.join(map(str, late))} is not set up: {next(iter(late.values()))}",
            "CUDA can't be used: `system not yet initialized` (error 802)", "sudo systemctl start nvidia-fabricmanager  # of the driver's version"
        )  # fmt: skip


def _check_links(host: Host, report: NvidiaReport) -> Iterator[Reading]:
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


def _describe(report: NvidiaReport, pairs: Pairs, matrix: Matrix) -> str:
    counts = sorted(Counter(pairs.values()).items(), key=lambda one: (one[0] in _NEAR, one[0]))
    ways = ", ".join(f"{count} by {way}" for way, count in counts)
    nics = {a for a, _ in matrix if not a.startswith("GPU")}
    near = {a for (a, b), way in matrix.items() if a not in nics and b in nics and way in {"PIX", "PXB"}}
    beside = f"; {format_count(len(near), 'GPU')} with a network card near" if nics else ""
    return f"{len(report.gpus)} GPUs, {format_count(len(pairs), 'pair')}: {ways}{beside}"


PROBE = Probe("gpu-topology", "links between the GPUs", "gpu", "slow", look, classes=("R12",))
