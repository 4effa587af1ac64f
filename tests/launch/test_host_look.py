"""What the doctor says beside a run: above it what will surely break it, below a failed one what fits the failure."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from support import RANKWISE, Running, run_rankwise, write_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux

_FULL = "mount -t tmpfs -o size=2g tmpfs /dev/shm && fallocate -l 2000M /dev/shm/left"


def _can_mount() -> bool:
    tools = all(shutil.which(tool) for tool in ("unshare", "fallocate"))
    return tools and not subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode


needs_mounts = pytest.mark.skipif(not _can_mount(), reason="needs the right to unshare mounts")


def _with_full_memory(cwd: Path, *args: str, env: dict[str, str | None] | None = None) -> Running:
    return Running(["unshare", "-m", "sh", "-ec", f'{_FULL} && exec "$@"', "sh", *RANKWISE, *args], cwd, env=env)


@needs_mounts
def test_a_full_shared_memory_is_said_above_the_run_and_below_the_failure(tmp_path: Path) -> None:
    """It stops nothing; when a rank fails, the report says it again, in text and as JSON, whatever the rank died of."""
    write_script(tmp_path, "raise SystemExit(3)")
    result = _with_full_memory(tmp_path, "--report", "r.json", "train.py").finish()
    before, _, after = result.err.partition("rankwise: the job failed")
    assert result.code == 3
    assert "rankwise: /dev/shm has 2048 MiB, 48 MiB of it free" in before
    assert "  -> more: rankwise rule shared-memory" in before
    assert "also: /dev/shm has 2048 MiB, 48 MiB of it free ->" in after
    (note,) = json.loads((tmp_path / "r.json").read_text())["notes"]
    assert note.startswith("also: /dev/shm has 2048 MiB")


@needs_mounts
def test_what_the_verdict_says_itself_is_not_said_twice(tmp_path: Path) -> None:
    """A rank that SIGBUS has killed is told with the full /dev/shm as the reason, once."""
    write_script(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGBUS)")
    report = _with_full_memory(tmp_path, "train.py").finish().err.partition("rankwise: the job failed")[2]
    assert report.count("/dev/shm") == 1, report
    assert "/dev/shm is full (48 MiB free)" in report


@needs_mounts
def test_it_can_be_switched_off(tmp_path: Path) -> None:
    """With RANKWISE_DOCTOR=0 nothing is looked at."""
    write_script(tmp_path, "raise SystemExit(3)")
    result = _with_full_memory(tmp_path, "train.py", env={"RANKWISE_DOCTOR": "0"}).finish()
    assert (result.code, "/dev/shm" in result.err) == (3, False)


def test_a_sound_host_has_nothing_said_of_it(tmp_path: Path) -> None:
    """Neither above a run nor below a failed one."""
    write_script(tmp_path, "raise SystemExit(3)")
    result = run_rankwise(["train.py"], tmp_path)
    assert result.err.startswith("rankwise: the job failed\n")
    assert "also: " not in result.err
