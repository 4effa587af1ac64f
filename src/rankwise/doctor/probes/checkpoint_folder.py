"""Whether the folder for checkpoints can do what checkpoints need, and is the same one on all hosts.

**Why it matters.** That a folder can't be written to is usually noticed an hour after the start, at the first checkpoint. On several hosts a folder
that is local to each holds only a part of each checkpoint: some ranks find one to resume from and some don't, and the job hangs. In a
container what is not on a volume is lost with the container.

**How it is checked.** In a folder of its own inside, removed again: a file takes the place of another by `rename`, a folder gets its final name,
a file is flushed (`fsync`) and locked, and for one second, or 64 MiB, data is written. The file system's kind is read from `/proc/mounts`. Between
hosts the device or the server's export, and the number of the folder there (inode), are compared; nothing is left behind for the others.

**What to do.** Use a folder on a file system that all hosts mount (NFS, Lustre, GPFS), at the same path.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from rankwise.doctor.differences import find_odd_hosts, format_groups, group_values
from rankwise.doctor.host import Host
from rankwise.doctor.probe import Fact, Facts, Probe, Reading, Verdict, fail, ok, skipped, warn
from rankwise.doctor.storage import mounts
from rankwise.doctor.storage.folder_trial import Trial, try_folder
from rankwise.doctor.storage.mounts import Mount
from rankwise.doctor.units import join_names

_MIB = 1 << 20
#: A model of a billion parameters with its optimizer is 12 GB: twenty minutes at this speed.
_SLOW_BYTES_PER_S = 10e6


def look(host: Host) -> Iterator[Reading]:
    if host.job.checkpoints is None:
        yield skipped("no checkpoint folder given (--checkpoints)", "nothing to look at")
        return
    if mounts.is_object_store(host.job.checkpoints):
        address = str(host.job.checkpoints).replace(":/", "://", 1)
        yield skipped(f"checkpoints go to {address}", "an object store, not a folder")
        return
    wanted = mounts.find_absolute(host, host.job.checkpoints)
    if not wanted:
        yield fail(
            f"{host.job.checkpoints} is relative to the current folder, which has been deleted", "the first checkpoint fails: `No such file or directory`",
            'cd "$PWD"  # or pass an absolute path'
        )  # fmt: skip
        return
    dangling = mounts.find_dangling(host, wanted)
    if dangling and (told := _report_dangling(host, dangling)) is not None:
        yield told
        return
    folder = mounts.find_existing(host, wanted)
    mount = mounts.find_mount(host, folder)
    facts = _collect(host, folder, mount)
    facts["exists"] = folder == wanted
    if not host.path(folder).is_dir():
        why = "the first checkpoint fails: `Not a directory`"
        yield fail(f"{folder} is not a folder", why, f"ls -l {folder}", facts=facts)
        return
    trial = try_folder(host.path(folder), host.clock)
    if trial.error:
        yield fail(
            f"{folder} can't be written to: {trial.error}", "the first checkpoint fails, long after startup",
            f"ls -ld {folder}; df -h {folder}  # or use another folder", facts=facts
        )  # fmt: skip
        return
    yield from (*_judge_trial(wanted, mount, trial), *_judge_mount(wanted, mount))
    kind = f" ({mount.kind} on {mount.point})" if mount else ""
    later = "" if facts["exists"] else ", not there yet"
    speed = f"{trial.size_bytes // _MIB} MiB written at {trial.bytes_per_s / 1e6:.0f} MB/s"
    yield ok(f"{wanted}{later}{kind}: {speed}", **facts)


def _report_dangling(host: Host, link: str) -> Reading | None:
    try:
        host.path(link).stat()
    except OSError as error:
        reason = error.strerror or str(error)
    else:  # it is there by now
        return None
    return fail(
        f"{link} is a link to {host.path(link).readlink()}, which can't be used: {reason}",
        f"the first checkpoint fails, long after startup: `{reason}`, or `File exists` as no folder can be created there",
        f"namei -l {shlex.quote(link)}  # mount what is to be there, make that folder, or use another one"
    )  # fmt: skip


def compare(facts: Mapping[str, Facts]) -> Iterator[Reading]:
    groups = group_values({host: _name_place(info) for host, info in facts.items()})
    if len(groups) < 2:
        return
    local = [host for host, info in facts.items() if not info.get("is_shared")]
    folder = next((str(info.get("folder")) for info in facts.values()), "")
    kinds = {host: f"{one.get('kind') or 'unknown'} on {one.get('source') or '?'}" for host, one in facts.items()}
    # Where a file system is missing, the checkpoints of these hosts are lost to the others for sure.
    verdict: Verdict = "fail" if 0 < len(local) < len(facts) else "warn"
    what, fix = (
        "the same folder on all hosts",
        f"findmnt -T {folder}  # on these hosts; mount -a, if it is not mounted",
    )
    if local:
        what = f"shared by all hosts, and local to each of {join_names(local)}"
        fix += "; or use a folder that all hosts mount"
    yield Reading(
        verdict, f"{folder} is not {what}: {format_groups(group_values(dict(kinds)) if local else groups)}",
        "no host has a complete checkpoint of a sharded model, and only some ranks find one to resume from: the others start from scratch, and the job hangs",
        fix, "K8", hosts=tuple(local) or find_odd_hosts(groups)
    )  # fmt: skip


def _collect(host: Host, folder: str, mount: Mount | None) -> dict[str, Fact]:
    facts: dict[str, Fact] = {"folder": folder}
    if mount is not None:
        facts |= {name: getattr(mount, name) for name in ("kind", "source", "point", "is_shared", "is_fuse")}
    try:
        info = host.path(folder).stat()
    except OSError:
        return facts
    # Two containers on one machine have the same kernel, and may have the same folder.
    boot = host.read("/proc/sys/kernel/random/boot_id")
    return facts | {"inode": info.st_ino, "device": info.st_dev, "boot": boot}


def _name_place(info: Facts) -> str:
    """Name the folder so that two hosts have the same name if they have the same folder."""
    if info.get("is_shared"):
        if info.get("is_fuse"):
            return f"{info.get('kind')} {info.get('source')}"
        # One server may have several addresses; the folder's number there is the same.
        return f"{info.get('kind')} inode {info.get('inode')}"
    return f"boot {info.get('boot')} device {info.get('device')} inode {info.get('inode')}"


def _judge_trial(folder: str, mount: Mount | None, trial: Trial) -> Iterator[Reading]:
    kind, other = f" ({mount.kind})" if mount else "", "# use a folder on another file system"
    if trial.rename_error:
        why = "checkpoints are written under another name and renamed when they are complete: this fails"
        yield fail(
            f"a file or folder in {folder}{kind} can't take its final name: {trial.rename_error}", why, other
        )  # fmt: skip
    if trial.sync_error:
        why = "after a crash of the host, a checkpoint may be empty"
        yield warn(f"data in {folder}{kind} can't be flushed: {trial.sync_error}", why, other)
    if not trial.has_locks:
        why = "two jobs that write into one folder by mistake are not detected"
        fix = "# mount it with locks: without nolock for NFS, with flock for Lustre"
        yield warn(f"files in {folder}{kind} can't be locked", why, fix)
    if trial.bytes_per_s < _SLOW_BYTES_PER_S:
        yield warn(
            f"{folder}{kind} takes {trial.bytes_per_s / 1e6:.1f} MB/s ({trial.size_bytes // _MIB} MiB, flushed)",
            "all ranks wait while a checkpoint is written; a long wait ends in the timeout of a collective", f"df -h {folder}  # or use a faster folder"
        )  # fmt: skip


def _judge_mount(folder: str, mount: Mount | None) -> Iterator[Reading]:
    if mount is not None and mount.kind in {"tmpfs", "ramfs"}:
        why = "checkpoints take memory from the job, and are lost when the host restarts"
        yield warn(f"{folder} is in memory ({mount.kind})", why, "# use a folder on a disk")
    elif mount is not None and mount.kind == "overlay" and mount.point == "/":
        fix = f"docker run -v /some/disk:{folder} …  # or a volume of Kubernetes"
        what = f"{folder} is in the container's own file system (overlay)"
        why = "checkpoints are lost with the container"
        yield warn(what, why, fix)


PROBE = Probe(
    "checkpoint-folder", "the folder for checkpoints", "storage", "quick", look, classes=("K8",), compare=compare
)
