"""How long a job of three nodes stands still when one of them is lost: rankwise beside torchrun, on network namespaces of this host.

Each node has one rank, which reduces a number over all ranks and writes down when. Then a node is ended (`kill -9` of all its processes), frozen (SIGSTOP) or cut
off; the node that serves the rendezvous, too. Printed are the seconds from the fault to the first step of the ranks that are left. torchrun
gets three restarts and a last call of 5 s instead of its 30 s; rankwise needs neither.

Run it as root, with iproute2 and util-linux: `python benchmarks/lost_nodes.py [--bound SECONDS] [FAULT ...]`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))
from nodes.hosts import Host, make_hosts_file, open_hosts  # noqa: E402 - hosts of the tests

SCRIPT = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
with open(os.environ["OUT"], "a", buffering=1) as out:
    while True:
        total = torch.ones(1)
        dist.all_reduce(total)
        out.write(f"{time.time()} {int(total)}\\n")
        time.sleep(0.02)
"""
LAUNCHERS = {
    "rankwise": [sys.executable, "-m", "rankwise.run"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=5"],
}  # fmt: skip
FAULTS = ("kill 2", "kill 0", "freeze 2", "freeze 0", "cut 2", "cut 0")
#: Longer than the first seconds of an attempt, in which a silence may last longer.
SETTLE_S = 17.0


def start(hosts: list[Host], launcher: str, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start one launcher on each host."""
    (folder / "train.py").write_text(SCRIPT)
    started = []
    for number, host in enumerate(hosts):
        words = ["--nnodes", "1:3", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29500", "--rdzv-id", "lost"]  # fmt: skip
        command = [*LAUNCHERS[launcher], *words, "--log-dir", str(folder / f"logs{number}"), str(folder / "train.py")]  # fmt: skip
        with (folder / f"log{number}").open("wb") as log:
            inside = ["nsenter", "--target", str(host.pid), "--net", "--uts", "--mount", *command]
            env = {**os.environ, "OUT": str(folder / f"steps{number}"), "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}  # fmt: skip
            started.append(subprocess.Popen(inside, env=env, stdout=log, stderr=log))
    return started


def find_step(folder: Path, after_s: float, sizes: set[int]) -> float | None:
    """Return when the first step behind a moment was taken by so many ranks; None if none was."""
    found = []
    for path in folder.glob("steps*"):
        for line in path.read_text().splitlines()[-400:]:
            moment, _, size = line.partition(" ")
            if size and float(moment) > after_s and int(size) in sizes:
                found.append(float(moment))
    return min(found, default=None)


def wait_step(folder: Path, after_s: float, sizes: set[int], bound_s: float) -> float | None:
    """Wait for such a step; return when it was."""
    while time.time() < after_s + bound_s:
        if (moment := find_step(folder, after_s, sizes)) is not None:
            return moment
        time.sleep(0.05)
    return None


def measure(launcher: str, fault: str, bound_s: float) -> float | None:
    """Return the seconds from a fault to the next step; None if there was none in time."""
    kind, _, number = fault.partition(" ")
    victim = int(number)
    with tempfile.TemporaryDirectory() as name, open_hosts([make_hosts_file(3)] * 3, Path(name)) as hosts:
        folder = Path(name)
        launchers = start(hosts, launcher, folder)
        try:
            if wait_step(folder, time.time(), {3}, 90.0) is None:
                raise SystemExit(f"{launcher}: the nodes did not meet:\n{(folder / 'log0').read_text()}")
            time.sleep(SETTLE_S)
            top = psutil.Process(launchers[victim].pid)
            hit = [top, *top.children(recursive=True)]
            begin_s = time.time()
            if kind == "cut":
                hosts[victim].call("ip", "link", "set", "cable", "down")
            for process in hit if kind != "cut" else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill() if kind == "kill" else process.suspend()
            moment = wait_step(folder, begin_s, {1, 2}, bound_s)
            return None if moment is None else moment - begin_s
        finally:
            for one in launchers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    for process in psutil.Process(one.pid).children(recursive=True):
                        process.kill()
                one.kill()
                one.wait()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("faults", nargs="*", metavar="FAULT", default=FAULTS, help=f"as {', '.join(FAULTS)}")
    parser.add_argument("--bound", type=float, default=60.0, help="seconds to wait for a step")
    arguments = parser.parse_args()
    print(f"{'fault, node':14}{'rankwise':>12}{'torchrun':>14}{'ratio':>8}   seconds from the fault to the next step of those that are left")  # fmt: skip
    for fault in arguments.faults:
        ours, theirs = (measure(launcher, fault, arguments.bound) for launcher in LAUNCHERS)
        shown = [f"{one:.1f} s" if one is not None else f"> {arguments.bound:.0f} s" for one in (ours, theirs)]  # fmt: skip
        ratio = "" if ours is None else f"{ours / (theirs or arguments.bound):.2f}"
        print(f"{fault:14}{shown[0]:>12}{shown[1]:>14}{ratio:>8}", flush=True)


if __name__ == "__main__":
    main()
