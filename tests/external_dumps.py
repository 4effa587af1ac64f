"""Dumps of jobs that ran without us: recordings of real ones, and the same in the form that NCCL gives them."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

#: Recorded with torch 2.13 and Gloo, and py-spy 0.4; the folders' names are changed.
#: ddp: rank 2 of 4 sleeps before its fourth forward pass. mismatch: rank 1 of 3 broadcasts where the others reduce.
#: absent: rank 1 of 3 sleeps, the others are in a barrier; ranks 0 and 1 have a group of their own.
RECORDINGS = Path(__file__).parent / "recordings"


def read_recording(name: str, rank: int) -> dict[str, Any]:
    """Return the flight recorder of a rank, as torch has it."""
    body: dict[str, Any] = pickle.loads((RECORDINGS / name / f"nccl_trace_rank_{rank}").read_bytes())
    return body


def write_dumps(folder: Path, bodies: dict[int, Any]) -> Path:
    """Write flight recorders as NCCL's watchdog does."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, body in bodies.items():
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(body, protocol=2))
    return folder


def as_nccl(body: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Return a recording as NCCL would have made it: with members, states and times of begin and end, and none retired when it times out."""
    entries = [_as_nccls(entry) for entry in body["entries"]]
    ranks = str(list(range(world_size)))
    numbers = [entry["collective_seq_id"] for entry in entries]
    status = {"last_enqueued_collective": max(numbers), "last_started_collective": max(numbers), "last_completed_collective": max(numbers)}  # fmt: skip
    return {
        **body,
        "comm_lib_version": "2.27.5",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "pg_status": {"0": status},
        "entries": entries,
    }


def _as_nccls(entry: dict[str, Any]) -> dict[str, Any]:
    made = entry["time_created_ns"]
    return {
        **entry,
        "profiling_name": entry["profiling_name"].replace("gloo:", "nccl:"),
        "state": "completed" if entry["retired"] else "started",
        "time_discovered_started_ns": made + 1000,
        "time_discovered_completed_ns": made + 2000 if entry["retired"] else None,
        # The watchdog lets go of what has timed out before it writes.
        "retired": True,
        "timeout_ms": 600000,
    }


def copy_recording(name: str, folder: Path) -> Path:
    """Copy a recording, so that files can be added and left out."""
    shutil.copytree(RECORDINGS / name, folder)
    return folder
