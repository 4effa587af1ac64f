"""What torch reports of itself and of the devices, queried in a process of its own: the ranks' Python may be another one."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.doctor.json_records import from_json
from rankwise.engine import TORCH_FACTS_PROCESS

if TYPE_CHECKING:
    from rankwise.doctor.host import Host

#: An import of torch takes 1 s, from a busy network disk a minute.
_MOST_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU as torch sees it."""

    name: str
    capability: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """What torch says; what it says nothing of is empty.

    Attributes:
        why: Why torch said nothing; empty if it did.
        folder: Where torch lies.
        cuda: The CUDA that torch was built for; ``hip``: the same for ROCm; ``archs``: the architectures (``sm_90``).
        backends: Which of gloo, nccl, mpi, ucc, xccl torch.distributed has.
        wheels: The installed packages that torch consists of, as ``torch 2.13.0 in /folder``, by what Python finds
            first.
        nccl_file: The file of NCCL that is loaded with torch; empty if it is part of torch itself.
    """

    python: str
    why: str = ""
    python_version: str = ""
    version: str = ""
    folder: str = ""
    cuda: str = ""
    hip: str = ""
    nccl: str = ""
    backends: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()
    cuda_error: str = ""
    archs: tuple[str, ...] = ()
    wheels: tuple[str, ...] = ()
    nccl_file: str = ""

    @property
    def has_torch(self) -> bool:
        """Whether torch could be asked."""
        return not self.why


def query_torch(host: Host) -> TorchFacts:
    """Query torch in the interpreter of the host's job."""
    python = host.job.python or sys.executable
    ran = host.run(python, str(TORCH_FACTS_PROCESS), timeout_s=_MOST_S)
    lines = ran.out.strip().splitlines()
    if not ran.is_good or not lines:
        return TorchFacts(python=python, why=ran.failure)
    try:
        return from_json(TorchFacts, {**json.loads(lines[-1]), "python": python})
    except (ValueError, TypeError):
        return TorchFacts(python=python, why=f"its answer can't be read: {lines[-1][:100]}")
