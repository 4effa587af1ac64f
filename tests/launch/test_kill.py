"""Kill anything at any moment: never an orphan, always a report where a parent is left to write one, always bounded."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import MARK, RANKWISE, Running, kill_leftovers, leftovers, wait_until, write_script

if TYPE_CHECKING:
    from collections.abc import Iterable

    from support import Result

pytestmark = [pytest.mark.linux, pytest.mark.slow, pytest.mark.checked]

#: How many kills in all, how many at a time, and the seed of their moments.
KILLS = int(os.environ.get("RANKWISE_KILLS", "48"))
AT_A_TIME = 2
SEED = int(os.environ.get("RANKWISE_KILL_SEED", "0")) or int(time.time())
BOUND_S = 20.0
CASES = list(product(("parent", "rank", "store", "supervisor"), ("SIGKILL", "SIGTERM", "SIGHUP")))

# A rank with all that usually escapes: loader workers, a subprocess in a session of its own, a daemon.
FAMILY = """
    import os, subprocess, time
    if os.fork() == 0:
        while True: time.sleep(50)
    subprocess.Popen(["sleep", "51"], start_new_session=True)
    subprocess.Popen(["sh", "-c", "(setsid sleep 52 &) &"]).wait()
    end = time.monotonic() + 15
    while not os.path.exists("go") and time.monotonic() < end: time.sleep(0.01)
"""


def children_of(pid: int) -> list[int]:
    """Return the children of a process; none if it is gone."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def command_of(pid: int) -> str:
    """Return a process's command line; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def find_victims(victim: str, launcher: int) -> list[int]:
    """Return the pids that are there now of a kind of process."""
    if victim == "parent":
        return [launcher]
    # The first of them: what is forked later to become another program has the launcher's command line until it does.
    supervisors = [pid for pid in children_of(launcher) if command_of(pid) == command_of(launcher)][:1]
    if victim == "supervisor":
        return supervisors
    below = [pid for supervisor in supervisors for pid in children_of(supervisor)]
    store = [pid for pid in below if "store_process.py" in command_of(pid)]
    return store if victim == "store" else [pid for pid in below if command_of(pid).rstrip().endswith("-u train.py")]


def kill_once(victim: str, name: str, delay_s: float, folder: Path, choice: random.Random) -> list[str]:
    """Run a job, kill one of its processes after ``delay_s`` and return what is wrong with how it ended."""
    marker, number = uuid.uuid4().hex, int(getattr(signal, name))
    folder.mkdir()
    write_script(folder, FAMILY)
    command = [*RANKWISE, "--report", "report.json", "--nproc-per-node", "2", "train.py"]
    job = Running(command, folder, env={MARK: marker})
    try:
        if victim != "parent":
            wait_until(lambda: find_victims(victim, job.process.pid), 15, victim)
        time.sleep(delay_s)
        pids = find_victims(victim, job.process.pid)
        if not pids:
            return [f"no {victim} after {delay_s:.3f} s"]
        start = time.monotonic()
        os.kill(choice.choice(pids), number)
        if victim in {"store", "supervisor"} and name != "SIGKILL":
            (folder / "go").touch()  # they are deaf to it: the job goes on to its end
        result = job.finish(BOUND_S)
        return list(judge(victim, name, result, time.monotonic() - start, folder, marker))
    except AssertionError as error:
        return [str(error)]
    finally:
        kill_leftovers(marker)


def judge(victim: str, name: str, result: Result, wall_s: float, folder: Path, marker: str) -> Iterable[str]:
    """Say what is wrong."""
    number, code, err = int(getattr(signal, name)), result.code, result.err
    if code and (left := leftovers(marker)):
        yield f"orphans: {left}"
    if wall_s > BOUND_S:
        yield f"took {wall_s:.1f} s"
    path = folder / "report.json"
    # A parent killed with -9, or by a signal before Python ran its first line, has no time to write.
    if victim == "parent" and code < 0:
        if path.exists():
            yield "a report from the dead"
        return
    if not path.exists():
        yield f"no report, code {code}: {err[-600:]}"
        return
    report = json.loads(path.read_text())
    if victim in {"store", "supervisor"} and name != "SIGKILL":
        # In its first milliseconds, before it has shut its ears, the store may die of it.
        if code != 0 and not (victim == "store" and "store" in report["message"]):
            yield f"code {code}: {report['message']}"
        return
    if code != 128 + number:
        yield f"code {code}, not {128 + number}: {report['message']}"
    if report["kind"] != "failure":
        yield f"kind {report['kind']}"
    if victim == "rank" and len(report["culprits"]) != 1:
        yield f"culprits {report['culprits']}: {report['message']}"
    if victim != "rank" and report["culprits"]:
        yield f"innocent {report['culprits']}: {report['message']}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("victim", "name"), CASES, ids=["-".join(case) for case in CASES])
def test_kills_at_random_moments(victim: str, name: str, tmp_path: Path) -> None:
    """A kill of the parent, a rank, the store or the supervisor at a random moment leaves nobody, and a report."""
    index = CASES.index((victim, name))
    count = KILLS // len(CASES) + (index < KILLS % len(CASES))
    choice = random.Random(SEED * 100 + index)
    # A parent may be hit from its first line on; what it starts from its birth on.
    delays = [choice.uniform(0, 0.9 if victim == "parent" else 0.5) for _ in range(count)]
    print(f"seed {SEED}, delays {[round(delay, 3) for delay in delays]}")
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        wrong = pool.map(lambda job: kill_once(victim, name, job[1], tmp_path / str(job[0]), choice), enumerate(delays))
        found = [f"after {delay:.3f} s: {what}" for delay, whats in zip(delays, wrong, strict=True) for what in whats]
    assert not found, f"seed {SEED}\n" + "\n".join(found)
