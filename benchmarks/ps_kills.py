"""What random kills and freezes of parameter servers and workers cost a training: no sample, and no process that is left.

Two servers and four workers learn the digits under `rankwise run --role-counts`. The parent draws a rank, and kills it or stops it for up to
some seconds: a worker or a server, in its step, its copy or its import of torch. It does that until the number of faults is reached, then lets the
workers end. One parameter counts the gradients that were applied to it. In asynchronous mode that must be what the workers have sent. They write
down each gradient before its push, and again when the next pull shows that it was taken; of a worker that was killed in between nobody knows whether
it had sent its last one. In synchronous mode a gradient counts in an average, so the servers' own counters are compared, and must not be above what was sent.

Run it as `python benchmarks/ps_kills.py [--faults N] [--jobs N] [--seed N]`. It exits with 1 if one job was not as it should.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from parts.jobs import describe_host

PART = Path(__file__).parent / "parts" / "counted_training.py"
NUM_SERVERS, NUM_WORKERS = 2, 4
#: Seconds between two faults, of a freeze, and until a silent worker is left out.
PAUSE_S, FREEZE_S, TIMEOUT_S = (0.1, 1.0), (0.1, 6.0), 2.0
LIMIT_S, LEAST_ACCURACY = 400.0, 0.95
MARK = "PS_KILLS_MARK"


def list_marked(mark: str) -> list[int]:
    """Return the living processes of one job."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def read_pid(folder: Path, rank: int) -> int:
    """Return the process of a rank."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / f"pid-{rank}").read_text(encoding="ascii"))
    return 0


def disturb(folder: Path, job: subprocess.Popen[bytes], num_faults: int, chance: random.Random) -> dict[str, int]:
    """Kill and freeze ranks until it is enough; return how often what was done."""
    ranks = range(NUM_SERVERS + NUM_WORKERS)
    hit: set[int] = set()
    frozen: list[tuple[float, int]] = []
    done: dict[str, int] = {}
    while job.poll() is None and not all((folder / f"ready-{rank}").exists() for rank in ranks):
        time.sleep(0.05)
    while sum(done.values()) < num_faults and job.poll() is None:
        time.sleep(chance.uniform(*PAUSE_S))
        now = time.monotonic()
        for until_s, pid in [one for one in frozen if one[0] <= now]:
            frozen.remove((until_s, pid))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        rank = chance.choice(ranks)
        pid, kills = read_pid(folder, rank), chance.random() < 0.6
        if pid in hit or any(pid == one for _, one in frozen):
            continue  # its successor has not come yet
        try:
            os.kill(pid, signal.SIGKILL if kills else signal.SIGSTOP)
        except ProcessLookupError:
            continue
        if kills:
            hit.add(pid)
        else:
            frozen.append((now + chance.uniform(*FREEZE_S), pid))
        what = f"{'killed' if kills else 'frozen'} {'servers' if rank < NUM_SERVERS else 'workers'}"
        done[what] = done.get(what, 0) + 1
    for _, pid in frozen:
        time.sleep(0.5)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    (folder / "enough").touch()
    return done


def run_job(mode: str, num_faults: int, seed: int) -> bool:
    """Run one job, print a line, and tell whether all was as it should."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder, mark = Path(name), f"{os.getpid()}.{seed}"
        roles = f"ps={NUM_SERVERS},worker={NUM_WORKERS}"
        argv = [
            sys.executable,
            "-m",
            "rankwise.run",
            "--role-counts",
            roles,
            "--max-restarts",
            "1000",
            str(PART),
            mode,
            str(TIMEOUT_S),
        ]
        start_s = time.monotonic()
        with (folder / "log").open("wb") as log:
            job = subprocess.Popen(argv, cwd=folder, env={**os.environ, MARK: mark}, stdout=log, stderr=log)
            done = disturb(folder, job, num_faults, chance)
            try:
                code = job.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                code = -1
        end = time.monotonic() + 5
        while (left := list_marked(mark)) and time.monotonic() < end:
            time.sleep(0.1)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        begun, taken = (sum(path.stat().st_size for path in folder.glob(f"{one}-*")) for one in ("begun", "taken"))
        results = [tuple(map(float, path.read_text(encoding="ascii").split())) for path in folder.glob("result-*")]
        counted, applied, accuracy = max(results, default=(0.0, 0.0, 0.0))  # of the worker that has ended last
        num = int(counted if mode == "async" else applied)
        reported = (folder / "log").read_text(errors="replace")
        is_right = (
            code == 0 and not left and accuracy >= LEAST_ACCURACY and num <= begun and (mode == "sync" or num >= taken)
        )
        faults = ", ".join(f"{number} {what}" for what, number in sorted(done.items()))
        print(
            f"{mode:<5} seed {seed}: {faults}; {reported.count('it is restarted alone')} lone restarts; gradients applied {num}, "
            f"sent {taken} to {begun}; accuracy {accuracy:.4f}; exit code {code}; {len(left)} processes left; "
            f"{time.monotonic() - start_s:.0f} s: {'as it should' if is_right else 'WRONG'}",
            flush=True,
        )
        if not is_right:
            print(reported[-6000:])
        return is_right


def main() -> int:
    """Run the jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(describe_host())
    per_job = -(-args.faults // args.jobs)
    results = [
        run_job("sync" if number % 4 == 3 else "async", per_job, args.seed + number) for number in range(args.jobs)
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
