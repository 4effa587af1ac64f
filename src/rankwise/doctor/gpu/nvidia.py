"""The GPUs of a host as ``nvidia-smi`` lists them, or why it can't; and how they are connected (``nvidia-smi topo``, ``lspci``)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Literal, TypeAlias, final

from rankwise.doctor.probe import Reading, skipped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.doctor.host import Host, ProgramResult

#: Where nothing holds the driver awake it wakes each GPU first: a second or two for one, more than ten for eight.
ANSWER_S = 30.0
_FIELDS = tuple("uuid name pci.bus_id driver_version memory.total memory.used compute_mode mig.mode.current".split())  # noqa: SIM905
#: What CUDA_VISIBLE_DEVICES says for none.
NO_DEVICES = {"", "-1", "NoDevFiles", "none"}

_CSV = "--format=csv,noheader,nounits"
#: ``none``: no GPU of NVIDIA here. ``broken``: one, and its driver does not serve it. ``blind``: a driver, and no
#: nvidia-smi to ask it.
Status = Literal["ok", "none", "amd", "blind", "broken", "late"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, as nvidia-smi lists it; its place on PCI is as the kernel writes it: ``0000:18:00.0``."""

    index: int
    uuid: str
    name: str
    bus_id: str
    memory_mib: int = 0
    used_mib: int = 0
    compute_mode: str = "Default"
    has_mig: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaReport:
    """The GPUs that nvidia-smi lists, and what it says of single ones that it can't reach; or why it says nothing."""

    status: Status
    why: str = ""
    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    lost: tuple[str, ...] = ()

    def skip(self) -> Reading:
        """Return the reading of a probe that needs GPUs where there are none to ask; what is broken is told by ``gpus-seen``."""
        if self.status == "ok":
            return skipped("no GPUs left", "; ".join(self.lost) or "nvidia-smi lists none")
        words = {
            "none": ("no NVIDIA driver here", self.why), "amd": ("AMD GPUs (ROCm)", "this probe only knows NVIDIA's tools"),
        }  # fmt: skip
        return skipped(*words.get(self.status, ("nvidia-smi reports nothing", self.why)))


def query_nvidia(host: Host) -> NvidiaReport:
    """Query nvidia-smi for the GPUs; it is bounded, and no answer is an answer, too."""
    ran, rows = _query(host, _FIELDS)
    if "not a valid field" in ran.out + ran.err:  # a driver before MIG
        ran, rows = _query(host, _FIELDS[:-1])
    output = f"{ran.out}\n{ran.err}"
    signs = ("Unable to determine the device handle", "GPU is lost")
    lost = tuple(line.strip() for line in output.splitlines() if any(sign in line for sign in signs))
    if not rows and not lost:
        return _explain_silence(host, ran, " ".join(output.split()))
    versions = [one["driver_version"] for one in rows.values() if one["driver_version"][:1].isdigit()]
    gpus = [
        Gpu(
            index=index, uuid=one["uuid"], name=one["name"], bus_id=to_kernel_bus_id(one["pci.bus_id"]),
            memory_mib=to_int(one["memory.total"]), used_mib=to_int(one["memory.used"]), compute_mode=one["compute_mode"],
            has_mig=one.get("mig.mode.current") == "Enabled",
        )
        for index, one in rows.items()
    ]  # fmt: skip
    return NvidiaReport(status="ok", gpus=tuple(gpus), lost=lost, driver=[*versions, read_driver_version(host)][0])


def run_smi(host: Host, *words: str) -> ProgramResult:
    """Run nvidia-smi within its time."""
    return host.run("nvidia-smi", *words, timeout_s=ANSWER_S)


def query(host: Host, *fields: str) -> dict[int, dict[str, str]]:
    """Return further fields by the GPU's index; nothing if this driver does not know one of them."""
    ran, rows = _query(host, fields)
    return rows if ran.is_good else {}


def _query(host: Host, fields: Sequence[str]) -> tuple[ProgramResult, dict[int, dict[str, str]]]:
    ran = run_smi(host, f"--query-gpu={','.join(('index', *fields))}", _CSV)
    rows = (row for row in map(split_row, ran.out.splitlines()) if len(row) == len(fields) + 1 and row[0].isdigit())
    return ran, {int(row[0]): dict(zip(fields, row[1:], strict=True)) for row in rows}


def read_driver_version(host: Host) -> str:
    """Return the version of the loaded kernel driver; empty if none is."""
    form = r"(?:Kernel Module|x86_64|aarch64)\s+(?:for \S+\s+)?(\d+\.\d+(?:\.\d+)?)"
    found = re.search(form, host.read("/proc/driver/nvidia/version"))
    return found[1] if found else ""


def find_driver_cuda(host: Host) -> str:
    """Return the newest CUDA that the driver serves: ``12.4``; empty if it is not told."""
    # "CUDA Version" until drivers of 2025, "CUDA UMD Version" since.
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", run_smi(host).out)
    return found[1] if found else ""


def list_pci_gpus(host: Host) -> list[str]:
    """Return where on PCI there are GPUs of NVIDIA, whether or not a driver serves them."""
    folder = "/sys/bus/pci/devices"
    return [
        name
        for name in host.names(folder)
        if host.read(f"{folder}/{name}/vendor") == "0x10de" and host.read(f"{folder}/{name}/class").startswith(("0x0300", "0x0302"))
    ]  # fmt: skip


def to_kernel_bus_id(text: str) -> str:
    """Return nvidia-smi's place on PCI as the kernel writes it: ``00000000:18:00.0`` is ``0000:18:00.0``."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _explain_silence(host: Host, ran: ProgramResult, output: str) -> NvidiaReport:
    driver, is_on_bus = read_driver_version(host), bool(list_pci_gpus(host))
    status: Status = "broken"
    if ran.code is None and "did not end" in ran.why:
        status, why = "late", f"nvidia-smi did not answer within {ANSWER_S:.0f} s"
    elif ran.code is None and (driver or host.has("/proc/driver/nvidia/gpus")):
        status, why = "blind", f"the NVIDIA driver {driver} is loaded, but there is no nvidia-smi to query it"
    elif ran.code is not None and ("mismatch" in output or is_on_bus or driver):
        why = output[:300] or f"nvidia-smi ended with {ran.code}"
    elif host.has("/dev/kfd"):
        status, why = "amd", ""
    elif is_on_bus:
        why = "there is an NVIDIA GPU on the PCI bus, but no NVIDIA driver is loaded"
    else:
        status, why = "none", output[:300] or "there is no nvidia-smi, and no loaded driver"
    return NvidiaReport(status=status, why=why, driver=driver)


def split_row(line: str) -> list[str]:
    """Return the cells of a row that nvidia-smi prints as CSV."""
    return [cell.strip() for cell in line.split(",")]


def to_int(text: str) -> int:
    """Return a whole number; 0 for ``[N/A]`` and the like."""
    number = text.partition(".")[0]
    return int(number) if number.isdigit() else 0


Matrix: TypeAlias = dict[tuple[str, str], str]
Pairs: TypeAlias = dict[tuple[int, int], str]
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines the head of a matrix, whoever reads it


def read_matrix(text: str) -> Matrix:
    """Read a matrix of ``nvidia-smi topo``: ``{("GPU0", "GPU1"): "NV18", ("GPU0", "NIC0"): "PIX", ...}``, without the diagonal."""
    lines = filter(None, (_ESCAPES.sub("", line).split() for line in text.splitlines()))
    head = next((cells for cells in lines if cells[0] == "GPU0"), [])
    names = [cell for cell in head if re.fullmatch(r"(GPU|NIC)\d+|mlx5_\w+", cell)]
    rows = takewhile(lambda cells: cells[0] != "Legend:", lines)
    return {(row, name): cell for row, *cells in rows for name, cell in zip(names, cells, strict=False) if name != row}


def list_gpu_pairs(matrix: Matrix) -> Pairs:
    """Return the pairs of GPUs of a matrix, the lower number first."""
    found = {(int(a[3:]), int(b[3:])): cell for (a, b), cell in matrix.items() if a[:3] == b[:3] == "GPU"}
    return {(a, b): cell for (a, b), cell in found.items() if a < b}


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
    above = [at for at in path.parts if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", at)]
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
