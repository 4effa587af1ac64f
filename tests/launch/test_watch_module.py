"""`python -m rankwise.watch` and `rankwise.init()` under torchrun: what ranks leave in a folder tells who hangs, who failed, and why.

Ranks of a forked torchrun do what `rankwise.watch` does in the process of the script; where torchrun, or the rank, is started as a user's is, they
execute the plain command, which imports torch.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import pytest

from rankwise.cli.main import main
from rankwise.evidence.reader import offline_layout
from support import TORCHRUN, Running, free_port, kill_leftovers, line_of, make_env, wait_until, write_script

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = pytest.mark.linux

HEAD = """
import os, signal, sys, time
import torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, one = dist.get_rank(), torch.ones(2)
for step in range(3):
    dist.all_reduce(one)
open(f"met{rank}", "w").close()
"""
WATCH = ("-m", "rankwise.watch", "--folder", "evidence")


@final
class Job:
    """A job of torchrun in the background, and what its ranks leave."""

    def __init__(self, folder: Path, running: Running, num_ranks: int) -> None:
        self.folder, self.running, self._num_ranks = folder, running, num_ranks

    def wait_met(self) -> None:
        """Wait until all ranks have met, and gone through their first collectives."""
        wait_until(lambda: all((self.folder / f"met{rank}").exists() for rank in range(self._num_ranks)), 60)

    def heads(self) -> dict[int, dict[str, Any]]:
        """Return what each rank tells of itself in its file."""
        files = self.folder.glob("evidence/*/attempt_*/rank*.evidence")
        lines = [path.read_bytes().partition(b"\n") for path in files]
        heads = [json.loads(line) for line, end, _ in lines if end]  # another has just been made
        return {head["rank"]: head for head in heads}

    def wait_stalled(self, *ranks: int) -> None:
        """Wait until ranks have seen that they stand still, and have copied that."""
        wait_until(lambda: all(self.heads()[rank].get("why") == "stall" for rank in ranks), 30)

    def kill_all(self) -> None:
        """End the ranks as a scheduler does."""
        self.running.send(signal.SIGTERM)
        self.running.finish(60)


@contextlib.contextmanager
def torchrun(
    folder: Path, args: tuple[str, ...], num_ranks: int = 2, env: Mapping[str, str | None] | None = None
) -> Iterator[Job]:
    running = Running(
        [*TORCHRUN, "--standalone", "--nproc-per-node", str(num_ranks), *args], folder, env={"OMP_NUM_THREADS": "1", **(env or {})}
    )  # fmt: skip
    job = Job(folder, running, num_ranks)
    try:
        yield job
    finally:
        heads = job.heads().values()
        if not running._out.closed:
            print(running.out, running.err)
        kill_leftovers()
        running.process.wait()
        for head in heads:
            if head["ring"]:
                Path(head["ring"]).unlink(missing_ok=True)
        running.close()


def report(*folders: Path) -> dict[str, Any]:
    """Return what `rankwise report --json` tells."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["report", "--json", *map(str, folders)]) == 0
    told: dict[str, Any] = json.loads(out.getvalue())
    return told


def wait_report(folder: Path, kind: str) -> dict[str, Any]:
    """Wait until the living are judged so: on a busy host one may have copied what it saw before the other one stood still for long enough."""
    wait_until(lambda: report(folder)["kind"] == kind, 30)
    return report(folder)


def carry_away(job: Job, to: Path) -> Path:
    """Return the folder as it is on another machine: without the files in this host's memory."""
    shutil.copytree(job.folder / "evidence", to)
    for file in to.rglob("rank*.evidence"):
        line, _, rest = file.read_bytes().partition(b"\n")
        head = {**json.loads(line), "kernel": "another"}
        file.write_bytes(json.dumps(head).encode() + b"\n" + rest)
    return to


def test_who_left_the_loop_is_named_while_it_hangs_and_afterwards(tmp_path: Path) -> None:
    """A rank that sleeps elsewhere is named with its line: by a look at the living, when torchrun was ended, and from a copy elsewhere."""
    script = write_script(tmp_path, HEAD + "if rank == 1: time.sleep(1000)  # away\ndist.all_reduce(one)\n")
    with torchrun(tmp_path, (*WATCH, "train.py")) as job:
        job.wait_met()
        job.wait_stalled(0, 1)
        living = wait_report(tmp_path / "evidence", "hang")
        job.kill_all()
        for told in (living, report(tmp_path / "evidence"), report(carry_away(job, tmp_path / "elsewhere"))):
            assert (told["kind"], told["culprits"], told["where"]) == ("hang", [1], line_of(script, "# away")), told  # fmt: skip
            assert [(one["rank"], one["op"]) for one in told["waiting"]] == [(0, "all_reduce")]


def test_other_collectives_are_a_proof(tmp_path: Path) -> None:
    """all_reduce on one rank, broadcast on the other: both lines are named, while it hangs and when it was ended."""
    script = write_script(
        tmp_path,
        HEAD + "if rank == 1:\n    dist.broadcast(one, 1)  # odd\n    dist.barrier()\ndist.all_reduce(torch.ones(9))\n",
    )
    with torchrun(tmp_path, (*WATCH, "train.py")) as job:
        job.wait_met()
        job.wait_stalled(0, 1)
        told = wait_report(tmp_path / "evidence", "mismatch")
        assert line_of(script, "# odd").rpartition("/")[2] in told["message"], told


def test_a_stopped_rank_is_told(tmp_path: Path) -> None:
    """A rank that was stopped is named as stopped, and a copy made by another rank of its host tells it elsewhere too."""
    write_script(tmp_path, HEAD + "while True:\n    dist.all_reduce(one)\n    time.sleep(0.01)\n")
    with torchrun(tmp_path, (*WATCH, "train.py")) as job:
        job.wait_met()
        os.kill(job.heads()[1]["pid"], signal.SIGSTOP)
        wait_until(lambda: job.heads()[1].get("state") == "stopped", 30)
        for told in (report(tmp_path / "evidence"), report(carry_away(job, tmp_path / "elsewhere"))):
            assert (told["kind"], told["culprits"]) == ("hang", [1]), told
            assert "stopped" in told["message"]


def test_a_killed_rank_is_the_first_cause(tmp_path: Path) -> None:
    """After kill -9 of one rank the others lose their peer, and torchrun ends all: the killed one is named, not who complains; elsewhere, too."""
    write_script(tmp_path, HEAD + "while True:\n    dist.all_reduce(one)\n    time.sleep(0.01)\n")
    with torchrun(tmp_path, (*WATCH, "train.py"), 3) as job:
        job.wait_met()
        os.kill(job.heads()[1]["pid"], signal.SIGKILL)
        job.running.finish(60)
        for told in (report(tmp_path / "evidence"), report(carry_away(job, tmp_path / "elsewhere"))):
            assert (told["kind"], told["culprits"]) == ("failure", [1]), told
            assert "ended silently" in told["message"]


def test_a_killed_rank_that_no_other_has_seen(tmp_path: Path) -> None:
    """Torchrun ends the others before they notice: the one that was not told to end was gone before, also for who reads a copy elsewhere."""
    write_script(tmp_path, HEAD + "time.sleep(1000)\n")
    with torchrun(tmp_path, (*WATCH, "train.py"), 3) as job:
        job.wait_met()
        os.kill(job.heads()[1]["pid"], signal.SIGKILL)
        job.running.finish(60)
        told = report(carry_away(job, tmp_path / "elsewhere"))
        assert (told["kind"], told["culprits"]) == ("failure", [1]), told


@pytest.mark.own_server
def test_an_exception_is_told_with_its_traceback(tmp_path: Path) -> None:
    """The rank that raises is named with its line; that torchrun ends the others is no fault of theirs."""
    script = write_script(tmp_path, HEAD + "if rank == 1: raise ValueError('boom')  # here\ntime.sleep(1000)\n")
    with torchrun(tmp_path, (*WATCH, "train.py")) as job:
        result = job.running.finish(60)
        assert result.code == 1
        told = report(tmp_path / "evidence")
        assert (told["kind"], told["culprits"], told["where"]) == ("failure", [1], line_of(script, "# here"))
        assert "ValueError: boom" in told["message"]
        assert "rankwise" not in told["traceback"]
        assert any("SIGTERM" in note for note in told["notes"]), told


def test_who_ended_early_is_named(tmp_path: Path) -> None:
    """A rank that ends with exit code 0 while another needs it is the first cause."""
    write_script(tmp_path, HEAD + "if rank == 1: sys.exit()\nfor step in range(9):\n    dist.all_reduce(one)\n")
    with torchrun(tmp_path, (*WATCH, "train.py")) as job:
        assert job.running.finish(60).code == 1
        told = report(tmp_path / "evidence")
        assert told["culprits"] == [1], told


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    """Before init_process_group nobody answers, and the rank that does not reach it is named with its line all the same."""
    script = write_script(
        tmp_path, "import os, time, torch.distributed as dist\nif os.environ['RANK'] == '1':\n    time.sleep(1000)  # away\ndist.init_process_group('gloo')\n"
    )  # fmt: skip
    with torchrun(tmp_path, (*WATCH, "train.py")) as job:
        wait_until(lambda: len(job.heads()) == 2, 30)
        wait_until(lambda: report(tmp_path / "evidence")["where"] == line_of(script, "# away"), 40)
        told = report(tmp_path / "evidence")
        assert (told["kind"], told["culprits"]) == ("hang", [1]), told


@pytest.mark.own_server
def test_a_sound_job_leaves_nothing_in_memory(tmp_path: Path) -> None:
    """Workers, forked children and programs that are ended are none of the rank's; ranks that end well leave files in the folder only."""
    write_script(
        tmp_path,
        HEAD
        + """
import subprocess
reading, writing = os.pipe()
child = os.fork()
if not child:
    os.write(writing, b".")
    time.sleep(1000)
os.read(reading, 1)
os.kill(child, signal.SIGTERM)
assert os.waitpid(child, 0)[1] == signal.SIGTERM
program = subprocess.Popen(["sleep", "1000"])
program.terminate()
assert program.wait() == -signal.SIGTERM
for batch in torch.utils.data.DataLoader(range(8), num_workers=2, multiprocessing_context='fork'):
    dist.all_reduce(batch)
os.closerange(100, 256)
dist.all_reduce(one)
dist.destroy_process_group()
""",
    )
    with torchrun(tmp_path, (*WATCH, "train.py")) as job:
        result = job.running.finish(60)
        assert result.code == 0, result.err
        (told,) = [line for line in result.err.splitlines() if "rankwise" in line]
        assert "rankwise report evidence" in told
        assert not any(Path(head["ring"]).exists() for head in job.heads().values())
        assert [path.read_bytes() for path in tmp_path.glob("evidence/*/*/*.stacks.txt")] == [b"", b""]
        assert report(tmp_path / "evidence")["kind"] == "ok"


@pytest.mark.own_server
def test_a_handler_of_the_scripts_own_is_the_only_one(tmp_path: Path) -> None:
    """A script that handles SIGTERM does so as without us: what it does then is told as its end."""
    write_script(
        tmp_path,
        HEAD + "def leave(*_):\n    open(f'left{rank}', 'w').close()\n    sys.exit(0)\nsignal.signal(signal.SIGTERM, leave)\n"
        "open(f'ready{rank}', 'w').close()\ntime.sleep(1000)\n",
    )  # fmt: skip
    with torchrun(tmp_path, (*WATCH, "train.py")) as job:
        wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)), 60)
        job.kill_all()
        assert sorted(path.name for path in tmp_path.glob("left*")) == ["left0", "left1"]
        assert [path.read_bytes() for path in tmp_path.glob("evidence/*/*/*.stacks.txt")] == [b"", b""]


def test_hosts_with_folders_of_their_own_are_judged_together(tmp_path: Path) -> None:
    """Two folders, one for each host, given together, tell who hangs; with one of them alone the other's ranks are told as absent."""
    script = write_script(tmp_path, HEAD + "if rank == 1: time.sleep(1000)  # away\ndist.all_reduce(one)\n")
    port = str(free_port())
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        Running(
            [sys.executable, "-m", "rankwise.watch", "--folder", f"host{rank}", "train.py"], tmp_path,
            env={**env, "RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        hosts = [tmp_path / f"host{rank}" for rank in range(2)]

        def stalled(host: Path) -> bool:
            return any(b'"why": "stall"' in path.read_bytes() for path in host.glob("*/attempt_0/rank*.evidence"))

        wait_until(lambda: all((tmp_path / f"met{rank}").exists() for rank in range(2)), 60)
        wait_until(lambda: all(map(stalled, hosts)), 30)
        # On a busy machine a rank has stood still before, on its way there: what it leaves then is replaced.
        wait_until(lambda: report(*hosts)["kind"] != "ok", 30)
        told = report(*hosts)
        assert (told["kind"], told["culprits"], told["where"]) == ("hang", [1], line_of(script, "# away")), told
        alone = report(hosts[0])
        assert not alone["culprits"], alone
        assert any("rank 1 has left no evidence" in note for note in alone["notes"])
    finally:
        kill_leftovers()
        for running in ranks:
            running.process.wait()
            running.close()
        for path in Path("/dev/shm").glob(f"rankwise.{os.getuid()}.*"):
            if not offline_layout.read_birth(int(path.name.rpartition(".")[2])):
                path.unlink()


def test_init_leaves_evidence_where_a_folder_is_named(tmp_path: Path) -> None:
    """rankwise.init() under torchrun with RANKWISE_EVIDENCE leaves the same; without the variable it leaves nothing."""
    script = write_script(
        tmp_path,
        "import time, torch, torch.distributed as dist, rankwise\ncontext = rankwise.init()\nrankwise.barrier()\nopen(f'met{context.rank}', 'w').close()\n"
        "if context.rank == 1: time.sleep(1000)  # away\ndist.all_reduce(torch.ones(1))\n",
    )
    with torchrun(tmp_path, ("train.py",), env={"RANKWISE_EVIDENCE": "evidence"}) as job:
        job.wait_met()
        job.wait_stalled(0, 1)
        told = wait_report(tmp_path / "evidence", "hang")
        assert (told["kind"], told["culprits"], told["where"]) == ("hang", [1], line_of(script, "# away")), told
    (tmp_path / "met0").unlink()
    with torchrun(tmp_path, ("train.py",), 1) as job:
        job.wait_met()
        job.running.finish(60)
        assert len(list((tmp_path / "evidence").iterdir())) == 1


PROBE = """
import json, multiprocessing, os, pickle, runpy, signal, sys
class Mine:
    pass
def double(queue, number):
    queue.put((number * 2, __name__))
if __name__ == "__main__":
    assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=double, args=(queue, 21))
    child.start()
    spawned = queue.get(timeout=30)
    child.join()
    quiet = {name: value for name, value in os.environ.items() if name not in {"_", "SHLVL"}}
    print(json.dumps([sys.argv, sys.path, sys.flags.bytes_warning, __file__, __name__, __spec__ and __spec__.name, str(signal.getsignal(signal.SIGTERM)),
                      [name for name in sys.modules if "rankwise" in name], sorted(sys.modules["__main__"].__dict__), spawned, quiet, sys.warnoptions]))
    import torch.distributed
    raise ValueError("boom")
"""


@pytest.mark.parametrize("how", [["train.py"], ["-m", "train"]])
def test_the_script_sees_what_python_shows_it(tmp_path: Path, how: list[str]) -> None:
    """Arguments, path, module, environment, pickling, spawned children, traceback and exit code are those of plain Python."""
    write_script(tmp_path, PROBE)
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ends = [
        subprocess.run(
            [sys.executable, "-b", *front, *how, "--lr", "1"],
            cwd=tmp_path, env=make_env(env), capture_output=True, text=True, timeout=60, check=False,
        )
        for front in ([], ["-m", "rankwise.watch"])
    ]  # fmt: skip
    plain, watched = ends
    assert plain.returncode == watched.returncode == 1
    assert json.loads(watched.stdout) == json.loads(plain.stdout)
    told, _, rest = watched.stderr.partition("\n")
    assert "rankwise report rankwise-evidence" in told
    assert rest == plain.stderr


@pytest.mark.parametrize(
    ("args", "told"),
    [([], "no script"), (["--folder"], "needs a value"), (["--every", "0", "x.py"], "not a number"), (["--lr", "1"], "no option")],
)  # fmt: skip
def test_a_bad_command_is_a_line_and_exit_code_2(tmp_path: Path, args: list[str], told: str) -> None:
    """What can't be run is told in a line, and nothing is made."""
    done = subprocess.run(
        [sys.executable, "-m", "rankwise.watch", *args], cwd=tmp_path, env=make_env(), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, told in done.stderr, list(tmp_path.iterdir())) == (2, True, [])


def test_switched_off_or_alone_nothing_is_left(tmp_path: Path) -> None:
    """RANKWISE_WATCH=0, and a process that is no rank, run as they would, and leave nothing."""
    write_script(tmp_path, "print('ran')\n")
    for env in ({"RANKWISE_WATCH": "0", "RANK": "0", "WORLD_SIZE": "2"}, {}):
        done = subprocess.run(
            [sys.executable, "-m", "rankwise.watch", "train.py"], cwd=tmp_path, env=make_env(env), capture_output=True,
            text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "ran\n")
        assert not (tmp_path / "rankwise-evidence").exists()
