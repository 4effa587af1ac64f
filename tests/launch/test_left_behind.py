"""Ranks that wait for one that has already left are told from ranks that are merely slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support import run_reported, write_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux
ARGS = ["--nproc-per-node", "2", "--hang-timeout", "1.5", "train.py"]
LEAVES = """
import os, sys, time, torch, torch.distributed as dist
if os.environ["RANK"] == "0":
    sys.exit(0)
"""


def test_a_rank_that_left_before_init_is_named(tmp_path: Path) -> None:
    """Rank 0 ends without an error, rank 1 waits for it in init_process_group: a hang, and rank 0 is the culprit."""
    script = write_script(tmp_path, LEAVES + "dist.init_process_group('gloo')\n")
    result, report = run_reported(ARGS, tmp_path)
    assert (result.code, report["kind"], report["culprits"]) == (1, "hang", [0])
    assert report["where"] == f"{script}:{len(script.read_text().splitlines())}"
    assert report["waiting"] == [{"rank": 1, "where": report["where"], "op": "init_process_group"}]


def test_a_rank_that_sleeps_after_another_has_ended_is_left_alone(tmp_path: Path) -> None:
    """Idle, but in no collective: rank 1 may sleep as long as it likes after rank 0 has ended."""
    write_script(tmp_path, LEAVES + "time.sleep(4)\n")
    result, report = run_reported(ARGS, tmp_path)
    assert (result.code, report["kind"]) == (0, "ok")


def test_the_watch_can_be_switched_off(tmp_path: Path) -> None:
    """With RANKWISE_WATCH=0 nobody judges: rank 1's own timeout ends the wait."""
    write_script(
        tmp_path,
        LEAVES + "from datetime import timedelta\ndist.init_process_group('gloo', timeout=timedelta(seconds=5))\n",
    )
    _, report = run_reported(ARGS, tmp_path, env={"RANKWISE_WATCH": "0"})
    assert report["exits"] == {"0": 0, "1": 1}
