"""Signals that a scheduler sends to all processes of a job do not end the workers; their parent, or its end, does."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import rankwise
from rankwise.testing.ranks import run_ranks, try_ranks

pytestmark = pytest.mark.linux

#: With a fork server, the process that forked a worker is not the one that started it.
WAYS = pytest.mark.parametrize("how", ["fork", "forkserver"])


def send_from_outside(*pids: int) -> None:
    """Send both signals as a scheduler does: from a process that is not the parent."""
    for name in ("-TERM", "-USR1"):
        subprocess.run(["kill", name, *map(str, pids)], check=True)


def wait_until_taken(pid: int) -> None:
    """Wait until a process has no signal pending: a second SIGTERM would become one with the first."""
    while any(
        int(line.split()[1], 16)
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith(("SigPnd", "ShdPnd"))
    ):
        os.sched_yield()


def start_workers(how: str, **more: Any) -> tuple[Any, Any, list[Any]]:
    """Return a loader, an iterator of it, and its two workers, each of which has given a batch."""
    loader = rankwise.DataLoader(
        TensorDataset(torch.arange(40)),
        global_batch=2,
        shuffle=False,
        num_workers=2,
        multiprocessing_context=how,
        **more,
    )
    batches = iter(loader)
    assert [next(batches)[0].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    return loader, batches, multiprocessing.active_children()


@pytest.mark.parametrize(("how", "persistent"), [("fork", False), ("fork", True), ("forkserver", True)])
def test_workers_outlive_a_schedulers_signals(how: str, persistent: bool) -> None:
    """SIGTERM and SIGUSR1 go to the rank and its workers; the rank's handler runs once, and all samples come."""

    def body() -> Any:
        told: list[int] = []
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _: told.append(number))
        with rankwise.init(device="cpu"):
            loader, batches, processes = start_workers(how, persistent_workers=persistent)
            send_from_outside(os.getpid(), *(process.pid for process in processes))
            rest = [int(one) for batch in batches for one in batch[0]]
            second = [int(one) for batch in loader for one in batch[0]]
            return sorted(told), rest, second

    (told,) = run_ranks(body, 1)
    assert told == ([signal.SIGUSR1, signal.SIGTERM], list(range(4, 40)), list(range(40)))


@WAYS
def test_a_parent_ends_its_workers(how: str) -> None:
    """terminate(), which multiprocessing calls at exit before it joins without a bound, ends them, also after a signal from outside."""

    def body() -> list[Any]:
        with rankwise.init(device="cpu"):
            _, batches, processes = start_workers(how)
            send_from_outside(*(process.pid for process in processes))
            assert len(next(batches)[0]) == 2
            for process in processes:
                wait_until_taken(process.pid)
            # torch's handler would take the end of a worker for an accident.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for process in processes:
                process.terminate()
                process.join(20)
            # A worker that ends takes along the lock that it holds, for which torch's iterator would wait when it goes.
            vars(multiprocessing.current_process())["kept"] = batches
            return [process.exitcode for process in processes]

    assert run_ranks(body, 1) == [[0, 0]]


@WAYS
def test_workers_end_with_their_parent(how: str, tmp_path: Path) -> None:
    """When a rank is killed, its workers end too, also after a signal that they did not obey; none stays behind."""

    def body() -> None:
        with rankwise.init(device="cpu"):
            _, batches, processes = start_workers(how)
            send_from_outside(*(process.pid for process in processes))
            assert len(next(batches)[0]) == 2
            (tmp_path / "pids").write_text(" ".join(str(process.pid) for process in processes))
            os.kill(os.getpid(), signal.SIGKILL)

    (outcome,) = try_ranks(body, 1)
    assert outcome.exit_code == -signal.SIGKILL
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready, _, _ = select.select([handle], [], [], 20)
        os.close(handle)
        assert ready, f"worker {pid} is still there"


_MODULE = """
import signal, subprocess, sys, threading, time
from multiprocessing import forkserver, get_context

import torch

import rankwise
from rankwise.data import workers

# As numpy's: there before anything of ours runs in a worker that imports this.
threading.Thread(target=threading.Event().wait, daemon=True).start()
TERM_ALL = ("-TERM", "-USR1", "-USR2")


def send(pid):
    for name in TERM_ALL:
        subprocess.run(["kill", name, str(pid)], check=True)


def start_and_send(worker, start=workers._Worker.start):
    start(worker)
    send(worker.pid)
    if forkserver._forkserver._forkserver_pid:
        send(forkserver._forkserver._forkserver_pid)


if __name__ == "__main__":
    workers._Worker.start = start_and_send
    data = torch.utils.data.TensorDataset(torch.arange(40))
    loader = rankwise.DataLoader(data, global_batch=2, num_workers=2, multiprocessing_context=sys.argv[1])
    print(sum(len(batch[0]) for batch in loader))
    # Another's child of the same fork server listens as ever.
    other = get_context(sys.argv[1]).Process(target=time.sleep, args=(600,))
    other.start()
    other.terminate()
    other.join()
    print(other.exitcode)
"""


@pytest.mark.timeout(240)  # it imports torch six times
@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_workers_outlive_signals_from_their_start_on(how: str, tmp_path: Path) -> None:
    """Sent before a worker has run anything, though it has threads by then, and to its fork server too: all samples come."""
    script = tmp_path / "script.py"
    script.write_text(_MODULE)
    done = subprocess.run([sys.executable, str(script), how], timeout=200, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["40", str(-signal.SIGTERM)]


class Starts(Dataset):
    """Starts a program and forks a child for each sample, and ends them by SIGTERM."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, int]:
        program = subprocess.Popen(["sleep", "600"])
        program.terminate()
        is_up, says_so = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(says_so, b"x")
            signal.pause()
            os._exit(0)
        os.read(is_up, 1)
        os.kill(child, signal.SIGTERM)
        return program.wait(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_what_a_worker_starts_ends_by_sigterm() -> None:
    """A program and a forked child inherit nothing of what keeps the worker alive."""
    loader = rankwise.DataLoader(Starts(), global_batch=2, num_workers=2, multiprocessing_context="fork")
    assert [one.tolist() for batch in loader for one in batch] == [[-signal.SIGTERM] * 2] * 4


_STUCK = """
import ctypes, itertools, multiprocessing, sys, torch, rankwise
from rankwise.data import workers

go, gone = multiprocessing.Event(), multiprocessing.Semaphore(0)

class Stuck(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index >= 8:
            go.wait()
            gone.release()
            if sys.argv[1] == "with the GIL":
                1 in itertools.repeat(0)
            while True:
                ctypes.CDLL(None).pause()
        return index

if sys.argv[1] == "with the GIL":
    workers._LEAVE_S = 0.5
batches = iter(rankwise.DataLoader(Stuck(), global_batch=4, shuffle=False, num_workers=2, multiprocessing_context="fork"))
next(batches), next(batches)
go.set()
gone.acquire(), gone.acquire()
sys.exit(3)
"""


@pytest.mark.parametrize("how", ["with the GIL", "without the GIL"])
def test_a_stuck_worker_does_not_keep_the_rank_from_leaving(how: str, tmp_path: Path) -> None:
    """One that holds the GIL is killed after a while, and named; one that does not hears its parent all the same."""
    errors = tmp_path / "errors"
    with errors.open("w") as file:  # a pipe would stay open where a worker stays behind
        done = subprocess.run([sys.executable, "-c", _STUCK, how], timeout=40, check=False, stderr=file)
    assert done.returncode == 3, errors.read_text()
    assert errors.read_text().count("and is killed") == (2 if how == "with the GIL" else 0)


_LEAVES = """
import multiprocessing, os, signal, subprocess, torch, rankwise
data = torch.utils.data.TensorDataset(torch.arange(40))
batches = iter(rankwise.DataLoader(data, global_batch=2, num_workers=2, multiprocessing_context="fork"))
next(batches), next(batches)
pids = [process.pid for process in multiprocessing.active_children()]
for pid in pids:
    os.kill(pid, signal.SIGSTOP)
    subprocess.run(["kill", "-TERM", str(pid)], check=True)
# Goes on with them when we are in multiprocessing's join.
subprocess.Popen(["sh", "-c", "sleep 1; kill -CONT " + " ".join(map(str, pids))])
"""


def test_a_script_ends_though_its_workers_have_a_schedulers_signal_pending() -> None:
    """The kernel makes one SIGTERM of the scheduler's and the parent's, with the scheduler as its sender: the exit does not hang."""
    done = subprocess.run([sys.executable, "-c", _LEAVES], timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
