"""What random losses of nodes cost a job of four: no job, never two jobs of one, and no process that is left.

Four network namespaces of this host have a rank each, under `--nnodes 1:4`. The parent draws a fault, sees how long the ranks that are left stand still, mends the
fault, and waits until all four take steps together: a launcher or a whole node is killed (and its command started again), two nodes are killed, a node is
frozen, or cut off, for some seconds. Each rank writes down every step, with the group in which it took it: where steps of two groups overlap in time, one job has
become two. After some faults the job is ended, and another one started: a host that is lost again and again is taken for broken.

Run it as root, with iproute2 and util-linux: `python benchmarks/node_kills.py [--faults N] [--each N] [--seed N]`. It exits with 1 if one job was not as it should.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from nodes.hosts import make_hosts_file, open_hosts
from nodes.stepping_job import Job

SCRIPT = """
    import os, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    group = os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]
    with open(os.environ["OUT"], "a", buffering=1) as out, open(os.environ["OUT"] + ".groups", "a", buffering=1) as groups:
        while not os.path.exists(os.environ["ENOUGH"]):
            total = torch.ones(2)
            total[1] = 0.0
            dist.all_reduce(total)
            out.write(f"{int(total[0])}\\n")
            groups.write(f"{time.time()} {group}\\n")
            time.sleep(0.05)
    os._exit(0)
"""
NUM_NODES, BOUND_S, FREEZE_S = 4, 90.0, (0.2, 8.0)
MOST_LOSSES = 3
FAULTS = ("kill launcher", "kill node", "kill two nodes", "freeze", "cut")
#: A step of a group that has just lost a peer may be written down so late.
_LATE_S = 0.5


class Faults:
    """Does one fault after the other to a job."""

    def __init__(self, job: Job, rng: random.Random) -> None:
        self.job, self._rng = job, rng
        self.current = list(range(NUM_NODES))
        self.stood_s: dict[str, list[float]] = {}
        self._num_lost = [0] * NUM_NODES

    def start(self, node: int) -> None:
        """Start a node's launcher, again."""
        self.job.start(node)
        self.current[node] = len(self.job.launchers) - 1

    def do(self, fault: str) -> None:
        """Do it, see the others go on, mend it, and see all go on."""
        # A host that is lost for the fourth time is taken for broken.
        spared = sorted(
            range(NUM_NODES), key=lambda node: (self._num_lost[node] >= MOST_LOSSES, self._rng.random())
        )
        victims = spared[: 2 if "two" in fault else 1]
        for node in victims:
            self._num_lost[node] += 1
        left = [node for node in range(NUM_NODES) if node not in victims]
        begin_s = time.monotonic()
        if fault == "kill launcher":
            self.job.launchers[self.current[victims[0]]].kill()
        elif "kill" in fault:
            for node in victims:
                self.job.kill(self.current[node])
        elif fault == "freeze":
            self._freeze(victims[0], left)
        else:
            self.job.hosts[victims[0]].call("ip", "link", "set", "cable", "down")
        if fault != "freeze":
            self.job.wait_world(len(left), left)
        self.stood_s.setdefault(fault, []).append(time.monotonic() - begin_s)
        self._mend(fault, victims)
        self.job.wait_world(NUM_NODES, list(range(NUM_NODES)))

    def _mend(self, fault: str, victims: list[int]) -> None:
        if fault == "cut":
            time.sleep(self._rng.uniform(*FREEZE_S))
            self.job.hosts[victims[0]].call("ip", "link", "set", "cable", "up")
            if self.job.launchers[self.current[victims[0]]].poll() is not None:
                self.start(victims[0])  # cut off with the store, it ends, so that one job does not become two
        elif "kill" in fault:
            for node in victims:
                self.job.launchers[self.current[node]].wait()
                self.start(node)

    def _freeze(self, victim: int, left: list[int]) -> None:
        """Stop all processes of a node for a time that may be too short to be a loss."""
        seconds = self._rng.uniform(*FREEZE_S)
        frozen = self.job.list_processes(self.current[victim])
        for process in frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        end_s = time.monotonic() + seconds
        if seconds > FREEZE_S[1] / 2:
            self.job.wait_world(len(left), left)
        time.sleep(max(0.0, end_s - time.monotonic()))
        for process in frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def find_overlap(folder: Path) -> str:
    """Return two groups of which both have taken steps at the same time; empty if there are none."""
    spans: dict[str, tuple[float, float]] = {}
    for path in folder.glob("steps*.groups"):
        for line in path.read_text().splitlines():
            at_s, group = line.split()
            first_s, last_s = spans.get(group, (float(at_s), float(at_s)))
            spans[group] = (min(first_s, float(at_s)), max(last_s, float(at_s)))
    ordered = sorted((first_s, last_s, group) for group, (first_s, last_s) in spans.items())
    for (_, last_s, one), (first_s, _, other) in itertools.pairwise(ordered):
        if last_s > first_s + _LATE_S:
            return f"{one} and {other}, for {last_s - first_s:.1f} s"
    return ""


def run_job(num_faults: int, rng: random.Random, totals: dict[str, list[float]]) -> str:
    """Run one job; return what went wrong, empty if nothing did."""
    with tempfile.TemporaryDirectory() as name, open_hosts([make_hosts_file(NUM_NODES)] * NUM_NODES, Path(name)) as hosts:  # fmt: skip
        job = Job(hosts, Path(name), f"1:{NUM_NODES}", SCRIPT)
        faults, done = Faults(job, rng), []
        job.start(*range(NUM_NODES))
        wrong = ""
        try:
            job.wait_world(NUM_NODES, list(range(NUM_NODES)))
            for _ in range(num_faults):
                done.append(rng.choice(FAULTS))
                faults.do(done[-1])
            (job.folder / "enough").touch()
            codes = [job.launchers[one].wait(60) for one in faults.current]
            wrong = "" if not any(codes) else f"exit codes {codes}"
        except AssertionError as error:
            wrong = f"after {done}: {error}"
        if wrong:
            for node in range(NUM_NODES):
                print(f"--- node {node}\n{job.read(node)[-3000:]}")
        left = [one for launcher in job.launchers for one in list_left(launcher.pid)]
        for launcher in job.launchers:
            launcher.kill()
            launcher.wait()
            if launcher.stdout is not None:
                launcher.stdout.close()
        overlap = find_overlap(job.folder)
        for fault, seconds in faults.stood_s.items():
            totals.setdefault(fault, []).extend(seconds)
        if not wrong and left:
            wrong = f"{len(left)} processes are left"
        return wrong or (f"two jobs: {overlap}" if overlap else "")


def list_left(pid: int) -> list[psutil.Process]:
    """Return the launcher's processes that still live, and end them."""
    left = []
    with contextlib.suppress(psutil.NoSuchProcess):
        left = psutil.Process(pid).children(recursive=True)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    return left


def main() -> None:
    """Do all faults."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--each", type=int, default=6, help="faults of one job")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    totals: dict[str, list[float]] = {}
    num_wrong = done = 0
    while done < args.faults:
        wrong = run_job(min(args.each, args.faults - done), random.Random(args.seed + done), totals)
        done += args.each
        num_wrong += bool(wrong)
        print(f"{done} faults: {wrong or 'as it should'}", flush=True)
    for fault, seconds in sorted(totals.items()):
        print(
            f"{fault:15} {len(seconds):4} times; the others stood still {statistics.median(seconds):5.1f} s (median), {max(seconds):5.1f} s at most"
        )
    sys.exit(bool(num_wrong))


if __name__ == "__main__":
    main()
