"""What random losses of nodes cost a job of four: no job, never two jobs of one, and no process that is left.

Four network namespaces of this host have a rank each, under `--nnodes 1:4` or `1:8`, joined by a switch that can lose frames. The parent draws a fault, sees how long the
ranks that are left stand still, mends the fault, and waits until all four take steps together: a launcher or a whole node is killed (and its command started
again), two nodes are killed, one or two are frozen, a node is cut off, all are cut off from each other, one is heard but deaf, or dumb but hearing, for some seconds; it loses 30 % of all frames, gets a tenth of its
CPU time, its clock jumps by up to a day, or the disk of its logs is full while another node dies. Each rank writes down when it begins every step that it takes, and in which group: where those of two groups overlap in time, one job has
become two. (A step may end late: for one that is thawed, or whose network is whole again.) After some faults the job is ended, and another one started: a host that is lost again and again is taken for broken.

Run it as root, with iproute2 and util-linux: `python benchmarks/node_kills.py [--faults N] [--each N] [--seed N]`, or with `--soak MINUTES` for no faults at all. It exits with 1 if one job was not as it should.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from nodes.hosts import make_hosts_file, open_hosts
from nodes.stepping_job import Job

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SCRIPT = """
    import os, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    group = os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]
    with open(os.environ["OUT"], "a", buffering=1) as out, open(os.environ["OUT"] + ".groups", "a", buffering=1) as groups:
        is_enough = False
        while not is_enough:
            begin_s = time.monotonic()
            total = torch.tensor([1.0, os.path.exists(os.environ["ENOUGH"])])
            dist.all_reduce(total)
            is_enough = bool(total[1])  # all leave after the same step
            out.write(f"{int(total[0])}\\n")
            groups.write(f"{begin_s} {group}\\n")
            time.sleep(0.05)
    os._exit(0)
"""
NUM_NODES, LASTING_S = 4, (0.2, 8.0)
MOST_LOSSES = 2
FAULTS = (
    "kill launcher",
    "kill node",
    "kill two nodes",
    "freeze",
    "freeze two nodes",
    "cut",
    "cut all",
    "deaf",
    "dumb",
    "loss",
    "slow",
    "clock",
    "full disk",
)
#: During these nobody has to go on without the node.
HARMLESS = {"loss", "slow", "freeze two nodes", "cut all"}
LOSS = 0.3
#: Where the others stand still for longer, it is shown what the launchers said meanwhile.
_SLOW_S = 5.0
#: A rank may be so late to begin a step that the others have taken with it, when they have lost each other already.
_LATE_S = 0.5


#: Python's clock of a node goes wrong by as many seconds as a file says: torch's rendezvous, and all that is ours, is Python.
CLOCK = """
import datetime, os, time
_real_s = time.time

def _read_wrong_s():
    try:
        with open(os.environ["WRONG_BY"]) as file:
            return float(file.read() or 0)
    except OSError:
        return 0.0

class _Moved(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(_real_s() + _read_wrong_s(), tz)

    @classmethod
    def utcnow(cls):
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)

_Moved.__name__ = _Moved.__qualname__ = "datetime"
_Moved.__module__ = "datetime"
time.time = lambda: _real_s() + _read_wrong_s()
datetime.datetime = _Moved
"""


class Faults:
    """Does one fault after the other to a job."""

    def __init__(self, job: Job, losses: Path, rng: random.Random) -> None:
        self.job, self._losses, self._rng = job, losses, rng
        self.current = list(range(NUM_NODES))
        self.stood_s: dict[str, list[float]] = {}
        self._num_lost = [0] * NUM_NODES

    def do(self, fault: str) -> None:
        """Do it, see the others go on, mend it, and see all go on."""
        # A host that is lost for the fourth time is taken for broken; a deaf one may lose another one as well.
        nodes = sorted(range(NUM_NODES), key=lambda node: (self._num_lost[node] >= MOST_LOSSES, self._rng.random()))
        num_victims = 2 if "two" in fault else 1
        victims, left = nodes[:num_victims], nodes[num_victims:]
        for node in victims:
            self._num_lost[node] += 1
        before = [len(self.job.read(node)) for node in range(NUM_NODES)]
        begin_s = time.monotonic()
        with self._begin(fault, victims, left):
            if fault not in HARMLESS:
                self.job.wait_world(len(left), left)
            stood_s = time.monotonic() - begin_s
            self.stood_s.setdefault(fault, []).append(stood_s)
            if stood_s > _SLOW_S:
                said = "".join(f"--- node {node}\n{self.job.read(node)[behind:]}" for node, behind in enumerate(before))
                print(f"{fault} of {victims}: the others stood still for {stood_s:.1f} s\n{said}", flush=True)
            if "kill" not in fault:
                time.sleep(self._rng.uniform(*LASTING_S))
        self.job.wait_world(NUM_NODES, list(range(NUM_NODES)), lambda: self._start_again(victims))

    def _start_again(self, victims: list[int]) -> None:
        """Start launchers that have ended, as what has started them would: one that is cut off with the store ends, so that one job does not become two."""
        for node in victims:
            if self.job.launchers[self.current[node]].poll() is not None:
                self.job.start(node)
                self.current[node] = len(self.job.launchers) - 1

    def _begin(self, fault: str, victims: list[int], left: list[int]) -> contextlib.AbstractContextManager[None]:  # fmt: skip
        victim = victims[0]
        to, on = [f"{victim}>{one}" for one in left], [f"{one}>{victim}" for one in left]
        doings = {
            "kill launcher": lambda: self._kill_launcher(victim),
            "kill node": lambda: self._kill(victims),
            "kill two nodes": lambda: self._kill(victims),
            "freeze": lambda: self._freeze(victims),
            "freeze two nodes": lambda: self._freeze(victims),
            "slow": lambda: self._slow_down(victim),
            "cut": lambda: self._lose(to + on, 1.0),
            "cut all": lambda: self._lose(
                [f"{one}>{other}" for one, other in itertools.permutations(range(NUM_NODES), 2)], 1.0
            ),
            "deaf": lambda: self._lose(on, 1.0),
            "dumb": lambda: self._lose(to, 1.0),
            "loss": lambda: self._lose(to + on, LOSS),
            "clock": lambda: self._set_clock(left[0], victims),
            "full disk": lambda: self._fill_disk(left[0], victims),
        }
        return doings[fault]()

    @contextlib.contextmanager
    def _kill_launcher(self, victim: int) -> Iterator[None]:
        self.job.launchers[self.current[victim]].kill()
        yield

    @contextlib.contextmanager
    def _kill(self, victims: list[int]) -> Iterator[None]:
        for node in victims:
            self.job.kill(self.current[node])
        yield

    @contextlib.contextmanager
    def _freeze(self, victims: list[int]) -> Iterator[None]:
        frozen = [one for node in victims for one in self.job.list_processes(self.current[node])]
        _signal(frozen, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(frozen, signal.SIGCONT)

    @contextlib.contextmanager
    def _slow_down(self, victim: int) -> Iterator[None]:
        """Let it run for a tenth of the time."""
        over = threading.Event()

        def run() -> None:
            while not over.is_set():
                slowed = self.job.list_processes(self.current[victim])
                _signal(slowed, signal.SIGSTOP)
                time.sleep(0.09)
                _signal(slowed, signal.SIGCONT)
                time.sleep(0.01)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextlib.contextmanager
    def _lose(self, ways: list[str], share: float) -> Iterator[None]:
        write_atomic(self._losses, json.dumps(dict.fromkeys(ways, share)))
        try:
            yield
        finally:
            write_atomic(self._losses, "{}")

    @contextlib.contextmanager
    def _set_clock(self, node: int, victims: list[int]) -> Iterator[None]:
        """Have the others meet while a clock is wrong."""
        wrong = self.job.folder / f"wrong{node}"
        write_atomic(wrong, str(self._rng.uniform(-86400.0, 86400.0)))
        with self._kill(victims):
            yield
        write_atomic(wrong, "0")

    @contextlib.contextmanager
    def _fill_disk(self, node: int, victims: list[int]) -> Iterator[None]:
        """Have a node lose a peer while it can write nothing down."""
        path = self.job.folder / f"logs{node}" / "full"
        self.job.hosts[node].call("sh", "-c", f"cat /dev/zero > {path} || true")
        try:
            with self._kill(victims):
                yield
        finally:
            self.job.hosts[node].call("rm", str(path))


def write_atomic(path: Path, text: str) -> None:
    """Write a file that is read meanwhile."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


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


def run_job(num_faults: int, kinds: Sequence[str], rng: random.Random, totals: dict[str, list[float]]) -> str:  # fmt: skip
    """Run one job; return what went wrong, empty if nothing did."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        drawn = [rng.choice(kinds) for _ in range(num_faults)]
        losses = folder / "losses"
        losses.write_text("{}")
        (folder / "clock").mkdir()
        (folder / "clock" / "sitecustomize.py").write_text(CLOCK)
        hosts = stack.enter_context(open_hosts([make_hosts_file(NUM_NODES)] * NUM_NODES, folder, 3600, losses))
        for number, host in enumerate(hosts):
            (folder / f"logs{number}").mkdir()
            host.call("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder / f"logs{number}"))
        # With it all start cold.
        clock = {"PYTHONPATH": str(folder / "clock"), "WRONG_BY": str(folder / "wrong{}")} if "clock" in drawn else {}  # fmt: skip
        # Where more could come, torch does not end a round by their number.
        most = rng.choice((NUM_NODES, 2 * NUM_NODES))
        job = Job(hosts, folder, f"1:{most}", SCRIPT, {"PET_RDZV_CONF": "last_call_timeout=4", **clock})
        faults, done = Faults(job, losses, rng), []
        job.start(*range(NUM_NODES))
        wrong = ""
        try:
            job.wait_world(NUM_NODES, list(range(NUM_NODES)))
            for fault in drawn:
                done.append(fault)
                faults.do(fault)
            (job.folder / "enough").touch()
            codes = [job.launchers[one].wait(60) for one in faults.current]
            wrong = "" if not any(codes) else f"exit codes {codes}"
        except AssertionError as error:
            wrong = f"after {done}: {error}"
        if wrong:
            for node in range(NUM_NODES):
                codes = [launcher.poll() for launcher in job.launchers]
                print(f"--- node {node} (exit codes {codes}, now {faults.current})\n{job.read(node)[-4000:]}")
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


def soak(minutes: float) -> str:
    """Leave a job of four nodes alone; return what went wrong, empty if nothing did."""
    with tempfile.TemporaryDirectory() as name, open_hosts([make_hosts_file(NUM_NODES)] * NUM_NODES, Path(name), 7200) as hosts:  # fmt: skip
        job = Job(hosts, Path(name), f"1:{NUM_NODES}", SCRIPT)
        job.start(*range(NUM_NODES))
        job.wait_world(NUM_NODES, list(range(NUM_NODES)))
        end_s = time.monotonic() + 60 * minutes
        while time.monotonic() < end_s and all(one.poll() is None for one in job.launchers):
            time.sleep(1.0)
        (job.folder / "enough").touch()
        codes = [launcher.wait(60) for launcher in job.launchers]
        groups = {line.split()[1] for path in job.folder.glob("steps*.groups") for line in path.read_text().splitlines()}  # fmt: skip
        printed = [line for node in range(NUM_NODES) for line in job.read(node).splitlines() if " is lost" in line]
        if any(codes) or printed or len(groups) != 1:
            return f"exit codes {codes}, {len(groups)} groups, {printed}"
        return ""


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
    parser.add_argument("--each", type=int, default=4, help="faults of one job")
    parser.add_argument("--only", nargs="*", default=FAULTS, choices=FAULTS, help="which kinds (all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--soak", type=float, default=0.0, metavar="MINUTES", help="no faults; see that no node is given up"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its launchers end, too
    if args.soak:
        wrong = soak(args.soak)
        print(
            f"{args.soak:g} minutes without a fault, load average {os.getloadavg()[1]:.0f} on {os.cpu_count()} cores: {wrong or 'no node was given up'}"
        )
        sys.exit(bool(wrong))
    totals: dict[str, list[float]] = {}
    num_wrong = done = 0
    while done < args.faults:
        wrong = run_job(min(args.each, args.faults - done), args.only, random.Random(args.seed + done), totals)
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
