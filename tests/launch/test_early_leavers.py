"""Real jobs in which ranks leave early: who works on after the exception that tells it is left alone; who can't is told apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support import run_reported, write_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux
#: Two of four ranks end early; the last all_reduce of rank 0 ends only when its neighbour leaves.
LEAVERS = """
import os, sys, time, torch, torch.distributed as dist
def main():
    dist.init_process_group("gloo")
    rank, one = dist.get_rank(), torch.ones(1)
    for step in range(20):
        if rank >= 2 and step == 10: sys.exit(0)
        {turn}
    time.sleep(4)
    print("result", rank, flush=True)
    os._exit(0)
try:
    main()
except Exception as error:
    print("failed", error)
    sys.exit(1)
"""


def test_who_drains_its_group_by_the_exception_goes_on(tmp_path: Path) -> None:
    """Ranks 0 and 1 work until the others have left, which they learn by the exception that they handle: the job ends with 0."""
    drains = "try: dist.all_reduce(one)\n        except RuntimeError: break"
    write_script(tmp_path, LEAVERS.replace("{turn}", drains))
    result, report = run_reported(["--nproc-per-node", "4", "train.py"], tmp_path)
    assert (result.code, report["kind"]) == (0, "ok"), result.err
    assert "result 0" in result.out
    assert "result 1" in result.out


def test_a_script_that_only_logs_what_ends_it_is_proved_to_hang(tmp_path: Path) -> None:
    """Its main function stands in a try: that ends the rank, and who ended early is named without any bound."""
    away = "if rank == 1 and step == 10: time.sleep(1000)\n        dist.all_reduce(one)"
    write_script(tmp_path, LEAVERS.replace("{turn}", away))
    result, report = run_reported(["--nproc-per-node", "4", "train.py"], tmp_path, timeout_s=40)
    assert (result.code, report["kind"], report["rule"], report["culprits"]) == (
        1,
        "hang",
        "member_ended",
        [2, 3],
    )


_CLOSES = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(6):
    if rank == 1 and step == 3: continue
    dist.recv(torch.ones(1), 1) if rank == 0 else dist.isend(torch.ones(1), 0).wait()
dist.destroy_process_group()
time.sleep(1000 * rank)
"""


def test_who_destroys_its_group_is_the_cause_though_it_goes_on(tmp_path: Path) -> None:
    """Rank 0 waits for a message of rank 1, which has destroyed its group and works on: the one that failed is not the cause."""
    write_script(tmp_path, _CLOSES)
    result, report = run_reported(["--nproc-per-node", "2", "train.py"], tmp_path, timeout_s=40)
    assert (result.code, report["culprits"]) == (1, [1]), result.err
    assert "rank 1 destroyed the process group while rank 0 still needed it at" in result.err
    assert report["where"].endswith("train.py:6")
