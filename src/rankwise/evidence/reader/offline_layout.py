"""The folder and the memory files of a rank that has no launcher of ours: where they are, whose they are, and whether the rank still lives."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.evidence.reader.process_state import read_process
from rankwise.evidence.reader.process_table import read_stat

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Grows when a reader of before would misread what is written now.
VERSION = 1
#: Behind the records, in the same file: whose they are, for ranks of the same host that find it dead.
HEAD_BYTES = 4096
MEMORY = Path("/dev/shm")
UNNAMED = "rankwise-watch"
#: How the links of a process begin that lead to its records: under `rankwise run`, and elsewhere.
FILES = ("/memfd:evidence", f"/memfd:{UNNAMED}", f"{MEMORY}/rankwise.")
OWN_RING = re.compile(r"rankwise\.(?P<user>\d+)\.[0-9a-f]+\.\d+\.(?P<pid>\d+)")


def name_kernel() -> str:
    """Return what tells whether a process number means here what it means there: the boot, and the numbers' own name space."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - no path
    except OSError:
        numbers = ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{boot} {numbers}"


def read_birth(pid: int) -> int:
    """Return when a process was started, in the kernel's ticks since the boot: with its number it is a name for it. 0 if there is none."""
    found = read_stat(pid)
    return int(found.fields[19]) if found is not None and len(found.fields) > 19 else 0


def is_alive(head: Mapping[str, Any]) -> bool:
    """Tell whether a rank lives, and can be seen from here."""
    if head["kernel"] != name_kernel() or read_birth(int(head["pid"])) != head["born"]:
        return False
    process = read_process(int(head["pid"]))
    return process is not None and process.state != "ended" and _holds(int(head["pid"]), head["ring_id"])


def _holds(pid: int, ring_id: list[int]) -> bool:
    """Tell whether a process has the file of its records yet: after an exec another program has its number.

    Of others' processes it is not known.
    """
    folder, inode = Path(f"/proc/{pid}"), str(ring_id[1])
    try:
        with (folder / "maps").open(encoding="utf-8", errors="replace") as maps:
            if any("rankwise" in line and line.split(maxsplit=5)[4] == inode for line in maps):
                return True
        links = list((folder / "fd").iterdir())  # before torch is imported it is not mapped
    except OSError:
        return True
    return any(_is_file(link, ring_id) for link in links)


def _is_file(path: Path, identity: list[int]) -> bool:
    with suppress(OSError):
        status = path.stat()
        return [status.st_dev, status.st_ino] == list(identity)
    return False


def is_own_ring(path: Path) -> bool:
    """Tell whether a path is one that a rank of this user keeps its records at, in the host's memory."""
    found = OWN_RING.fullmatch(path.name)
    return path.parent == MEMORY and found is not None and int(found["user"]) == os.getuid()
