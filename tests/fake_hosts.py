"""Hosts for tests of the doctor: a folder in the place of ``/``, an environment, and answers of programs."""

from __future__ import annotations

import ipaddress
import mmap
from typing import TYPE_CHECKING

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.doctor.host import Host, ProgramResult
from rankwise.doctor.network.interfaces import Interface, read_interfaces
from rankwise.doctor.probe import Reading
from rankwise.doctor.torch_facts import TorchFacts, query_torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rankwise.base.clock import Clock
    from rankwise.doctor.host import JobShape
    from rankwise.doctor.network.interfaces import Kind
    from rankwise.doctor.probe import Probe


def make_host(
    root: Path,
    *,
    files: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    programs: Mapping[str, str | ProgramResult] | None = None,
    job: JobShape | None = None,
    torch: TorchFacts | None = None,
    name: str = "host0",
    names: Mapping[str, Sequence[str]] | None = None,
    interfaces: Sequence[Interface] = (),
    clock: Clock = SYSTEM_CLOCK,
) -> Host:
    """Make a host of which nothing but this is seen.

    Args:
        root: An empty folder.
        files: Texts by path (``/proc/meminfo``).
        env: Its environment.
        programs: Answers by the beginning of a command (``nvidia-smi --query-gpu``): what it prints, or all of it. Others are missing.
        job: The job that is to run there.
        torch: What torch says there; without, that there is none.
        name: Its name.
        names: The addresses by name that it can look up; an address is its own name.
        interfaces: Its network interfaces.
        clock: Its clock.
    """
    for path, text in (files or {}).items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    answers = programs or {}

    def run(argv: Sequence[str], timeout_s: float) -> ProgramResult:
        typed = " ".join(argv)
        known = [start for start in answers if typed == start or typed.startswith(f"{start} ")]
        if not known:
            return ProgramResult(code=None, why=f"{argv[0]} can't be run: No such file or directory")
        told = answers[max(known, key=len)]
        return told if isinstance(told, ProgramResult) else ProgramResult(code=0, out=told)

    facts = torch or TorchFacts(python="python", why="ModuleNotFoundError: No module named 'torch'")
    return Host(
        env=env or {}, job=job, root=root, run=run, name=name, clock=clock,
        lookup=lambda asked: _look_up(asked, names or {}), answers={query_torch: facts, read_interfaces: tuple(interfaces)},
    )  # fmt: skip


def add_process(
    root: Path, pid: int, *, argv: str, parent: int = 1, env: str = "", group: str = "/user.slice/s.scope", name: str = "python",
    state: str = "S", started_s: float = 100.0, up_s: float = 9000.0, memory_bytes: int = 0,
) -> None:  # fmt: skip
    """Put a process into a host's /proc, as psutil reads it.

    Args:
        root: The host's folder.
        pid: Its number.
        argv: Its words, separated by ``|``, or by blanks.
        parent: Its parent.
        env: Its environment, separated by blanks.
        group: Its control group.
        name: What it calls itself.
        state: One letter, as in /proc.
        started_s: So long after the host it was started.
        up_s: For how long the host is up.
        memory_bytes: What it takes.
    """
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (root / "proc" / "stat").write_text(f"cpu 0 0 0 0\nbtime {SYSTEM_CLOCK.time() - up_s:.0f}\n")
    (folder / "stat").write_text(f"{pid} ({name}) {state} {parent} 1 1{' 0' * 15} {started_s * 100:.0f}{' 0' * 30}\n")
    (folder / "status").write_text("Name:\tpython\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\n")
    (folder / "statm").write_text(f"0 {memory_bytes // mmap.PAGESIZE} 0 0 0 0 0\n")
    (folder / "cmdline").write_text("\0".join(argv.split("|" if "|" in argv else " ")) + "\0")
    (folder / "environ").write_text(env.replace(" ", "\0") + "\0")
    (folder / "cgroup").write_text(f"0::{group}\n")


def make_interface(name: str, *addresses: str, kind: Kind | None = None, is_up: bool = True) -> Interface:
    """Make a network interface from its addresses, as in ``eth0 10.0.0.1/24 fe80::1/64``."""
    found = [one.partition("/") for one in addresses]
    return Interface(
        name=name, kind=kind or ("loopback" if name == "lo" else "ethernet"), is_up=is_up,
        addresses=tuple(ipaddress.ip_interface(f"{ip}/{bits or 32}") for ip, _, bits in found),
    )  # fmt: skip


LOOPBACK = make_interface("lo", "127.0.0.1/8", "::1/128")
ETH0 = make_interface("eth0", "10.0.0.1/24", "fe80::1/64")


def _look_up(asked: str, names: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    try:
        return (str(ipaddress.ip_address(asked)),)
    except ValueError:
        return tuple(names.get(asked, ()))


def look(probe: Probe, host: Host) -> list[Reading]:
    """Return what a probe reads on a host, as plain JSON would carry it."""
    return [Reading.from_json(one.of(probe.id, host.name).to_json()) for one in probe.look(host)]
