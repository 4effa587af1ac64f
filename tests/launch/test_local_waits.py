"""Ranks that wait for threads and processes of their own: the report says where those stand, and which of them does not come."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from support import line_of, run_reported, write_script

HAS_PYSPY = shutil.which("py-spy") is not None or Path(sys.executable).with_name("py-spy").exists()
pytestmark = [
    pytest.mark.linux,
    pytest.mark.skipif(not HAS_PYSPY, reason="py-spy is not installed"),
]
SCRIPT = """
import multiprocessing, os, threading, time, torch, torch.distributed as dist, torch.multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
a, b, met = threading.Lock(), threading.Lock(), threading.Barrier(2)
def train(number):
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=number, world_size=2)
    if number == 1:
        time.sleep(600)  # leaves out
    dist.all_reduce(torch.ones(1))  # waits for it
def die(queue):
    os._exit(3)
def other():
    with b:
        met.wait()
        with a:  # of the other thread
            pass
if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    if os.environ["RANK"] == "0":
        mp.start_processes(train, nprocs=2, start_method="fork")  # joins
    if os.environ["RANK"] == "1":
        threading.Thread(target=other, name="saver", daemon=True).start()
        with a:
            met.wait()
            with b:  # of the main thread
                pass
    if os.environ["RANK"] == "2":
        queue = fork.Queue()
        fork.Process(target=die, args=(queue,)).start()
        queue.get()  # of nobody
    if os.environ["RANK"] == "3":
        ProcessPoolExecutor(1, mp_context=fork).submit(time.sleep, 600).result()  # asks
"""


def test_what_ranks_wait_for_themselves_is_told_at_the_users_bound(tmp_path: Path) -> None:
    """No rank is in a collective: processes of one are, and one of them sleeps; two threads take two locks; a child is dead; a pool is at rest. Each is told with its lines, and the job ends."""
    script = write_script(tmp_path, SCRIPT)
    args = ["--nproc-per-node", "4", "--hang-timeout", "5", "train.py"]
    result, report = run_reported(args, tmp_path, timeout_s=90)
    assert (result.code, report["kind"], report["culprits"]) == (1, "hang", [0, 1, 2, 3])

    def at(mark: str) -> str:
        return line_of(script, mark).rpartition("/")[2]

    message = re.sub(r"process \d+", "process N", report["message"].replace(" (python)", ""))
    assert (
        f"rank 0 is waiting for a process it has started at {at('# joins')} "
        f"(process N is sleeping at {at('# leaves out')}; process N is in all_reduce from {at('# waits for it')})"
    ) in message
    assert (
        f"rank 1 is waiting for a lock at {at('# of the main thread')} "
        f"(thread saver is waiting for a lock at {at('# of the other thread')})"
    ) in message
    assert f"rank 2 is waiting for an item in a queue at {at('# of nobody')} (process N is dead)" in message
    assert f"rank 3 is waiting for the result of a future at {at('# asks')} (process N is " in message
    assert f"does not reach all_reduce from {at('# waits for it')}" in report["fix"]
