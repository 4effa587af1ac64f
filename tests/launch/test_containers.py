"""Containers take things away: read-only disks, little shared memory, hidden processes, refused system calls."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support import RANKWISE, Running, run_rankwise, without_patience, write_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux

_REDUCE = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    os.write(1, b"%d " % int(value))  # in one piece
    dist.destroy_process_group()
"""
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # EPERM
_PRCTL, _MEMFD_CREATE, _SUBREAPER = 157, 319, 36


def _can_unshare() -> bool:
    unshare = shutil.which("unshare")
    return (
        unshare is not None and not subprocess.run([unshare, "-m", "true"], capture_output=True, check=False).returncode
    )


needs_mounts = pytest.mark.skipif(not _can_unshare(), reason="needs the right to unshare mounts")
needs_amd64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="system calls have other numbers here")


def _in_namespace(setup: str, cwd: Path, *args: str) -> Running:
    command = f'{setup} && cd {cwd} && exec "$@"'
    return Running(["unshare", "-m", "-p", "-f", "sh", "-ec", command, "sh", *RANKWISE, *args], cwd)


@needs_mounts
@pytest.mark.own_server
def test_a_read_only_disk_and_little_shared_memory_are_enough(tmp_path: Path) -> None:
    """With a read-only disk, one megabyte of /tmp and 64 kB of /dev/shm ranks start warm, and meet."""
    write_script(tmp_path, _REDUCE)
    setup = (
        "mount -t proc proc /proc && mount -t tmpfs -o size=64k tmpfs /dev/shm && mount --bind / / && "
        f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind / && mount -o remount,ro,bind {tmp_path} && "
        "mount -t tmpfs -o size=1m tmpfs /mnt && export TMPDIR=/mnt"
    )
    result = _in_namespace(setup, tmp_path, "--nproc-per-node", "2", "train.py").finish()
    assert (result.code, result.out.split(), without_patience(result.err)) == (0, ["2", "2"], "")


@needs_mounts
def test_without_any_place_to_write_the_error_is_a_line_or_logs_go_to_memory(tmp_path: Path) -> None:
    """Where no temporary folder can be made, shared memory takes the logs; the job runs."""
    write_script(tmp_path, "print('here')")
    setup = (
        "mount -t tmpfs -o size=1m tmpfs /dev/shm && mount --bind / / && "
        f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind / && mount -o remount,ro,bind {tmp_path}"
    )
    result = _in_namespace(setup, tmp_path, "train.py").finish()
    assert (result.code, result.out, result.err) == (0, "here\n", "")


@needs_mounts
def test_hidden_processes_cost_the_warm_start_only(tmp_path: Path) -> None:
    """Without /proc nobody can count the server's threads: ranks start cold, with the reason in a line."""
    write_script(tmp_path, _REDUCE)
    result = _in_namespace("umount -l /proc", tmp_path, "--nproc-per-node", "2", "train.py").finish()
    assert (result.code, result.out.split()) == (0, ["2", "2"])
    assert (
        without_patience(result.err)
        == "rankwise: cold start: the threads of a process can't be counted: /proc does not show them\n"
    )


def _refuse_system_calls() -> None:
    """Have the kernel answer EPERM to memfd_create and to the wish to adopt orphans, as a sandbox may."""
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (0x20, 0, 0, 0),  # load the number of the system call
            (0x15, 3, 0, _MEMFD_CREATE),
            (0x15, 0, 3, _PRCTL),
            (0x20, 0, 0, 16),  # load its first argument
            (0x15, 0, 1, _SUBREAPER),
            (0x06, 0, 0, _REFUSE),
            (0x06, 0, 0, _ALLOW),
        )
    )
    buffer = ctypes.create_string_buffer(program)
    filtered = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.create_string_buffer(filtered), 0, 0):
        os._exit(97)


@needs_amd64
def test_a_sandbox_that_refuses_system_calls_costs_the_warm_start_only(tmp_path: Path) -> None:
    """Where orphans can't be adopted and memory files can't be made, ranks start cold, with the reason in a line."""
    write_script(tmp_path, _REDUCE)
    result = Running(
        [*RANKWISE, "--nproc-per-node", "2", "train.py"], tmp_path, preexec_fn=_refuse_system_calls
    ).finish()
    assert (result.code, result.out.split()) == (0, ["2", "2"]), result.err
    assert without_patience(result.err) == "rankwise: cold start: this system does not let us adopt forked ranks\n"


def test_a_low_limit_of_open_files_is_enough(tmp_path: Path) -> None:
    """A limit of open files that many a container has is enough for sixteen ranks, warm."""
    write_script(tmp_path, "import torch, os; os.write(1, os.environ['RANK'].encode() + b' ')")
    args = ["-c", 'ulimit -n 128; exec "$@"', "sh", sys.executable, "-m", "rankwise.run"]
    result = run_rankwise(
        ["--nproc-per-node", "16", "train.py"], tmp_path, launcher=["sh", *args], env={"OMP_NUM_THREADS": "1"}
    )
    assert result.code == 0, result.err
    assert sorted(map(int, result.out.split())) == list(range(16))
    assert result.err == "rankwise: the limit of open files (ulimit -n) is too low to record what 16 ranks do\n"
