"""Whether the driver answers, and the job finds as many GPUs as it has ranks.

**Why it matters.** A rank whose GPU is not there ends with `CUDA error: invalid device ordinal`. A driver that does not answer hangs each rank in its
first use of CUDA, silently; after an update of the driver without a reboot torch says `CUDA is not available` and trains on the
CPU. A GPU with memory errors ends ranks with `uncorrectable ECC error encountered`, or makes them wrong or slow.

**How it is checked.** `nvidia-smi` must answer within 30 s. A late answer is a slow start of the driver, unless a second sign shows that
it hangs: a program that is stuck in the kernel, or the driver's errors. Its list is compared with `CUDA_VISIBLE_DEVICES` as CUDA reads it (it stops at the
first entry that names no GPU) and with the number of ranks. Memory errors are queried, and the kernel's log is searched for the driver's serious errors
(Xid), where it may be read. Between hosts, the number and the model of the GPUs are compared.

**What to do.** Start as many ranks as there are GPUs. Keep a slow driver loaded: `nvidia-smi -pm 1`, or the service
`nvidia-persistenced`. A driver that hangs, or that was updated, needs a reboot; a GPU that is lost does, too, and
if it comes back like that, repair.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from rankwise.doctor.differences import report_difference
from rankwise.doctor.gpu.nvidia import NO_DEVICES, NvidiaReport, query, query_nvidia, run_smi, to_int, to_kernel_bus_id
from rankwise.doctor.host import Host
from rankwise.doctor.limits.processes import list_processes
from rankwise.doctor.probe import Facts, Probe, Reading, fail, ok, warn
from rankwise.doctor.units import format_count

#: The driver's errors that tell of the hardware or of the driver itself, and not of a program.
_XIDS = {
    48: "memory error that could not be corrected", 62: "its own controller has stopped",
    64: "a row of memory could not be retired", 74: "error on NVLink", 79: "it has fallen off the bus",
    92: "many memory errors that were corrected", 94: "memory error in one program", 95: "memory error, contained by nothing",
    119: "its own controller does not answer", 120: "error of its own controller", 140: "memory error that was not repaired",
}  # fmt: skip

_ECC = "ecc.errors.uncorrected.volatile.total"


def look(host: Host) -> Iterator[Reading]:
    nvidia = host.ask(query_nvidia)
    if nvidia.status in {"broken", "late"}:
        yield _report_broken(host, nvidia)
    elif nvidia.status != "ok":
        yield nvidia.skip()
    else:
        yield from (*_check_lost(nvidia), *_check_visible(host, nvidia), *_check_health(nvidia, host))
        models, count = ", ".join(sorted({one.name for one in nvidia.gpus})), len(nvidia.gpus)
        present, uuids = len(host.names("/proc/driver/nvidia/gpus")), [one.uuid for one in nvidia.gpus]
        shown = f"{count} of the host's {present} GPUs" if present > count else format_count(count, "GPU")
        what = f"{shown} ({models}), driver {nvidia.driver}"
        yield ok(what, count=count, models=models, driver=nvidia.driver, uuids=[*uuids])


def compare(facts: Mapping[str, Facts]) -> Iterator[Reading]:
    yield from report_difference(
        facts, "count", "the number of GPUs differs", "with as many ranks on each host, those without a GPU end with `CUDA error: invalid device ordinal`",
        "nvidia-smi -L  # there: is a GPU missing, or hidden by CUDA_VISIBLE_DEVICES?",
    )  # fmt: skip
    yield from report_difference(
        facts, "models", "the GPUs differ", "all ranks wait for the slowest GPU at each step, and the smallest memory bounds the batch of all",
        "# use hosts with the same GPUs, or give those with the slower ones smaller batches",
    )  # fmt: skip


def read_visible(text: str, nvidia: NvidiaReport, mig: int) -> tuple[int, str]:
    """Read CUDA_VISIBLE_DEVICES as CUDA does: how many devices a rank sees, and the first entry that names none (empty if all do)."""
    if text.strip() in NO_DEVICES:
        return 0, ""
    seen: list[str] = []
    for entry in (entry.strip() for entry in text.split(",")):
        if entry.startswith("MIG-"):
            is_known = mig > 0
        elif entry.startswith("GPU-"):
            is_known = any(one.uuid.startswith(entry) for one in nvidia.gpus)
        else:
            is_known = entry.isdecimal() and int(entry) < len(nvidia.gpus)
        if not is_known:
            return len(seen), entry or "(empty)"
        if entry in seen:
            return 0, f"{entry} twice"
        seen.append(entry)
    return len(seen), ""


def _report_broken(host: Host, nvidia: NvidiaReport) -> Reading:
    if "mismatch" in nvidia.why:
        return fail(
            f"nvidia-smi reports: {nvidia.why}",
            "the driver's files were updated, and the old one is still loaded: torch says that CUDA is not available, and uses the CPU",
            "sudo reboot  # or: sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia"
        )  # fmt: skip
    if nvidia.status == "broken":
        return Reading(
            "fail" if host.job.backend == "nccl" or nvidia.driver else "warn", f"the NVIDIA driver does not serve the GPU here: {nvidia.why}",
            "no rank can use a GPU here: torch says that CUDA is not available, and NCCL that it needs GPUs",
            "sudo modprobe nvidia  # in a container: docker run --gpus all …"
        )  # fmt: skip
    # It was told to end, and one that only waits for a slow driver has done so.
    stuck = [one.pid for one in list_processes(host) if one.is_stuck and one.name == "nvidia-smi"]
    xids = sorted({number for _, number in _read_kernel_log(host)} & set(_XIDS))
    signs = [f"nvidia-smi (pid {pid}) is stuck in the kernel" for pid in stuck]
    signs += [f"the kernel's log has Xid {number}: {_XIDS[number]}" for number in xids]
    if signs:
        return fail(
            f"{nvidia.why}, and {'; '.join(signs[:4])}",
            "the driver hangs, mostly after a GPU has fallen off the bus: each rank hangs in its first use of CUDA, silently, and can't be killed",
            "sudo dmesg | grep -i -e xid -e nvrm  # which GPU it is\nsudo reboot"
        )  # fmt: skip
    return warn(
        nvidia.why,
        "a driver that nothing keeps loaded is initialized again for each program, and every rank waits for that; or it hangs, and each rank hangs in its first use of CUDA, silently",
        "sudo nvidia-smi -pm 1  # keeps the driver loaded\ntime nvidia-smi\nsudo dmesg | grep -i -e xid -e nvrm  # if it hangs"
    )  # fmt: skip


def _check_lost(nvidia: NvidiaReport) -> Iterator[Reading]:
    for line in nvidia.lost:
        yield fail(
            f"a GPU does not answer: {line}", "the rank of this GPU, and often all use of CUDA on this host, fails or hangs until a reboot",
            "sudo dmesg | grep -i xid  # the reason\nsudo reboot"
        )  # fmt: skip
    for one in nvidia.gpus:
        if one.compute_mode == "Prohibited":
            yield fail(
                f"GPU {one.index} is closed to all programs (compute mode Prohibited)",
                "a rank there ends with `all CUDA-capable devices are busy or unavailable`", f"sudo nvidia-smi -i {one.index} -c DEFAULT"
            )  # fmt: skip


def _check_visible(host: Host, nvidia: NvidiaReport) -> Iterator[Reading]:
    ranks, backend = host.job.num_ranks, host.job.backend
    is_split = any(one.has_mig for one in nvidia.gpus)
    mig = len(re.findall(r"^\s+MIG\s", run_smi(host, "-L").out, re.MULTILINE)) if is_split else 0
    text = host.env.get("CUDA_VISIBLE_DEVICES")
    visible, unknown = (len(nvidia.gpus), "") if text is None else read_visible(text, nvidia, mig)
    if unknown:
        yield warn(
            f"CUDA_VISIBLE_DEVICES={text}: {unknown} names no GPU of the {len(nvidia.gpus)} here; {visible} are seen",
            "CUDA stops reading at the first entry that names no GPU, and uses none if one is listed twice", "unset CUDA_VISIBLE_DEVICES", "L7"
        )  # fmt: skip
    if mig and (ranks or 0) > 1 and backend != "gloo":
        yield warn(
            f"the GPUs are split (MIG, {format_count(mig, 'device')}), and {ranks} ranks are to run here",
            "a rank can use one MIG device only, and NCCL refuses two ranks on one GPU: `Duplicate GPU detected`",
            "sudo nvidia-smi -mig 0  # whole GPUs again; needs them idle"
        )  # fmt: skip
    elif ranks is not None and ranks > visible and backend != "gloo" and (visible or backend == "nccl"):
        named = "" if text is None else f" (CUDA_VISIBLE_DEVICES={text})"
        yield fail(
            f"{format_count(ranks, 'rank')}, and {format_count(visible, 'GPU')} that they can see{named}",
            "the ranks above end with `CUDA error: invalid device ordinal`, or share a GPU, which NCCL refuses: `Duplicate GPU detected`",
            f"rankwise run --nproc-per-node {visible} …" if visible else "unset CUDA_VISIBLE_DEVICES", "L7"
        )  # fmt: skip


def _check_health(nvidia: NvidiaReport, host: Host) -> Iterator[Reading]:
    ecc, (pending, failure) = _ECC, ("remapped_rows.pending", "remapped_rows.failure")
    # One question where the driver knows all of it: each takes seconds on a host where nothing holds the driver awake.
    for index, values in (query(host, ecc, pending, failure) or query(host, ecc)).items():
        reset, count = f"sudo nvidia-smi --gpu-reset -i {index}  # when it is idle", to_int(values[ecc])
        if count:
            yield warn(
                f"GPU {index} has counted {format_count(count, 'memory error')} that could not be corrected",
                "ranks there end with `uncorrectable ECC error encountered`, or compute wrong numbers", f"{reset}; errors that come back need repair"
            )  # fmt: skip
        for name, says in {
            pending: "has memory rows that wait for a reset to be replaced",
            failure: "could not replace broken memory rows",
        }.items():
            if values.get(name, "0") == "Yes" or to_int(values.get(name, "0")):
                why = "ranks there end with `uncorrectable ECC error encountered`"
                yield warn(f"GPU {index} {says}", why, f"{reset}; a failure needs repair")
    yield from _check_kernel_log(nvidia, host)


def _check_kernel_log(nvidia: NvidiaReport, host: Host) -> Iterator[Reading]:
    names = {one.bus_id.rpartition(".")[0]: f"GPU {one.index}" for one in nvidia.gpus}
    for (place, number), count in sorted(_read_kernel_log(host).items()):
        # In a container the log is that of the whole host: other jobs' GPUs are not ours to tell of.
        if number in _XIDS and (place in names or nvidia.lost):
            yield warn(
                f"{names.get(place, f'the GPU at {place}')} had Xid {number} {format_count(count, 'time')} since the host was started: {_XIDS[number]}",
                "ranks on this GPU fail or hang when it happens again",
                "sudo dmesg | grep -i xid  # when it was\nsudo reboot  # and see whether it comes back"
            )  # fmt: skip


def _read_kernel_log(host: Host) -> dict[tuple[str, int], int]:
    """Return how often the driver has told which error (Xid) of the GPU at which place."""
    found: dict[tuple[str, int], int] = {}
    for place, number in re.findall(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)\): (\d+)", host.run("dmesg").out):
        key = to_kernel_bus_id(place), int(number)
        found[key] = found.get(key, 0) + 1
    return found


PROBE = Probe(
    "gpus-seen",
    "GPUs that the driver and the job see",
    "gpu",
    "slow",
    look,
    classes=("L7", "R14", "R13", "I17"),
    compare=compare,
)
