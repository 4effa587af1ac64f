"""The processes of a host, as /proc tells them; never more of a command line than the program and its script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.doctor.host import Host

#: Linux has counted in hundredths of a second since ever, whatever the kernel's own tick is.
_TICKS_PER_S = 100
_DEEP = 64


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process.

    Attributes:
        command: The program and its script: ``python train.py``; arguments may be secret, and are left out.
        thread_name: What the process calls itself: ``pt_data_worker``.
        user: Whose it is: a name, else a number.
        age_s: How long it has run.
        state: One letter of /proc: ``R``, ``S``, ``D`` (stuck in the kernel), ``Z`` (dead, not yet fetched).
    """

    pid: int
    parent: int
    command: str
    thread_name: str = ""
    uid: int = 0
    user: str = ""
    age_s: float = 0.0
    state: str = "S"

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command}) of {self.user}, started {say_age(self.age_s)} ago"


def list_processes(host: Host, *, parent: int | None = None) -> list[Process]:
    """Return all processes that can be seen; of one parent, if it is given."""
    pids = [int(name) for name in host.names("/proc") if name.isdecimal()]
    if parent is not None:  # the rest of what is told of a process is read for few then
        pids = [
            pid
            for pid in pids
            if host.read(f"/proc/{pid}/stat").rpartition(")")[2].split()[1:2] == [str(parent)]
        ]
    return [one for one in (read_process(host, pid) for pid in sorted(pids)) if one is not None]


def read_process(host: Host, pid: int) -> Process | None:
    """Return a process; None if there is none, or it can't be seen."""
    # The name in parentheses may hold anything: what follows begins behind the last one.
    name, _, rest = host.read(f"/proc/{pid}/stat").rpartition(")")
    field = rest.split()
    if len(field) < 20:
        return None
    uid = _find_uid(host, pid)
    up_s = float((host.read("/proc/uptime").split() or ["0"])[0])
    thread_name = name.partition("(")[2]
    return Process(
        pid=pid, parent=int(field[1]), state=field[0], thread_name=thread_name, uid=uid, user=_name_user(uid),
        age_s=max(0.0, up_s - int(field[19]) / _TICKS_PER_S),
        command=name_command(host.read(f"/proc/{pid}/cmdline").split("\0")) or thread_name,
    )  # fmt: skip


def read_environment(host: Host, pid: int) -> Mapping[str, str]:
    """Return the environment that a process was started with; nothing where it is another user's."""
    entries = host.read(f"/proc/{pid}/environ").split("\0")
    return dict(one.split("=", 1) for one in entries if "=" in one)


def is_inside(host: Host, pid: int, ancestor: int) -> bool:
    """Tell whether a process is another one, or was started by it, or by one that it started."""
    for _ in range(_DEEP):
        if pid == ancestor:
            return True
        told = read_process(host, pid)
        if told is None or told.parent <= 1:
            return False
        pid = told.parent
    return False


def name_command(argv: list[str]) -> str:
    """Return the program and, of an interpreter, its script or module; no other argument."""
    words = [word for word in argv if word]
    if not words:
        return ""
    program = PurePath(words[0].split(" ")[0]).name
    if not program.startswith(("python", "pypy")):
        return program[:40]
    for at, word in enumerate(words[1:], start=1):
        if word == "-m":
            return f"{program} -m {words[at + 1]}"[:80] if at + 1 < len(words) else program
        if word == "-c" or word.startswith("-c"):
            return f"{program} -c …"
        if not word.startswith("-"):
            # The values of -W and -X stand by themselves.
            if words[at - 1] in {"-W", "-X"}:
                continue
            return f"{program} {PurePath(word).name}"[:80]
    return program


def say_age(age_s: float) -> str:
    """Say a span of time in the unit that fits: ``2 h``."""
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"


def _find_uid(host: Host, pid: int) -> int:
    for line in host.read(f"/proc/{pid}/status").splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    return -1


def _name_user(uid: int) -> str:
    try:
        import pwd  # noqa: PLC0415 - not on every system

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError, OverflowError):
        return f"user {uid}" if uid >= 0 else "another user"
