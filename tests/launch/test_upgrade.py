"""Somebody replaces the package while a job runs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import rankwise
from rankwise.launcher.late_imports import ROOMS
from support import Running, wait_until, write_script

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.linux

_SCRIPT = """
    import pathlib, time
    while not pathlib.Path("gone").exists():
        time.sleep(0.05)
    raise ValueError("no such data")
"""


def list_modules(package: Path) -> Iterator[str]:
    """Yield what a launcher may still need."""
    for room in ROOMS:
        for path in (package / room.replace(".", "/")).rglob("*.py"):
            yield ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")


def test_a_job_outlives_the_removal_of_the_package(tmp_path: Path) -> None:
    """The launcher has by then imported what its report needs: the exit code is the script's, and the cause is told."""
    copy = shutil.copytree(Path(rankwise.__file__).parent, tmp_path / "installed" / "rankwise")
    late = copy / "launcher" / "late_imports.py"
    text = late.read_text()
    late.write_text(text.replace("_AFTER_S, _AT_ONCE_S = 5.0, 0.01", "_AFTER_S, _AT_ONCE_S = 0.0, 60.0"))
    assert late.read_text() != text  # all at the first look: the test need not wait
    write_script(tmp_path, _SCRIPT)
    names = set(list_modules(copy))
    job = Running(
        [sys.executable, "-m", "rankwise.run", "--nproc-per-node", "2", "train.py"],
        tmp_path, env={"PYTHONPATH": str(copy.parent), "PYTHONVERBOSE": "1"},
    )  # fmt: skip
    wait_until(lambda: all(f"import '{name}'" in job.err for name in names), 60, "all imports")
    shutil.rmtree(copy.parent)
    (tmp_path / "gone").touch()
    done = job.finish(30)
    report = done.err[done.err.index("rankwise: the job failed") :]
    assert (done.code, "ValueError: no such data" in report, "installed" in report) == (1, True, False)
