"""Real jobs that hang are ended with the right rank named, within seconds where it can be proved; sound ones hear no word."""

from __future__ import annotations

import json
import shutil
import signal
from typing import TYPE_CHECKING, Any

import pytest

from gloo_words import without_gloo
from rankwise.cli.main import main
from support import line_of, read_report, run_rankwise, run_reported, start_rankwise, wait_until, write_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux
TWO = ["--nproc-per-node", "2"]
HEAD = """
import os, sys, time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo")
rank = dist.get_rank()
one = torch.ones(3)
dist.all_reduce(one)
"""
#: Both send first: nobody can ever receive.
CIRCLE = """
big = torch.zeros(4_000_000)
dist.send(big, 1 - rank)
dist.recv(big, 1 - rank)
"""
SLEEPS = """
for step in range(5):
    if rank == 1 and step == 3:
        time.sleep(10**6)
    dist.all_reduce(one)  # by both, three times
"""


def _judge_again(folder: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["report", folder, "--json"]) == 0
    verdict: dict[str, Any] = json.loads(capsys.readouterr().out)
    return verdict


def test_a_rank_that_sleeps_is_named_at_the_users_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 sleeps, rank 0 waits in all_reduce: a hang by rank 1 at its line, and again from the evidence folder alone."""
    script = write_script(tmp_path, HEAD + SLEEPS)
    result, report = run_reported([*TWO, "--hang-timeout", "4", "--log-dir", "logs", "train.py"], tmp_path)
    assert (result.code, report["kind"], report["culprits"]) == (1, "hang", [1])
    assert report["where"] == line_of(script, "time.sleep")
    assert [(one["rank"], one["where"]) for one in report["waiting"]] == [(0, line_of(script, "# by both"))]
    assert str(report["evidence"]) in result.err
    # Elsewhere: the folder is all that is left.
    shutil.copytree(report["evidence"], tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "logs")
    again = _judge_again(str(tmp_path / "elsewhere"), capsys)
    for key in ("kind", "culprits", "where", "class", "waiting", "message", "fix", "exits", "exit_code"):
        assert again[key] == report[key], key


def test_a_rank_that_left_before_the_meeting_needs_no_bound(tmp_path: Path) -> None:
    """That a member has ended is proof: the job ends at once, long before any bound."""
    write_script(
        tmp_path,
        """
        import os, sys, torch.distributed as dist
        if os.environ["RANK"] == "1":
            sys.exit(0)
        dist.init_process_group("gloo")
        """,
    )
    result, report = run_reported([*TWO, "train.py"], tmp_path, timeout_s=40)
    assert (result.code, report["kind"], report["culprits"]) == (1, "hang", [1])


def test_a_circle_is_proved_and_restarted(tmp_path: Path) -> None:
    """Both ranks send first: no bound is needed, and the restart that is left is used."""
    write_script(
        tmp_path,
        HEAD + "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':" + CIRCLE.replace("\n", "\n    "),
    )
    result, report = run_reported([*TWO, "--max-restarts", "1", "train.py"], tmp_path, timeout_s=50)
    assert (result.code, report["kind"], report["attempts"]) == (0, "ok", 2)
    assert "attempt 1 of 2 hung" in result.err


def test_a_hang_may_be_worth_no_restart(tmp_path: Path) -> None:
    """--on-hang stop ends the job, though a restart is left."""
    write_script(tmp_path, HEAD + CIRCLE)
    args = [*TWO, "--max-restarts", "1", "--on-hang", "stop", "train.py"]
    result, report = run_reported(args, tmp_path, timeout_s=40)
    assert (result.code, report["attempts"]) == (1, 1)
    assert report["kind"] in {"hang", "mismatch"}


def test_a_hang_may_be_only_reported(tmp_path: Path) -> None:
    """--on-hang report says what is proved, and leaves the end to torch's own timeout."""
    text = HEAD.replace('"gloo"', '"gloo", timeout=timedelta(seconds=12)') + CIRCLE
    write_script(tmp_path, text)
    result = run_rankwise([*TWO, "--on-hang", "report", "--hang-timeout", "1", "train.py"], tmp_path)
    assert result.code == 1
    assert "-> evidence: " in result.err
    assert "imed out" in result.err


def test_a_stopped_rank_is_told_and_goes_on(tmp_path: Path) -> None:
    """SIGSTOP of a rank is said on the terminal and ends nothing; after SIGCONT the job ends well."""
    go = tmp_path / "go"
    loop = f"""
        while True:
            dist.all_reduce(one)
            over = torch.tensor([float(os.path.exists({str(go)!r}))])
            dist.all_reduce(over)
            if over.item(): break
            one.fill_(1)
            if rank == 1:
                with open("pid", "w") as file: file.write(str(os.getpid()))
            time.sleep(0.01)
        dist.destroy_process_group()
    """
    write_script(tmp_path, HEAD + "\n".join(line[8:] for line in loop.splitlines()))
    with start_rankwise([*TWO, "train.py"], tmp_path) as running:
        pid = int(wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 30))
        import os

        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: "stopped" in running.err, 20)
        os.kill(pid, signal.SIGCONT)
        go.touch()
        result = running.finish(40)
    assert result.code == 0, result.err
    assert "rank 1" in result.err


def test_a_busy_rank_is_slow_and_not_stuck(tmp_path: Path) -> None:
    """Rank 1 computes in Python while rank 0 waits: one line that names it, and the job ends well."""
    write_script(
        tmp_path,
        HEAD
        + """
if rank == 1:
    while not os.path.exists("told"):
        for _ in range(100_000):
            pass
dist.all_reduce(one)
dist.destroy_process_group()
""",
    )
    with start_rankwise([*TWO, "--report", "report.json", "train.py"], tmp_path) as running:
        wait_until(lambda: "rankwise: " in running.err, 30, "a line")
        (tmp_path / "told").touch()
        result = running.finish(30)
    report = read_report(tmp_path / "report.json")
    assert (result.code, report["kind"], report["evidence"]) == (0, "ok", None)
    lines = [line for line in result.err.splitlines() if line.startswith("rankwise: ")]
    assert len(lines) == 1, result.err
    assert "rank 1" in lines[0]


def test_without_a_watch_there_is_no_word(tmp_path: Path) -> None:
    """--no-watch: nobody tells of a rank that keeps the other waiting, and nothing is recorded."""
    write_script(tmp_path, HEAD + "if rank == 1: time.sleep(5)\ndist.all_reduce(one)\ndist.destroy_process_group()\n")
    result = run_rankwise([*TWO, "--no-watch", "--hang-timeout", "1", "train.py"], tmp_path)
    assert (result.code, result.err) == (0, "")


def test_a_rank_in_c_code_is_not_disturbed(tmp_path: Path) -> None:
    """A sleep in C that holds the interpreter, and so keeps the rank from answering, takes as long as it would without us."""
    write_script(
        tmp_path,
        HEAD
        + """
import ctypes
left = ctypes.PyDLL(None).sleep(5) if rank == 1 else 0
dist.all_reduce(one)
assert left == 0, left
""",
    )
    result = run_rankwise([*TWO, "train.py"], tmp_path)
    assert result.code == 0, result.err


def test_a_thread_that_keeps_the_others_waiting_is_named(tmp_path: Path) -> None:
    """Collectives in a thread, for which the main one waits: the hang is seen, and the line is the thread's."""
    script = write_script(
        tmp_path,
        HEAD
        + """
import threading
def work():
    for step in range(3):
        if rank == 1 and step == 2:
            time.sleep(10**6)
        dist.all_reduce(one)  # in a thread
thread = threading.Thread(target=work)
thread.start()
thread.join()
""",
    )
    _, report = run_reported([*TWO, "--hang-timeout", "4", "train.py"], tmp_path)
    assert (report["kind"], report["culprits"]) == ("hang", [1])
    assert report["where"] == line_of(script, "time.sleep")
    assert [(one["rank"], one["where"]) for one in report["waiting"]] == [(0, line_of(script, "# in a thread"))]


def test_a_barrier_that_met_the_last_one_by_chance_is_told(tmp_path: Path) -> None:
    """Rank 0 alone makes a barrier and a gathering; the others' last barrier met it, they are through, and rank 0 is named.

    By the barrier that was paired wrongly if the others were seen before they had ended, else by what they left undone.
    """
    script = write_script(
        tmp_path,
        HEAD
        + """
def score():
    dist.barrier()  # of a metric
    dist.all_gather([torch.ones(1) for _ in range(dist.get_world_size())], torch.ones(1))
if rank == 0:
    score()
dist.barrier()
""",
    )
    result, report = run_reported(["--nproc-per-node", "3", "train.py"], tmp_path, timeout_s=50)
    assert (result.code != 0, report["culprits"], report["class"]) == (True, [0], "C1"), result.err
    seen = {
        "mispaired_calls": line_of(script, "# of a metric"),
        "member_ended": line_of(script, "dist.all_gather"),
    }
    assert report["where"] == seen[report["rule"]]


def test_what_a_rank_waits_for_is_told(tmp_path: Path) -> None:
    """A child that never ends: its number and name are in the sentence, by the kernel's word."""
    script = write_script(
        tmp_path,
        HEAD + "import subprocess\nif rank == 1: subprocess.run(['sleep', '1000'])\ndist.all_reduce(one)\n",
    )
    _, report = run_reported([*TWO, "--hang-timeout", "3", "train.py"], tmp_path)
    assert (report["kind"], report["culprits"], report["where"]) == (
        "hang",
        [1],
        line_of(script, "subprocess.run"),
    )
    assert "rank 1 is waiting for process " in report["message"]
    assert "(sleep) at train.py:" in report["message"]
    assert "give the call a timeout" in report["fix"]


def test_a_failure_that_was_swallowed_on_all_ranks_is_told(tmp_path: Path) -> None:
    """Rank 1 skips a step by an except; the last all_reduce of rank 0 fails in the same except, and all exit codes are 0."""
    write_script(
        tmp_path,
        HEAD
        + """
for step in range(4):
    try:
        if rank == 1 and step == 2:
            raise OSError("a broken file")
        dist.all_reduce(torch.ones(2))  # in a try
    except Exception:
        continue
""",
    )
    result, report = run_reported([*TWO, "train.py"], tmp_path)
    assert (result.code, report["kind"], report["rule"], report["culprits"]) == (
        0,
        "mismatch",
        "went_on_without",
        [1],
    )
    assert "rank 1 ended after 4 collectives" in report["message"]


def test_a_sound_job_hears_no_word(tmp_path: Path) -> None:
    """DDP, subgroups and messages, with ranks that are late by chance: no line, no evidence, and the logs go."""
    write_script(
        tmp_path,
        HEAD
        + """
import random
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
alone = [dist.new_group([0]), dist.new_group([1])][rank]
random.seed(rank)
for step in range(40):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(random.random() / 20)
    dist.all_reduce(torch.ones(2), group=alone)
    if rank == 0:
        dist.send(one, 1)
    else:
        dist.recv(one, 0)
if rank == 0:
    time.sleep(2.5)
    dist.barrier()
else:
    dist.barrier()
dist.destroy_process_group()
if rank == 1:
    time.sleep(2.5)
""",
    )
    result, report = run_reported([*TWO, "train.py"], tmp_path)
    assert (result.code, result.err, report["kind"], report["evidence"]) == (0, "", "ok", None)


@pytest.mark.parametrize(("flags", "code"), [([], 0), (["--strict"], 1)])
def test_wrong_pairs_are_told_although_the_script_ends_well(tmp_path: Path, flags: list[str], code: int) -> None:
    """float32 summed with int32, and nobody complains: a mismatch in the report; --strict makes it count."""
    write_script(
        tmp_path,
        HEAD
        + """
dist.all_reduce(torch.ones(3, dtype=[torch.float32, torch.int32][rank]))
dist.barrier()
dist.destroy_process_group()
""",
    )
    result, report = run_reported([*TWO, *flags, "--no-check", "--max-restarts", "1", "train.py"], tmp_path)
    assert (result.code, report["kind"], report["class"], report["attempts"]) == (code, "mismatch", "C7", 1)
    assert str(report["evidence"]) in result.err


def test_two_sums_that_were_exchanged_are_told_although_the_script_ends_well(tmp_path: Path) -> None:
    """C3: alike in all but their lines, in opposite order on rank 1, once: seen at the end, with the script's text."""
    write_script(
        tmp_path,
        HEAD
        + """
def sum_loss(): dist.all_reduce(torch.ones(1))
def sum_score(): dist.all_reduce(torch.ones(1))
for step in range(3):
    for work in [sum_loss, sum_score][:: -1 if rank == 1 and step == 1 else 1]:
        work()
dist.barrier()
dist.destroy_process_group()
""",
    )
    result, report = run_reported([*TWO, "train.py"], tmp_path)
    assert (result.code, report["kind"], report["class"]) == (0, "mismatch", "C3"), result.err


def test_a_function_that_hangs_is_an_exception_that_names_the_rank(tmp_path: Path) -> None:
    """rankwise.launch ends a circle too, and raises what `rankwise run` reports; the next call works."""
    script = write_script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        import rankwise
        def meet(hangs):
            dist.init_process_group("gloo")
            rank, big = dist.get_rank(), torch.zeros(4_000_000)
            if hangs:
                dist.send(big, 1 - rank)
            dist.destroy_process_group()
            return rank
        try:
            rankwise.launch(meet, True, nprocs=2)
        except rankwise.RankFailedError as error:
            print(str(error).splitlines()[0])
        print(rankwise.launch(meet, False, nprocs=2))
        """,
    )
    import subprocess
    import sys

    from support import make_env

    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=make_env(),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    first, last = without_gloo(done.stdout).splitlines()
    assert "send" in first
    assert last == "[0, 1]"


def test_a_call_of_the_library_that_one_rank_makes_alone_is_named(tmp_path: Path) -> None:
    """A checkpoint under a rank test, while the others train on: both places, the test, and what to do; no bound is needed."""
    write_script(
        tmp_path,
        """
        import torch
        import rankwise

        ctx = rankwise.init(device="cpu")
        model = rankwise.apply_ddp(torch.nn.Linear(4, 1))
        for step in range(5):
            model(torch.ones(2, 4)).sum().backward()
            if step == 2 and ctx.rank == 0:
                rankwise.checkpoint.save("checkpoints", {"model": model.module}, step=step)
        """,
    )
    result, report = run_reported([*TWO, "train.py"], tmp_path, timeout_s=60)
    script = tmp_path / "train.py"
    assert (result.code, report["class"], report["culprits"]) == (1, "C1", [0])
    assert report["where"] == f"{script}:9"
    assert "rank 0 is in rankwise.checkpoint.save at train.py:9; rank 1 is in all_reduce" in report["message"]
    assert "DDP gradients) at train.py:7" in report["message"]
    assert "rank test at line 8 of train.py" in report["fix"]
