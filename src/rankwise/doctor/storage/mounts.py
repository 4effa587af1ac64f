"""Which file system a folder is on."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import final

from rankwise.doctor.host import Host

#: Those that several hosts can have at once; what a program provides (FUSE) mostly is one of a network or of an object
#: store, too.
_SHARED = {
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "wekafs", "cifs", "smb3", "afs", "panfs", "pvfs2", "orangefs", "9p", "virtiofs",
    "glusterfs", "vastnfs", "ocfs2", "gfs2", "quobyte",
}  # fmt: skip
_LOCAL_FUSE = {
    f"fuse.{name}" for name in ("fuse-overlayfs", "mergerfs", "bindfs", "lxcfs", "unionfs", "gvfsd-fuse", "portal")
}


@final
@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system: the device, or the server and what it exports; where; ``ext4``, ``nfs4``, ``overlay``; and how."""

    source: str
    point: str
    kind: str
    options: tuple[str, ...] = ()

    @property
    def is_shared(self) -> bool:
        """Whether several hosts can have it at once."""
        return self.kind in _SHARED or self.is_fuse

    @property
    def is_fuse(self) -> bool:
        """Whether a program provides it, which may number its files anew each time."""
        return self.kind.startswith("fuse.") and self.kind not in _LOCAL_FUSE

    @property
    def is_read_only(self) -> bool:
        """Whether nothing can be written to it."""
        return "ro" in self.options


def read_mounts(host: Host) -> list[Mount]:
    """Return all mounted file systems, in the order in which they were mounted."""
    rows = (line.split(" ") for line in host.read("/proc/mounts").splitlines())
    found = (row for row in rows if len(row) >= 4)
    return [Mount(_unescape(row[0]), _unescape(row[1]), row[2], tuple(row[3].split(","))) for row in found]


def find_mount(host: Host, folder: str, mounts: Sequence[Mount] | None = None) -> Mount | None:
    """Return the file system that a folder, or what of its path is there, is on; None where the system does not tell."""
    path = PurePosixPath(os.path.realpath(host.path(folder)))
    root = PurePosixPath(os.path.realpath(host.root))
    inside = str(PurePosixPath("/") / path.relative_to(root) if path.is_relative_to(root) else folder)
    known = read_mounts(host) if mounts is None else mounts
    above = [one for one in known if one.point in {"/", inside} or inside.startswith(one.point + "/")]
    # Of two at one place the later one is seen.
    return max(reversed(above), key=lambda one: len(one.point), default=None)


def find_current(host: Host) -> str:
    """Return the current folder as the kernel knows it, and not as PWD says; empty if it has been deleted."""
    try:
        info = str(host.path("/proc/self/cwd").readlink())
    except OSError:
        try:
            return str(Path.cwd())
        except OSError:
            return ""
    return "" if info.endswith(" (deleted)") and not host.has(info) else info


def is_object_store(folder: Path) -> bool:
    """Return whether a folder is none, but the address of something else: ``s3://bucket/x``.

    As a path it has lost a slash.
    """
    return re.match(r"(?!file:)[a-z][a-z0-9+.-]+:/", str(folder), re.IGNORECASE) is not None


def find_absolute(host: Host, folder: Path) -> str:
    """Return a folder from the root on; empty if it is none, or is meant from the current one, and that has been deleted."""
    if is_object_store(folder):
        return ""
    if str(folder).lower().startswith("file:/"):
        folder = Path(str(folder)[len("file:") :])
    if folder.is_absolute():
        return str(folder)
    current = find_current(host)
    return str(Path(current) / folder) if current else ""


def find_existing(host: Host, folder: str) -> str:
    """Return a folder, or the nearest one above it that is there."""
    path = Path(folder)
    return str(next((one for one in (path, *path.parents) if host.has(str(one))), path.anchor))


def find_dangling(host: Host, folder: str) -> str:
    """Return the link on a folder's path that leads to nothing, or to where we may not look; empty without one.

    We can't make a folder there.
    """
    path = Path(folder)
    for one in takewhile(lambda one: not host.has(str(one)), (path, *path.parents)):
        with suppress(OSError):  # a folder above that we may not look into
            if host.path(str(one)).is_symlink():
                return str(one)
    return ""


def _unescape(text: str) -> str:
    return text if "\\" not in text else re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), text)
