"""What the tools of NVIDIA print, in their own format, on hosts that tests can't have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.doctor.host import ProgramResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIST = "nvidia-smi --query-gpu=index,uuid,name,pci.bus_id,driver_version,memory.total,memory.used,compute_mode,mig.mode.current"
APPS = "nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory"
ECC = "nvidia-smi --query-gpu=index,ecc.errors.uncorrected.volatile.total"
HEALTH = f"{ECC},remapped_rows.pending,remapped_rows.failure"
FABRIC = "nvidia-smi --query-gpu=index,fabric.state"
REASONS = "nvidia-smi --query-gpu=index,temperature.gpu,power.limit,clocks_event_reasons.hw_thermal_slowdown,clocks_event_reasons.sw_thermal_slowdown," \
    "clocks_event_reasons.hw_power_brake_slowdown,clocks_event_reasons.hw_slowdown"  # fmt: skip
OLD_REASONS = REASONS.replace("event", "throttle")
BAD_FIELD = ProgramResult(code=2, out='Field "fabric.state" is not a valid field to query.\n\n')

_H100_BUSES = ("18", "2A", "3A", "5D", "9A", "AB", "BA", "DB")


def list_h100(used: Mapping[int, int] | None = None, count: int = 8) -> str:
    """The list of a host with H100 SXM; some memory may be used, in MiB."""
    return "".join(
        f"{index}, GPU-0000000{index}-aaaa-bbbb-cccc-dddddddddddd, NVIDIA H100 80GB HBM3, 00000000:{_H100_BUSES[index]}:00.0, 550.54.15, 81559, "
        f"{(used or {}).get(index, 0)}, Default, Disabled\n"
        for index in range(count)
    )  # fmt: skip


def uuid(index: int) -> str:
    """The number that ``list_h100`` gives a GPU."""
    return f"GPU-0000000{index}-aaaa-bbbb-cccc-dddddddddddd"


LIST_4090 = """0, GPU-11111111-aaaa-bbbb-cccc-dddddddddddd, NVIDIA GeForce RTX 4090, 00000000:01:00.0, 535.183.01, 24564, 312, Default, [N/A]
1, GPU-22222222-aaaa-bbbb-cccc-dddddddddddd, NVIDIA GeForce RTX 4090, 00000000:41:00.0, 535.183.01, 24564, 4, Default, [N/A]
"""
LIST_A100_PCIE = """0, GPU-11111111-aaaa-bbbb-cccc-dddddddddddd, NVIDIA A100-PCIE-40GB, 00000000:17:00.0, 535.183.01, 40960, 4, Default, Disabled
1, GPU-22222222-aaaa-bbbb-cccc-dddddddddddd, NVIDIA A100-PCIE-40GB, 00000000:18:00.0, 535.183.01, 40960, 4, Default, Disabled
"""
LIST_MIG = "0, GPU-33333333-aaaa-bbbb-cccc-dddddddddddd, NVIDIA A100-SXM4-80GB, 00000000:07:00.0, 535.183.01, 81920, 87, Default, Enabled\n"
NAMES_MIG = """GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-33333333-aaaa-bbbb-cccc-dddddddddddd)
  MIG 3g.40gb     Device  0: (UUID: MIG-1c2bc4dd-eb8f-5e7e-bb2e-b6b7a7a0d2f4)
  MIG 3g.40gb     Device  1: (UUID: MIG-5f3b0b9c-6b0d-5c5e-8d0f-0e7e3a1c9a11)
"""
MISMATCH = ProgramResult(
    code=18, out="Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.54\n"
)
NO_DRIVER = ProgramResult(
    code=9,
    out="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.\n\n",
)
LATE = ProgramResult(code=None, why="nvidia-smi did not end within 30 s")
LOST_ONE = ProgramResult(
    code=255,
    out=f"Unable to determine the device handle for GPU3: 0000:5D:00.0: Unknown Error\n{list_h100(count=3)}",
)
DRIVER_VERSION = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
HEAD_OLD = """Tue Mar 12 10:01:22 2024
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
"""
HEAD_NEW = """Thu Aug 27 18:05:38 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 610.57.04              KMD Version: 610.57.04     CUDA UMD Version: 13.3     |
+-----------------------------------------+------------------------+----------------------+
"""

_LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""
_P2P_LEGEND = """
Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
  GNS  = GPU not supported
  TNS  = Topology not supported
  NS   = Not supported
  U    = Unknown
"""


def matrix(
    count: int, way: str, *, nics: Sequence[str] = (), others: Mapping[tuple[int, int], str] | None = None
) -> str:
    """A matrix of ``topo -m``: each pair by one way, some by others; ``nics`` has a line of ways for each GPU."""
    names = [f"GPU{index}" for index in range(count)]
    heads = [*names, *(f"NIC{index}" for index in range(len(nics[0].split()) if nics else 0))]
    lines = ["\t\x1b[4m" + "\t".join([*heads, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"]
    for a, name in enumerate(names):
        cells = [" X " if a == b else (others or {}).get((min(a, b), max(a, b)), way) for b in range(count)]
        lines.append("\t".join([name, *cells, *(nics[a].split() if nics else ()), "0-47,96-143", "0", "", "N/A"]))
    lines += [
        "\t".join([f"NIC{index}", *(nics[a].split()[index] for a in range(count)), " X "])
        for index in range(len(heads) - count)
    ]
    return "\n".join(lines) + "\n" + _LEGEND


def access(count: int, cell: str, others: Mapping[tuple[int, int], str] | None = None) -> str:
    """A matrix of ``topo -p2p r``."""
    lines = [" \t\x1b[4m" + "\t".join(f"GPU{index}" for index in range(count)) + "\t\x1b[0m"]
    for a in range(count):
        cells = ["X" if a == b else (others or {}).get((min(a, b), max(a, b)), cell) for b in range(count)]
        lines.append("\t".join([f" GPU{a}", *cells, ""]))
    return "\n".join(lines) + "\n" + _P2P_LEGEND


def links(dead: Mapping[int, Sequence[int]] | None = None, *, count: int = 8, each: int = 18) -> str:
    """What ``nvlink -s`` says of H100, some links of some GPUs dead."""
    lines = []
    for index in range(count):
        lines.append(f"GPU {index}: NVIDIA H100 80GB HBM3 (UUID: {uuid(index)})")
        lines += [
            f"\t Link {link}: " + ("<inactive>" if link in (dead or {}).get(index, ()) else "26.562 GB/s")
            for link in range(each)
        ]
    return "\n".join(lines) + "\n"


LSPCI = """16:00.0 PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch (rev b0) (prog-if 00 [Normal decode])
\tControl: I/O+ Mem+ BusMaster+ SpecCycle- MemWINV- VGASnoop- ParErr+ Stepping- SERR+ FastB2B- DisINTx+
\tCapabilities: [154 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
\tKernel driver in use: pcieport

17:00.0 3D controller: NVIDIA Corporation GA100 [A100 PCIe 40GB] (rev a1)
\tKernel driver in use: nvidia

80:01.0 PCI bridge: Intel Corporation Device 352a (rev 11) (prog-if 00 [Normal decode])
\tCapabilities: [110 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
"""
DMESG = """[    3.123456] nvidia-nvlink: Nvlink Core is being initialized, major device number 237
[81234.567890] NVRM: Xid (PCI:0000:18:00): 31, pid=79749, name=python, Ch 0000000a, intr 00000000. MMU Fault: ENGINE GRAPHICS
[91234.567890] NVRM: Xid (PCI:0000:2a:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 2
[91235.567890] NVRM: Xid (PCI:0000:2a:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 2
[91236.567890] NVRM: Xid (PCI:0000:ff:00): 79, pid=1122, GPU has fallen off the bus.
"""
