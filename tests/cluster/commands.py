"""Run `rankwise submit`, `jobs`, `logs` and `cancel` as users do, with the records in a folder of the test."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from support import make_env

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

RANKWISE = (sys.executable, "-m", "rankwise")


def make_job_env(folder: Path, env: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Return the environment of a test's commands: records go below its folder."""
    return make_env({"XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1", **(env or {})})


def call(
    folder: Path, *args: str, at: Sequence[str] = (), env: Mapping[str, str | None] | None = None, timeout_s: float = 100
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a command in a folder, to its end.

    Args:
        folder: The current one.
        args: Behind `rankwise`.
        at: What enters the host.
        env: More variables.
        timeout_s: How long it may take.
    """
    return subprocess.run([*enter(at, folder), *RANKWISE, *args], cwd=folder, env=make_job_env(folder, env), capture_output=True, text=True, timeout=timeout_s, check=False)  # fmt: skip


def enter(at: Sequence[str], folder: Path) -> list[str]:
    """Return the words that run a command on a host, in a folder: who enters a host's mounts stands in /."""
    return [*at, "env", "-C", str(folder)] if at else []


def list_jobs(folder: Path, *args: str) -> list[dict[str, Any]]:
    """Return what `rankwise jobs` says."""
    found: list[dict[str, Any]] = json.loads(call(folder, "jobs", "--format", "json", *args).stdout)
    return found
