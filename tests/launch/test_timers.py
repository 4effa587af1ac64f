"""Timers that ranks set themselves: torchrun's watchdog, served here too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support import run_reported, write_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux


def test_a_timer_that_expires_is_the_cause(tmp_path: Path) -> None:
    """Rank 1 stays in a timer of a second: it is killed, the report says for which timer, and the pipe is gone afterwards."""
    script = write_script(tmp_path, """
        import os, time, torch.distributed as dist
        from torch.distributed.elastic import timer
        timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
        dist.init_process_group("gloo")
        with timer.expires(after=60, scope="meeting"):
            dist.barrier()
        if dist.get_rank() == 1:
            with timer.expires(after=1, scope="validation"):
                time.sleep(50)
        dist.barrier()
    """)  # fmt: skip
    pipe = tmp_path / "timers"
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": str(pipe)}
    result, report = run_reported(["--nproc-per-node", "2", str(script)], tmp_path, env=env)
    assert result.code == 137
    assert report["culprits"] == [1]
    assert "rank 1: killed by SIGKILL by torch's watchdog, as its timer 'validation' expired" in report["message"]
    assert "allow more time" in report["fix"]
    assert not pipe.exists()
