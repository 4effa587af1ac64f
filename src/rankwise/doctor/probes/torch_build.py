"""Whether this build of torch fits the GPUs, the driver and NCCL.

**Why it matters.** `pip install torch` may bring a build for the CPU: then `Distributed package doesn't have NCCL built in`. A build for a newer
CUDA than the driver serves finds no GPU (`The NVIDIA driver on your system is too old`), and one that is older than the GPU has no code for it
(`no kernel image is available for execution on the device`). A second NCCL on `LD_LIBRARY_PATH` or in `LD_PRELOAD` replaces torch's own, and
NCCL's network plugin on only some hosts makes the first collective hang.

**How it is checked.** torch is queried for its CUDA, its architectures, its NCCL and the GPUs it sees; Python for all packages
that hold torch or NCCL; the kernel for the file of NCCL that was really loaded; `nvidia-smi` for the driver's CUDA. Between hosts, CUDA, NCCL,
the driver and the plugin are compared.

**What to do.** Install the build that fits, from <https://pytorch.org/get-started/locally/>; remove the second NCCL from the
environment; make all hosts alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from rankwise.doctor.differences import group_hosts, report_difference
from rankwise.doctor.gpu.nvidia import NO_DEVICES, NvidiaReport, find_driver_cuda, query_nvidia
from rankwise.doctor.host import Host
from rankwise.doctor.probe import Facts, Probe, Reading, fail, ok, skipped, warn
from rankwise.doctor.torch_facts import TorchFacts, query_torch
from rankwise.doctor.units import format_count

_INDEX = "https://download.pytorch.org/whl"


def look(host: Host) -> Iterator[Reading]:
    info = host.ask(query_torch)
    if not info.has_torch:
        yield skipped("torch could not be queried", f"{info.why} ({info.python})")
        return
    nvidia = host.ask(query_nvidia)
    found = [*_check_devices(host, info, nvidia), *_check_packages(info)]
    yield from found
    kind = f"CUDA {info.cuda}" if info.cuda else f"ROCm {info.hip}" if info.hip else "the CPU"
    nccl = f", NCCL {info.nccl}" if info.nccl else ""
    driver = f", driver {nvidia.driver}" if nvidia.driver else ""
    yield ok(
        f"torch {info.version} is built for {kind}{nccl}{driver}", cuda=info.cuda or info.hip or "none", nccl=info.nccl, driver=nvidia.driver,
        plugin=_find_plugin(host), torch=info.version,
    )  # fmt: skip


def compare(facts: Mapping[str, Facts]) -> Iterator[Reading]:
    why = "ranks of different versions hang at their first collective, or end with `internal error` or `unhandled system error`"
    fix = "# install the same build of torch on all hosts"
    # Another torch brings another CUDA and NCCL, and is told by the probe of the interpreter.
    if len(group_hosts(facts, "torch")) < 2:
        yield from report_difference(facts, "cuda", "the CUDA of torch differs", why, fix, "R11")
        yield from report_difference(facts, "nccl", "NCCL differs", why, fix, "R11")
    fix = "NCCL_NET_PLUGIN=none rankwise run …  # or install the plugin on all hosts"
    yield from report_difference(facts, "plugin", "NCCL's network plugin differs", why, fix, "R11")
    yield from report_difference(
        facts, "driver", "the NVIDIA driver differs",
        "most jobs work; features of the newer one (such as CUDA graphs or NVLink SHARP) fail on the hosts with the older one",
        "# install the same driver on all hosts",
    )  # fmt: skip


def _check_devices(host: Host, info: TorchFacts, nvidia: NvidiaReport) -> Iterator[Reading]:
    gpus = nvidia.gpus
    if not info.cuda and not info.hip:
        if (gpus and host.job.backend != "gloo") or host.job.backend == "nccl":
            seen = f"this host has {len(gpus)} of {gpus[0].name}" if gpus else "the job asks for NCCL"
            yield Reading(
                "fail" if host.job.backend == "nccl" else "warn", f"torch {info.version} is built for the CPU, and {seen}",
                "no rank uses a GPU: `Distributed package doesn't have NCCL built in`, or everything runs on the CPU, many times slower",
                f"{info.python} -m pip install --force-reinstall torch --index-url {_INDEX}/{_name_index(find_driver_cuda(host))}" if gpus else "# --backend gloo, or a host with GPUs",
                "I17"
            )  # fmt: skip
        return
    is_hidden = host.env.get("CUDA_VISIBLE_DEVICES", "all").strip() in NO_DEVICES
    if gpus and not info.devices and not is_hidden:
        yield _report_unusable(host, info, nvidia)
    old = [one for one in info.devices if info.cuda and info.archs and not serves(info.archs, one.capability)]
    for name, capability in sorted({(one.name, one.capability) for one in old}):
        yield fail(
            f"torch {info.version} has code for {', '.join(info.archs)}, and none for {name} (sm_{capability.replace('.', '')})",
            "the first operation on such a GPU ends with `no kernel image is available for execution on the device`",
            f"{info.python} -m pip install --upgrade torch --index-url {_INDEX}/{_name_index(find_driver_cuda(host))}"
        )  # fmt: skip


def _report_unusable(host: Host, info: TorchFacts, nvidia: NvidiaReport) -> Reading:
    serves_up_to = find_driver_cuda(host)
    is_older = bool(serves_up_to) and _to_numbers(serves_up_to)[0] < _to_numbers(info.cuda or "0")[0]
    why = info.cuda_error or "torch reports no reason; `nvidia-smi` sees them"
    if is_older:
        why = f"`The NVIDIA driver on your system is too old`: torch needs CUDA {info.cuda}; {why}"
    return fail(
        f"nvidia-smi lists {format_count(len(nvidia.gpus), 'GPU')}, torch {info.version} (CUDA {info.cuda}) sees none; driver {nvidia.driver or 'unknown'} serves CUDA {serves_up_to or 'unknown'}",
        why,
        f"{info.python} -m pip install --force-reinstall torch --index-url {_INDEX}/{_name_index(serves_up_to)}  # or a newer driver" if is_older else f"{info.python} -c 'import torch; torch.cuda.init()'  # shows the error"
    )  # fmt: skip


def serves(archs: tuple[str, ...], capability: str) -> bool:
    """Return whether code for some architectures runs on a GPU: ``sm_80`` does on 8.0 to 8.9, ``compute_80`` on all from 8.0."""
    own = major, minor = _to_numbers(capability)

    def fits(arch: str) -> bool:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", arch)
        if found is None:
            return True  # a name that we don't know: nothing to say
        theirs = (int(found[2]), int(found[3]))
        if found[4] == "a":
            return theirs == own
        is_family = found[1] == "sm" or bool(found[4])
        return theirs[0] == major and theirs[1] <= minor if is_family else theirs <= own

    return any(map(fits, archs))


def _check_packages(info: TorchFacts) -> Iterator[Reading]:
    torches = [one for one in info.wheels if one.startswith(("torch ", "torch-nightly"))]
    if len({one.split()[1] for one in torches}) > 1:
        yield warn(
            f"several torch are installed: {'; '.join(torches)}; {info.version} comes first",
            "which one a rank gets depends on its PYTHONPATH and its user: ranks with two versions hang or fail",
            f"{info.python} -m pip uninstall torch  # once for each, then install the one that you want", "R11"
        )  # fmt: skip
    nccls = [one for one in info.wheels if one.startswith("nvidia-nccl")]
    if len({one.split()[0] for one in nccls}) > 1:
        yield warn(
            f"several NCCL are installed into one folder: {'; '.join(nccls)}",
            "the package that was installed last has overwritten the other's libnccl.so.2: torch may get one that it was not built for",
            f"{info.python} -m pip uninstall {' '.join(one.split()[0] for one in nccls)}  # then install torch again", "R11"
        )  # fmt: skip
    elif nccls and info.nccl_file and "/nvidia/nccl/" not in info.nccl_file:
        yield warn(
            f"torch has loaded {info.nccl_file} (NCCL {info.nccl}), and not the one that was installed with it ({nccls[0]})",
            "LD_LIBRARY_PATH or LD_PRELOAD puts another NCCL first: with other versions on other ranks, the first collective hangs",
            "unset LD_PRELOAD LD_LIBRARY_PATH  # or take the folder of that file out of them", "R11"
        )  # fmt: skip


def _find_plugin(host: Host) -> str:
    """Return NCCL's network plugin as NCCL looks for it, ``none``, or nothing if that can't be told."""
    name, named = "libnccl-net.so", host.env.get("NCCL_NET_PLUGIN", "").strip()
    folders = [folder for folder in host.env.get("LD_LIBRARY_PATH", "").split(":") if folder.startswith("/")]
    if named or any(host.has(f"{folder}/{name}") for folder in folders):
        return named or name
    for program in ("ldconfig", "/sbin/ldconfig"):  # a user's PATH often lacks /sbin
        ran = host.run(program, "-p")
        if ran.is_good:
            return name if name in ran.out else "none"
    return ""


def _name_index(cuda: str) -> str:
    major = _to_numbers(cuda or "0")[0]
    return {11: "cu118", 12: "cu126"}.get(major, "cu130" if major > 12 else "cu126")


def _to_numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)


PROBE = Probe(
    "torch-build",
    "torch against the GPUs, the driver and NCCL",
    "software",
    "slow",
    look,
    classes=("I17", "R11"),
    compare=compare,
)
