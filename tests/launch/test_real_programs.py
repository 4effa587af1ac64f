"""Sound programs that do what is legal, however odd, give no alarm, and find nothing of the watch in their way."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from support import make_env, run_reported, write_script

pytestmark = pytest.mark.linux
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
find_alarms = runpy.run_path(str(BENCHMARKS / "parts" / "alarms.py"))["find_alarms"]
TWO = ["--nproc-per-node", "2"]

BEGIN = """
import os, sys, time
def meet():
    global torch, dist, rank
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
def work(rounds=5):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(rounds):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        dist.all_reduce(torch.ones(3))
def end(result="sound"):
    dist.barrier()
    dist.destroy_process_group()
    print(result, flush=True)
"""
#: Late by more than the two seconds after which ranks are asked for their stacks.
LATE = """
time.sleep(2.6 * rank)
"""
SCRIPTS = {
    "all descriptors closed at the start": """
os.closerange(3, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 20 else 1 << 20)
own = [open(f"own{os.environ['RANK']}.{number}", "w+b") for number in range(40)]
reader, writer = os.pipe()
os.set_blocking(reader, False)
meet(); work()"""
    + LATE
    + """
dist.barrier()
try:
    os.read(reader, 1)
except BlockingIOError:
    end("sound" if not any(os.fstat(one.fileno()).st_size for one in own) else "written into")
""",
    "what was inherited closed later": """
inherited = [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2]
meet(); work()
for fd in inherited:
    try:
        os.close(fd)
    except OSError:
        continue  # the folder's own
work()"""
    + LATE
    + "work(); end()",
    "another program in the same process": """
if "AGAIN" not in os.environ:
    import torch.distributed
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])
meet(); work()"""
    + LATE
    + "end()",
    "handlers for all signals, and a clock that rings": """
import signal
got = []
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, 32, 33}:
    if number not in (signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT):
        signal.signal(number, lambda number, _frame: got.append(number))
signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)
meet(); work()"""
    + LATE
    + """
dist.barrier()
os.kill(os.getpid(), signal.SIGUSR1)
signal.setitimer(signal.ITIMER_REAL, 0)
strange = {*got} - {signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD}
end(f"got {strange}" if strange or signal.SIGUSR1 not in got or signal.SIGALRM not in got else "sound")
""",
    "a profiler and a tracer": """
import cProfile, threading
meet()
with torch.profiler.profile() as told:  # the names of stacks are not always text in torch 2.13
    work()
tracer = lambda *_: None
sys.settrace(tracer); threading.settrace(tracer)
with cProfile.Profile():
    work()
kept = sys.gettrace() is tracer
sys.settrace(None)
dist.barrier()
end("sound" if kept and any("allreduce" in one.key for one in told.key_averages()) else "disturbed")
""",
    "our modules gone, and clocks that are the script's": """
meet(); work()
for name in [name for name in sys.modules if name.startswith("rankwise")]:
    del sys.modules[name]
real = time.sleep
time.monotonic, time.sleep = (lambda: 0.0), (lambda _s: None)
work(); real(2.6 * rank); end()
""",
    "a parameter server that nobody sees the end of": """
import torch, torch.distributed.rpc as rpc
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def train(late_s):
    time.sleep(late_s)
    return float(torch.ones(3).sum())
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
if rank == 0:
    assert [rpc.rpc_async("worker1", train, args=(late_s,)).wait() for late_s in (0, 2.6)] == [3.0, 3.0]
rpc.shutdown()
print("sound")
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_sound_program_gives_no_alarm(name: str, tmp_path: Path) -> None:
    """Each rank does odd things and comes through them, nothing is said of it but that a rank is slow, and the report is ok."""
    write_script(tmp_path, BEGIN + SCRIPTS[name])
    result, report = run_reported([*TWO, "train.py"], tmp_path)
    assert (result.code, report["kind"], report["evidence"]) == (0, "ok", None), result.err
    assert "".join(result.out.split()) == "sound" * 2
    assert find_alarms([], report, result.code, result.err) == []


def test_a_short_soak_has_no_alarm() -> None:
    """The benchmark plays for some seconds, all but what is slow to begin, and counts no alarm."""
    plays = (
        "join_uneven",
        "train_gan",
        "accumulate",
        "divide",
        "send_around",
        "wait_late",
        "work_aside",
        "start_processes",
    )
    command = [
        sys.executable,
        str(BENCHMARKS / "soak.py"),
        "--minutes",
        "0.05",
        "--ranks",
        "2",
        "--longest",
        "0.2",
    ]
    done = subprocess.run(
        [*command, "--only", *plays], capture_output=True, text=True, check=False, env=make_env(), timeout=90
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "0 alarms"
    assert int(done.stdout.splitlines()[2].split()[0]) > 0, done.stdout


ALARMS = {
    "a proof": ([{"certainty": "proof", "rule": "wait_cycle"}], {"kind": "ok"}, 0, ""),
    "a line": ([], {"kind": "ok"}, 0, "rankwise: rank 1 sends\n"),
    "a watch that fails": ([], {"kind": "ok"}, 0, "x\nrankwise: the watch for hangs has failed and is off\n"),
    "a hang": ([], {"kind": "hang", "message": "m"}, 0, ""),
    "no report": ([], {}, 0, ""),
    "an exit code": ([], {"kind": "ok"}, 1, ""),
    "no end": ([], {"kind": "ok"}, None, ""),
}


@pytest.mark.parametrize("name", ALARMS)
def test_what_the_soak_counts(name: str) -> None:
    """Whatever a sound job must not be told is one alarm; that a rank is slow is none."""
    events, report, code, errors = ALARMS[name]
    note = "rankwise: rank 1 is asleep; rank 0 waits; it may just be slow\n"
    slow = {"certainty": "suspicion", "rule": "kept_waiting"}
    assert len(find_alarms([*events, slow], report, code, errors + note)) == 1
    assert find_alarms([slow], {"kind": "ok"}, 0, note) == []
