"""Prepares what a rank leaves in a folder when no launcher of ours looks on: under torchrun, srun or mpirun, or started by hand.

The rank records into a file in the host's memory, as a write to a disk may block, and one to a network disk for long. A thread
copies it into the folder (``offline_recorder.py``), so that the folder alone is enough on another day. All files of one run are in one
folder of its own, which every rank finds by itself, from what its launcher has told it: no rank waits for another.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rankwise.base.environ import environ, is_on
from rankwise.base.identity import read_int
from rankwise.base.os_calls import ASK_FD, EVIDENCE_FD, IS_LINUX, NOTES_FD, STACKS_FD, make_memory_file
from rankwise.evidence.in_rank.ring import SIZE_BYTES
from rankwise.evidence.reader.offline_layout import (
    FILES,
    HEAD_BYTES,
    MEMORY,
    OWN_RING,
    UNNAMED,
    VERSION,
    name_kernel,
    read_birth,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.base.identity import Identity

#: Names the place of all runs, and switches recording on for `rankwise.init()`.
VARIABLE = "RANKWISE_EVIDENCE"
DEFAULT_PLACE = "rankwise-evidence"
#: Between two copies of a rank that goes on; one that stands still is copied sooner.
EVERY_S = 30.0
_OLD_S = 86_400.0
_ODD = re.compile(r"[^\w.-]+")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineSetup:
    """What a rank leaves, and by which orders.

    Attributes:
        folder: Of this run.
        identity: Who the rank is.
        orders: For the hook, or for ``arm``: where to write what.
    """

    folder: Path
    identity: Identity
    orders: dict[str, Any]

    def keep_over_exec(self) -> None:
        """Let the program that takes this process's place have the files, under numbers that a script's own files don't get."""
        fds = [
            self.orders["notes"],
            self.orders["stacks"],
            *(self.orders["evidence"][name] for name in ("file", "asks")),
        ]
        moved = [_move(fd, number) for fd, number in zip(fds, (NOTES_FD, STACKS_FD, EVIDENCE_FD, ASK_FD), strict=True)]
        self.orders["notes"], self.orders["stacks"] = moved[:2]
        self.orders["evidence"] |= {"file": moved[2], "asks": moved[3]}
        self.orders["keep"]["asks"] = moved[3]
        if not Path(self.orders["keep"]["ring"]).is_relative_to(MEMORY):
            self.orders["keep"]["ring"] = f"/proc/self/fd/{moved[2]}"


def is_wanted(env: Mapping[str, str]) -> bool:
    """Tell whether anything is to be left at all: not with RANKWISE_WATCH=0, and not where the system can't."""
    return IS_LINUX and is_on("RANKWISE_WATCH", default=True, env=env)


def is_recorded() -> bool:
    """Tell whether this process is recorded already: by `rankwise run`, which reads the records itself, or by `rankwise.watch`."""
    with suppress(OSError):
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if os.readlink(link).startswith(FILES):  # noqa: PTH115 - no path
                    return True
    return False


def prepare(place: str | Path, identity: Identity, *, every_s: float = EVERY_S, program: str = "") -> OfflineSetup:
    """Make this rank's files in the folder of its run.

    Args:
        place: The folder that holds a folder for each run.
        identity: Who this process is.
        every_s: Seconds between two copies while the rank goes on.
        program: The script, to be told.

    Raises:
        OSError: The files can't be made.
    """
    env = environ()
    run, attempt = find_run(env, identity), read_int(env, "TORCHELASTIC_RESTART_COUNT") or 0
    folder = Path(place).absolute() / run
    attempt_folder = folder / f"attempt_{attempt}"
    attempt_folder.mkdir(parents=True, exist_ok=True)
    front = attempt_folder / f"rank{identity.rank}"
    notes, stacks = (_open_new(Path(f"{front}{ending}")) for ending in (".notes.jsonl", ".stacks.txt"))
    file, ring = _make_ring(f"{zlib.crc32(os.fsencode(attempt_folder)):08x}.{identity.rank}")
    asks = _make_pipe()
    head = _describe(identity, run, attempt, program) | {
        "ring": ring if ring.startswith(str(MEMORY)) else "",
        "ring_id": _identify(file),
        "asks_id": _identify(asks)[1],
        "every_s": every_s,
    }
    raw = json.dumps(head).encode()
    if len(raw) <= HEAD_BYTES:
        os.pwrite(file, raw, SIZE_BYTES)
    Path(f"{front}.evidence").write_bytes(raw + b"\n")
    return OfflineSetup(
        folder=folder,
        identity=identity,
        orders={
            "notes": notes,
            "stacks": stacks,
            "stack_signal": None,
            "lifeline": None,
            "identities": (*_identify(notes), *_identify(stacks)),
            "evidence": {"file": file, "asks": asks, "identities": (*_identify(file), *_identify(asks))},
            "keep": {
                "file": f"{front}.evidence", "head": head, "ring": ring, "asks": asks, "every_s": every_s,
                "size": SIZE_BYTES,
            },
        },
    )  # fmt: skip


def arm(setup: OfflineSetup) -> None:
    """Begin to record in this very process, which runs the user's code already."""
    orders = dict(setup.orders)
    keep, places = orders.pop("keep"), {**orders.pop("evidence"), "pid": os.getpid()}
    recorder_module: Any = _load("rank_exit")
    offline_recorder: Any = _load("offline_recorder")
    load = offline_recorder.install(keep, _load, orders["stacks"])
    recorder = recorder_module.arm(**orders)
    if recorder is not None and recorder_module.keep_from_children(places):
        group_watch: Any = _load("group_watch")
        group_watch.install(
            _load,
            recorder,
            recorder_module.let_threads_settle,
            lambda module: load("install").begin(module, places, load, recorder),
            reports_absent=False,
        )


def find_run(env: Mapping[str, str], identity: Identity) -> str:
    """Return a name for the run that all its ranks find, and runs beside it and after it do not, as far as the launcher tells."""
    run = env.get("TORCHELASTIC_RUN_ID", "")
    # torchrun's folder for errors, made anew for each run, tells apart those that share an id; each host has its own.
    private = Path(env.get("TORCHELASTIC_ERROR_FILE", "")).parts
    is_one_host = identity.local_world_size == identity.world_size
    if run and run != "none":
        words = ["run", run]
    elif is_one_host and any(part.startswith("attempt_") for part in private):
        at = next(n for n, part in enumerate(private) if part.startswith("attempt_"))
        words = ["run", private[at - 1]]
    elif "SLURM_JOB_ID" in env:
        words = ["slurm", env["SLURM_JOB_ID"], env.get("SLURM_STEP_ID", "0")]
    elif job := env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", ""):
        words = ["mpi", job]
    else:
        words = ["rendezvous", identity.master_addr or "file", str(identity.master_port or 0)]
    return _ODD.sub("-", "-".join(words))[:100]


def _load(name: str) -> object:
    return import_module(f"rankwise.evidence.in_rank.{name}")


def _describe(identity: Identity, run: str, attempt: int, program: str) -> dict[str, Any]:
    return {
        "version": VERSION,
        "run": run,
        "attempt": attempt,
        "rank": identity.rank,
        "world_size": identity.world_size,
        "local_rank": identity.local_rank if identity.local_rank is not None else identity.rank,
        "host": socket.gethostname(),
        "kernel": name_kernel(),
        "pid": os.getpid(),
        "born": read_birth(os.getpid()),
        "began_s": time.monotonic(),
        "began_time_s": time.time(),  # noqa: TID251 - beside the other clock, at one moment
        "saved_s": time.monotonic(),
        "time_s": time.time(),  # noqa: TID251
        "program": program[:200],
    }


def _make_ring(name: str) -> tuple[int, str]:
    """Return the descriptor and the path of a new file for the records: where there is room in the host's memory, one that outlives us."""
    path = MEMORY / f"rankwise.{os.getuid()}.{name}.{os.getpid()}"
    with suppress(OSError):
        _remove_old()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # All of it now: where there is no room left later, a write would kill the rank.
            os.posix_fallocate(fd, 0, SIZE_BYTES + HEAD_BYTES)
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        return fd, str(path)
    fd = make_memory_file(UNNAMED)
    os.ftruncate(fd, SIZE_BYTES + HEAD_BYTES)
    return fd, f"/proc/self/fd/{fd}"


def _remove_old() -> None:
    """Remove what ranks of yesterday have left in memory: they were killed, and who wanted to know has asked by now."""
    now_s = time.time()  # noqa: TID251 - files have no other clock
    for path in MEMORY.glob(f"rankwise.{os.getuid()}.*"):
        found = OWN_RING.fullmatch(path.name)
        if found and not read_birth(int(found["pid"])):
            with suppress(OSError):
                if now_s - path.stat().st_mtime > _OLD_S:
                    path.unlink()


def _make_pipe() -> int:
    """Return a pipe that is open at both ends: whoever asks opens it for himself, and it never comes to its end."""
    reading, writing = os.pipe()
    both = os.open(f"/proc/self/fd/{reading}", os.O_RDWR | os.O_CLOEXEC)
    os.close(reading)
    os.close(writing)
    return both


def _open_new(path: Path) -> int:
    """Open a file for appending, without what a rank of the same number may have left in it."""
    with suppress(FileNotFoundError):
        path.unlink()
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _move(fd: int, number: int) -> int:
    with suppress(OSError):
        os.fstat(number)
        os.set_inheritable(fd, True)  # noqa: FBT003 - the number is somebody's: the script has what it has
        return fd
    os.dup2(fd, number, inheritable=True)
    os.close(fd)
    return number


def _identify(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def say(text: str) -> None:
    """Say a line to the user, on standard error."""
    sys.stderr.write(f"rankwise: {text}\n")
