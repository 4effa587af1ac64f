"""Space for files where jobs write: the temporary folder, the current one, and that of the checkpoints.

**Why it matters.** A full disk ends a rank with `No space left on device`, often in the middle of a checkpoint; a full `/tmp` already stops
launchers, compilers of kernels and data-loading workers at their start. A disk can be full of files while bytes are free (inodes), and quotas
(`Disk quota exceeded`) are not seen here.

**How it is checked.** What the file system reports of free bytes and inodes for your user, and whether it is mounted read-only. Nothing is written.

**What to do.** Remove what is no longer needed, or write elsewhere: `TMPDIR` for temporary files, another folder for checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rankwise.doctor.host import Host
from rankwise.doctor.probe import Probe, Reading, fail, ok, skipped
from rankwise.doctor.storage import mounts
from rankwise.doctor.storage.mounts import Mount
from rankwise.doctor.units import format_count, format_size

_MIB, _GIB = 1 << 20, 1 << 30
_FEW_INODES = 1000


@dataclass(frozen=True, slots=True)
class _Place:
    """A folder that jobs write to: below ``full`` they break, below ``tight`` some do."""

    title: str
    folder: str
    full_bytes: int
    tight_bytes: int
    must_write: bool = True


def look(host: Host) -> Iterator[Reading]:
    current = mounts.find_current(host)
    mounted = mounts.read_mounts(host)
    info: dict[str, str] = {}
    found: list[Reading] = []
    if not current:
        why = "every program that asks for its current folder ends with `FileNotFoundError: [Errno 2] No such file or directory`"
        found.append(fail("the current folder has been deleted", why, 'cd "$PWD"  # or another folder'))
    for place in _list_places(host, current):
        folder = mounts.find_existing(host, place.folder)
        usage = host.usage(folder)
        if usage is None:
            continue
        found += _judge(host, place, folder, usage, mounts.find_mount(host, folder, mounted))
        # Some file systems of networks and programs tell no size at all.
        info |= {place.folder: f"{place.folder}: {format_size(usage[1])}"} if usage[0] else {}
    yield from found
    if not info and not found:
        yield skipped("free space is unknown", "this system reports it differently")
    elif not found:
        yield ok(f"free: {', '.join(info.values())}")


def _list_places(host: Host, current: str) -> list[_Place]:
    folder = mounts.find_absolute(host, host.job.checkpoints) if host.job.checkpoints is not None else ""
    # A link to nowhere is on no disk: the probe of that folder reports it.
    if folder and mounts.find_dangling(host, folder):
        folder = ""
    places = [
        _Place("the folder of the checkpoints", folder, 256 * _MIB, 2 * _GIB),
        _Place("the temporary folder", host.env.get("TMPDIR") or "/tmp", 64 * _MIB, _GIB // 2),
        _Place("the current folder", current, 16 * _MIB, _GIB // 2, must_write=False),
    ]
    return [one for one in places if one.folder]


def _judge(host: Host, place: _Place, folder: str, usage: tuple[int, int], mount: Mount | None) -> Iterator[Reading]:
    size, free = usage
    where, disk, top = f"{place.title} {place.folder}", "", folder
    if mount:
        disk, top = f" (on {mount.point}, {mount.kind})", mount.point
    is_temporary, is_checkpoint = "temporary" in place.title, "checkpoints" in place.title
    inodes = host.count_inodes(folder)
    if mount is not None and mount.is_read_only and place.must_write:
        yield fail(
            f"{where} can't be written to: {mount.point} ({mount.kind}) is mounted read-only",
            "`Read-only file system`: launchers, compilers of kernels or checkpoints fail", f"mount | grep ' {mount.point} '  # and use another folder"
        )  # fmt: skip
    elif inodes is not None and inodes[1] < _FEW_INODES:
        yield Reading(
            "fail" if inodes[1] < 10 else "warn",
            f"{where} has space for {format_count(inodes[1], 'more file')} of {inodes[0]}{disk}, and {format_size(free)} free",
            "`No space left on device`, although bytes are free", f"du --inodes -xs {top}/* | sort -n | tail"
        )  # fmt: skip
    elif free < min(place.tight_bytes, size):
        yield Reading(
            "fail" if free < place.full_bytes else "warn", f"{where} has {format_size(free)} of {format_size(size)} free{disk}",
            "a rank ends with `No space left on device`" + " in the middle of a checkpoint" * is_checkpoint,
            f"du -xsh {top}/* | sort -h | tail  # what takes the space" + "\nexport TMPDIR=…  # a folder with space" * is_temporary
        )  # fmt: skip


PROBE = Probe("disk-space", "disk space", "storage", "instant", look)
