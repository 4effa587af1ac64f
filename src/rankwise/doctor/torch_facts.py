"""What torch reports of itself and of the devices, queried in a process of its own: the ranks' Python may be another one."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rankwise.engine import TORCH_FACTS_PROCESS

if TYPE_CHECKING:
    from rankwise.doctor.host import Host
    from rankwise.doctor.probe import Fact

#: An import of torch takes 1 s, from a busy network disk a minute.
_MOST_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU as torch sees it."""

    index: int
    name: str
    uuid: str
    memory_bytes: int
    capability: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """What torch says; what it says nothing of is empty.

    Attributes:
        why: Why torch said nothing; empty if it did.
        folder: Where torch lies; ``prefix``: the folder of the interpreter's environment.
        cuda: The CUDA that torch was built for; ``hip``: the same for ROCm; ``archs``: the architectures (``sm_90``).
        backends: Which of gloo, nccl, mpi, ucc, xccl torch.distributed has.
        peers: Which devices reach each other's memory: ``peers[a][b]``.
        wheels: The installed packages that torch consists of, as ``torch 2.13.0 in /folder``, by what Python finds first.
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
    peers: tuple[tuple[bool, ...], ...] = ()
    archs: tuple[str, ...] = ()
    prefix: str = ""
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
        output = ran.why or (ran.err.strip().splitlines() or [f"exit code {ran.code}"])[-1]
        return TorchFacts(python=python, why=output)
    try:
        info = cast("dict[str, Fact]", json.loads(lines[-1]))
    except ValueError:
        return TorchFacts(python=python, why=f"its answer can't be read: {lines[-1][:100]}")
    return _read(python, info)


def _read(python: str, info: dict[str, Fact]) -> TorchFacts:
    def text(name: str) -> str:
        return str(info.get(name) or "")

    def entries(name: str) -> list[Fact]:
        value = info.get(name)
        return value if isinstance(value, list) else []

    devices = tuple(
        Device(
            index=int(str(one["index"])), name=str(one["name"]), uuid=str(one["uuid"]), memory_bytes=int(str(one["memory"])),
            capability=str(one["capability"]),
        )
        for one in entries("devices")
        if isinstance(one, dict)
    )  # fmt: skip
    peers = tuple(tuple(bool(cell) for cell in row) for row in entries("peers") if isinstance(row, list))
    return TorchFacts(
        python=python, why=text("why"), python_version=text("python_version"), version=text("version"), folder=text("folder"), cuda=text("cuda"),
        hip=text("hip"), nccl=text("nccl"), backends=tuple(map(str, entries("backends"))), devices=devices, cuda_error=text("cuda_error"),
        peers=peers, archs=tuple(map(str, entries("archs"))), prefix=text("prefix"), wheels=tuple(map(str, entries("wheels"))),
        nccl_file=text("nccl_file"),
    )  # fmt: skip
