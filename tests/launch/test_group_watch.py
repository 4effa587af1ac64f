"""Scripts that call init_process_group themselves: doubles, strangers and absentees are named there too, warm and cold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support import run_rankwise, run_reported, write_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux

WAYS = pytest.mark.parametrize("way", [[], ["--cold"]], ids=["warm", "cold"])


@WAYS
def test_doubled_ranks_end_the_job_and_are_named(way: list[str], tmp_path: Path) -> None:
    """I10: a script that makes every process rank 0 would hang for half an hour; it ends, and both pids are told."""
    script = write_script(tmp_path, """
        import torch.distributed as dist
        dist.init_process_group("gloo", rank=0, world_size=2)
    """)  # fmt: skip
    result, report = run_reported([*way, "--nproc-per-node", "2", str(script)], tmp_path)
    assert result.code == 1
    assert report["class"] == "I10"
    assert "2 processes claim rank 0: pid " in report["message"]
    assert report["culprits"] == [0, 1]
    assert report["where"] == f"{script}:2"
    assert "own RANK" in report["fix"]


def test_different_world_sizes_end_the_job_and_are_named(tmp_path: Path) -> None:
    """I12: a script that passes a world size by rank is told both sizes."""
    script = write_script(tmp_path, """
        import os, torch.distributed as dist
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", rank=rank, world_size=2 + rank)
    """)  # fmt: skip
    _, report = run_reported(["--nproc-per-node", "2", str(script)], tmp_path)
    assert report["class"] == "I12"
    assert "the ranks disagree about the world size" in report["message"]


def test_a_stale_file_ends_the_job_and_is_named(tmp_path: Path) -> None:
    """I13: the second run on a file:// that a killed run left behind gets through, or is told of the ended process; it does not hang."""
    script = write_script(tmp_path, f"""
        import os, signal, torch.distributed as dist
        dist.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=int(os.environ["RANK"]), world_size=2)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    """)  # fmt: skip
    run_rankwise(["--nproc-per-node", "2", str(script)], tmp_path)
    assert (tmp_path / "meet").exists()
    result, report = run_reported(["--nproc-per-node", "2", str(script)], tmp_path)
    # Whether torch finds the new address or the old one is a race; where it would wait for ever, it is told. Gloo of
    # torch 2.8 may be refused there, and then the verdict names what it found.
    is_told = report["class"] == "I13" or "(it has ended)" in report["message"] + result.err
    assert is_told or result.code == 137


@WAYS
def test_a_timeout_of_torchs_is_followed_by_who_is_absent(way: list[str], tmp_path: Path) -> None:
    """I1: torch's own timeout names a key; below it stands which rank has not come, and which have."""
    script = write_script(tmp_path, """
        import os, time, torch.distributed as dist
        from datetime import timedelta
        if os.environ["RANK"] == "1":
            time.sleep(30)
        dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    """)  # fmt: skip
    result = run_rankwise([*way, "--nproc-per-node", "3", str(script)], tmp_path)
    assert " s rank 1 of 3 has not arrived; arrived: rank 0 (pid " in result.err


@WAYS
def test_a_sound_script_sees_nothing_of_it(way: list[str], tmp_path: Path) -> None:
    """No thread, no finder and no line is left in a script whose ranks meet; a file:// is removed as without us."""
    script = write_script(tmp_path, f"""
        import importlib.machinery, os, sys, threading
        num_finders = len(sys.meta_path)

        import torch.distributed as dist
        dist.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=int(os.environ["RANK"]), world_size=2)
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        dist.barrier()
        sys.stdout.write(f"{{threading.active_count()}} {{importlib.machinery.PathFinder.find_spec.__name__, len(sys.meta_path) - num_finders}}\\n")
        dist.destroy_process_group()
    """)  # fmt: skip
    result = run_rankwise([*way, "--nproc-per-node", "2", str(script)], tmp_path)
    assert (result.code, result.out, result.err) == (0, "1 ('find_spec', 0)\n" * 2, "")
    assert not (tmp_path / "meet").exists()


def test_a_group_that_is_made_again_does_not_take_the_addresses_of_the_last_one(tmp_path: Path) -> None:
    """init, destroy, init in a loop: torch alone may connect to sockets that are gone, as their addresses are still in the store."""
    script = write_script(tmp_path, """
        import torch, torch.distributed as dist
        for turn in range(6):
            dist.init_process_group("gloo")
            told = torch.ones(1)
            dist.all_reduce(told)
            assert told.item() == 2
            dist.destroy_process_group()
    """)  # fmt: skip
    result = run_rankwise(["--nproc-per-node", "2", str(script)], tmp_path)
    assert (result.code, result.err) == (0, "")


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    """RANKWISE_HANDSHAKE=0 and RANKWISE_WATCH=0 leave torch.distributed as it is."""
    script = write_script(tmp_path, """
        import torch.distributed as dist
        print(dist.distributed_c10d._new_process_group_helper.__code__.co_filename.endswith("distributed_c10d.py"))
    """)  # fmt: skip
    result = run_rankwise([str(script)], tmp_path, env={"RANKWISE_HANDSHAKE": "0", "RANKWISE_WATCH": "0"})
    assert result.out == "True\n"
