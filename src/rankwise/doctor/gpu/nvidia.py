"""The GPUs of a host as ``nvidia-smi`` lists them, or why it can't."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from rankwise.doctor.reading import Reading, skipped

if TYPE_CHECKING:
    from rankwise.doctor.host import Host, Ran

#: Where nothing holds the driver awake it wakes each GPU first: a second or two for one, more than ten for eight.
ANSWER_S = 30.0
_FIELDS = (
    "index",
    "uuid",
    "name",
    "pci.bus_id",
    "driver_version",
    "memory.total",
    "memory.used",
    "compute_mode",
    "mig.mode.current",
)

#: ``none``: no GPU of NVIDIA here. ``broken``: one, and its driver does not serve it. ``blind``: a driver, and no nvidia-smi to ask it.
Sight = Literal["ok", "none", "amd", "blind", "broken", "late"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, as nvidia-smi tells it.

    Attributes:
        bus_id: Its place on PCI as the kernel writes it: ``0000:18:00.0``.
        compute_mode: ``Default``, ``Exclusive_Process`` or ``Prohibited``.
    """

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
class Cards:
    """What nvidia-smi says.

    Attributes:
        sight: Whether it says anything.
        why: Its words, or ours, where it does not.
        gpus: Those that it lists.
        driver: The driver's version: ``550.54.15``.
        lost: What it says of single GPUs that it can't reach, one a line.
    """

    sight: Sight
    why: str = ""
    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    lost: tuple[str, ...] = ()

    def skip(self) -> Reading:
        """Return the reading of a probe that needs GPUs where there are none to ask; what is broken is told by ``gpus-seen``."""
        if self.sight == "ok":
            return skipped("no GPUs left", "; ".join(self.lost) or "nvidia-smi lists none")
        words = {
            "none": ("no NVIDIA driver here", self.why), "amd": ("AMD GPUs (ROCm)", "this probe only knows NVIDIA's tools"),
        }  # fmt: skip
        return skipped(*words.get(self.sight, ("nvidia-smi reports nothing", self.why)))


def list_cards(host: Host) -> Cards:
    """Return the GPUs that nvidia-smi lists, or why it doesn't; it is asked once for all probes of a host."""
    return host.cards


def query_cards(host: Host) -> Cards:
    """Query nvidia-smi for the GPUs; it is bounded, and no answer is an answer, too."""
    ran = run_smi(host, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    output = f"{ran.out}\n{ran.err}"
    if "not a valid field" in output:  # a driver before MIG
        ran = run_smi(host, f"--query-gpu={','.join(_FIELDS[:-1])}", "--format=csv,noheader,nounits")
        output = f"{ran.out}\n{ran.err}"
    lost = tuple(
        line.strip()
        for line in output.splitlines()
        if "Unable to determine the device handle" in line or "GPU is lost" in line
    )
    rows = [
        row for row in map(_split, ran.out.splitlines()) if len(row) >= len(_FIELDS) - 1 and row[0].isdigit()
    ]
    if rows or lost:
        return Cards(
            sight="ok", gpus=tuple(map(_read_gpu, rows)), lost=lost,
            driver=next((row[4] for row in rows if row[4][:1].isdigit()), read_driver_version(host)),
        )  # fmt: skip
    return _explain_silence(host, ran, " ".join(output.split()))


def run_smi(host: Host, *words: str) -> Ran:
    """Run nvidia-smi within its time."""
    return host.run("nvidia-smi", *words, timeout_s=ANSWER_S)


def query(host: Host, *fields: str) -> dict[int, dict[str, str]]:
    """Return further fields by the GPU's index; nothing if this driver does not know one of them."""
    ran = run_smi(host, f"--query-gpu={','.join(('index', *fields))}", "--format=csv,noheader,nounits")
    rows = [_split(line) for line in ran.out.splitlines()] if ran.is_good else []
    good = (row for row in rows if len(row) == len(fields) + 1 and row[0].isdigit())
    return {int(row[0]): dict(zip(fields, row[1:], strict=True)) for row in good}


def read_driver_version(host: Host) -> str:
    """Return the version of the loaded kernel driver; empty if none is."""
    found = re.search(
        r"(?:Kernel Module|x86_64|aarch64)\s+(?:for \S+\s+)?(\d+\.\d+(?:\.\d+)?)",
        host.read("/proc/driver/nvidia/version"),
    )
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


def _explain_silence(host: Host, ran: Ran, output: str) -> Cards:
    if ran.code is None and "did not end" in ran.why:
        return Cards(
            sight="late",
            why=f"nvidia-smi did not answer within {ANSWER_S:.0f} s",
            driver=read_driver_version(host),
        )
    driver = read_driver_version(host)
    if ran.code is None and (driver or host.has("/proc/driver/nvidia/gpus")):
        return Cards(
            sight="blind",
            why=f"the NVIDIA driver {driver} is loaded, but there is no nvidia-smi to query it",
            driver=driver,
        )
    if ran.code is not None and ("mismatch" in output or list_pci_gpus(host) or driver):
        return Cards(sight="broken", why=output[:300] or f"nvidia-smi ended with {ran.code}", driver=driver)
    if host.has("/dev/kfd"):
        return Cards(sight="amd")
    if list_pci_gpus(host):
        return Cards(
            sight="broken", why="there is an NVIDIA GPU on the PCI bus, but no NVIDIA driver is loaded"
        )
    return Cards(sight="none", why=output[:300] or "there is no nvidia-smi, and no loaded driver")


def _split(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


def _read_gpu(row: list[str]) -> Gpu:
    return Gpu(
        index=int(row[0]), uuid=row[1], name=row[2], bus_id=to_kernel_bus_id(row[3]), memory_mib=to_int(row[5]), used_mib=to_int(row[6]),
        compute_mode=row[7], has_mig=len(row) > 8 and row[8] == "Enabled",
    )  # fmt: skip


def to_int(text: str) -> int:
    """Return a whole number; 0 for ``[N/A]`` and the like."""
    number = text.partition(".")[0]
    return int(number) if number.isdigit() else 0
