"""A warm server that outlives its run: the next run forks from it, nobody else can, and it never serves what is stale."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, final

import pytest

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.launcher.agent import ask_resident, open_workers
from rankwise.launcher.command import parse
from rankwise.launcher.console import Console
from rankwise.launcher.interpreter import find_interpreter
from rankwise.launcher.processes import list_descendants
from rankwise.launcher.signals import Signals
from rankwise.launcher.warm_start import Host, plan_warm_start
from rankwise.launcher.workers import Change, Command, Ended, Started
from support import (
    RANKWISE,
    Result,
    Running,
    list_marked,
    make_env,
    run_rankwise,
    start_rankwise,
    wait_until,
    write_script,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = pytest.mark.linux

#: Each rank says which server it comes from: what is drawn once, when torch is imported there.
_TELL = """
import os, sys
import torch
sys.stdout.write(f"{sys.argv[1:]} {os.getcwd()} {hash('x')}\\n")
"""


@final
class Residence:
    """A folder of resident servers of a test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env: dict[str, str | None] = {"RANKWISE_RESIDENT_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}

    def run(self, cwd: Path, *args: str, env: Mapping[str, str | None] | None = None) -> Result:
        """Run the launcher to its end, on a resident server."""
        return run_rankwise(["--resident", *(args or ("train.py",))], cwd, env={**self.env, **(env or {})})

    def ask(self, *words: str) -> str:
        """Run `rankwise resident`."""
        command = [sys.executable, "-m", "rankwise", "resident", *words]
        return subprocess.run(
            command, env=make_env(self.env), capture_output=True, text=True, check=True, timeout=60
        ).stdout

    def pids(self) -> list[int]:
        """Return the servers' numbers, from the names of their sockets."""
        return [int(path.stem.partition("-")[2]) for path in self.folder.glob("*.sock")]


@pytest.fixture
def residence(tmp_path: Path) -> Iterator[Residence]:
    """Give a folder for resident servers, and end them."""
    made = Residence(tmp_path / "residence")
    yield made
    made.ask("stop")
    wait_until(lambda: not any(_is_alive(pid) for pid in made.pids()))


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_the_next_run_forks_from_the_server_that_the_first_one_left(residence: Residence, tmp_path: Path) -> None:
    """Another script, other arguments and folder, a module: one server for each way to run; all of it is listed, and ended.

    The first run stands in the root folder, where an absolute path has one slash more than elsewhere.
    """
    write_script(tmp_path, _TELL)
    write_script(tmp_path / "sub", _TELL, "other.py")
    first = residence.run(Path("/"), str((tmp_path / "train.py").relative_to("/")))
    (server,) = residence.pids()
    second = residence.run(tmp_path / "sub", "other.py", "--lr", "a b", env={"EXTRA": "1"})
    assert (first.code, first.err, second.code, second.err) == (0, "", 0, "")
    word = first.out.split()[-1]
    assert first.out == f"[] / {word}\n"
    assert second.out == f"['--lr', 'a b'] {tmp_path / 'sub'} {word}\n"  # one string hash seed: that of the server
    write_script(tmp_path, "import torch; print('edited')")
    assert residence.run(tmp_path).out == "edited\n"
    assert residence.pids() == [server]
    module = residence.run(tmp_path / "sub", "-m", "other")
    assert (module.code, module.out.partition(" ")[0]) == (0, "[]"), module.err
    head, *rows = residence.ask().splitlines()
    assert head.split() == ["pid", "key", "age", "memory", "runs", "running", "torch", "python"]
    assert sorted(re.split(r"  +", row)[4] for row in rows) == ["1", "3"]
    assert residence.ask("stop") == "ended 2 resident servers\n"
    wait_until(lambda: not _is_alive(server))
    assert residence.ask() == "no resident server: `rankwise run --resident` leaves one behind\n"


def test_a_run_gets_the_limits_of_its_own_launcher(residence: Residence, tmp_path: Path) -> None:
    """Umask, niceness, limits, ignored signals and the terminal's folder are those of each command, from one server.

    A server that is nicer to others than a run is to be can't serve that, and does not end the one that can.
    """
    script = """
        import os, resource, signal, sys, torch
        umask = os.umask(0)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        core = resource.getrlimit(resource.RLIMIT_CORE)
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        sys.stdout.write(f"{umask:o} {os.getpriority(os.PRIO_PROCESS, 0)} {limit} {core} {ignored}")
        """
    write_script(tmp_path, script)

    def restrict() -> None:
        os.umask(0o027)
        os.nice(3)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    nice = os.getpriority(os.PRIO_PROCESS, 0)
    command = [*RANKWISE, "--resident", "train.py"]
    seen = []
    for _ in range(2):
        result = Running(command, tmp_path, env=residence.env, preexec_fn=restrict).finish()
        assert (result.out, result.err) == (f"27 {nice + 3} 300 (0, 0) True", "")
        seen.append((residence.run(tmp_path).out, sorted(residence.pids())))
    assert seen[0] == seen[1]
    assert seen[0][0].split()[1] == str(nice)
    assert len(seen[0][1]) == 2


def test_what_has_changed_on_disk_is_never_served(residence: Residence, tmp_path: Path) -> None:
    """A preloaded module is edited: the server that has the old one ends, and the next run has the new text."""
    write_script(tmp_path, "TEXT = 'old'", "mine.py")
    write_script(tmp_path, "import torch, mine; print(mine.TEXT)")
    assert residence.run(tmp_path, "--preload", "mine", "train.py").out == "old\n"
    (server,) = residence.pids()
    write_script(tmp_path, "TEXT = 'the new one'", "mine.py")
    result = residence.run(tmp_path, "--preload", "mine", "train.py")
    assert (result.code, result.out, result.err) == (0, "the new one\n", "")
    wait_until(lambda: not _is_alive(server))
    (server,) = residence.pids()
    assert residence.run(tmp_path, "--preload", "mine", "train.py").out == "the new one\n"
    assert residence.pids() == [server]


def test_a_module_beside_the_script_that_hides_a_loaded_one_makes_a_cold_start(
    residence: Residence, tmp_path: Path
) -> None:
    """One of torch's, or of the server itself: that is fit for other scripts, and this one gets its own module, as without a server."""
    write_script(tmp_path, "import torch")
    residence.run(tmp_path)
    (server,) = residence.pids()
    for name in ("pickletools", "resource"):
        folder = tmp_path / name
        write_script(folder, "MINE = 1", f"{name}.py")
        write_script(folder, f"import {name}, torch; print({name}.MINE)")
        result = residence.run(tmp_path, f"{name}/train.py")
        assert (result.code, result.out) == (0, "1\n"), result.err
        expected = f"rankwise: cold start: {folder / name}.py has the name of a module that is already loaded\n"
        assert result.err == expected
    assert residence.pids() == [server]


def test_another_environment_another_server_and_not_too_many(residence: Residence, tmp_path: Path) -> None:
    """What torch reads at its import makes another server; of two at most, the one used longest ago ends for a third."""
    write_script(tmp_path, "import os, torch; print(torch.get_num_threads(), os.environ.get('FREE'))")
    most = {"RANKWISE_RESIDENT_MOST": "2"}
    seen = []
    for threads in ("1", "2", "1", "3"):
        result = residence.run(tmp_path, env={**most, "OMP_NUM_THREADS": threads, "FREE": threads})
        assert (result.code, result.err) == (0, "")
        assert result.out.split()[1] == threads
        seen.append({*residence.pids()})
    assert [len(pids) for pids in seen] == [1, 2, 2, 2]
    assert seen[1] == seen[2]
    (unused,) = seen[1] - seen[0]
    assert unused not in seen[3]
    assert seen[0] < seen[3]  # used again, so the other one had to go
    wrong = residence.run(tmp_path, env={"RANKWISE_RESIDENT_MOST": "many", "OMP_NUM_THREADS": "4"})
    assert (wrong.code, "RANKWISE_RESIDENT_MOST='many' is not a number above 0" in wrong.err) == (2, True)


def test_another_namespace_another_server(residence: Residence, tmp_path: Path) -> None:
    """Below `unshare --uts` nothing is forked from outside: a fork would see the host's name."""
    if subprocess.run(["unshare", "--uts", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make namespaces")
    write_script(tmp_path, "import os, socket, torch; print(socket.gethostname(), os.readlink('/proc/self/ns/uts'))")
    outside = residence.run(tmp_path)
    launcher = ("unshare", "--uts", "sh", "-c", 'hostname inside; exec "$@"', "sh", *RANKWISE)
    inside = run_rankwise(["--resident", "train.py"], tmp_path, env=residence.env, launcher=launcher)
    assert (outside.code, inside.code) == (0, 0), inside.err
    assert inside.out.split()[0] == "inside"
    assert inside.out.split()[1] != outside.out.split()[1]
    assert len(residence.pids()) == 2


def test_a_folder_that_others_can_enter_is_refused(residence: Residence, tmp_path: Path) -> None:
    """Mode 0755, or another owner: one line with both, no server in it, and the run goes on: in /tmp anybody can make it."""
    write_script(tmp_path, "import torch; print('ran')")
    residence.folder.mkdir(mode=0o755)
    result = residence.run(tmp_path)
    told = f"{residence.folder} belongs to uid {os.getuid()} and has mode 755"
    assert (result.code, result.out, told in result.err) == (0, "ran\n", True), result.err
    assert residence.pids() == []
    residence.folder.chmod(0o700)
    if os.getuid() == 0:
        os.chown(residence.folder, 65534, 65534)
        ask = [sys.executable, "-m", "rankwise", "resident"]
        other = subprocess.run(
            ask, env=make_env(residence.env), capture_output=True, text=True, check=False, timeout=60
        )
        assert (other.returncode, "belongs to uid 65534" in other.stderr) == (2, True), other.stderr
        os.chown(residence.folder, 0, 0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_is_sent_away(residence: Residence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the folder is opened to all: the kernel says who asks. A wrong word of our own user ends nothing, either."""
    write_script(tmp_path, "import torch")
    residence.run(tmp_path)
    (path,) = residence.folder.glob("*.sock")
    residence.folder.chmod(0o755)
    path.chmod(0o777)
    code = "import os, socket, sys; os.chdir(sys.argv[1]); os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(10); s.connect(sys.argv[2]); s.send(b'{\"stop\": 1}'); print(s.recv(100))"
    other = subprocess.run(
        [sys.executable, "-c", code, path.parent, path.name],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert other.stdout == "b''\n" or "ConnectionResetError" in other.stderr or "BrokenPipe" in other.stderr, (
        other.stderr
    )
    residence.folder.chmod(0o700)
    for word in (b"no json", b"[]", b'{"run": 1}', b'{"run": {}}', b"{}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            monkeypatch.chdir(path.parent)  # a path of a socket has 107 bytes at most
            sock.connect(path.name)
            sock.send(word)
            sock.settimeout(10)
            with contextlib.suppress(ConnectionError):
                assert sock.recv(100) == b""
    assert "1 " in residence.ask()
    assert len(residence.pids()) == 1


_HOLD = """
import os, pathlib, subprocess, sys, time
import torch
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
pathlib.Path(f"up.{os.environ['RANK']}").write_text(f"{os.getpid()} {child.pid}")
while not pathlib.Path("go").exists(): time.sleep(0.01)
child.kill()
"""


@contextlib.contextmanager
def _start_held(residence: Residence, folder: Path) -> Iterator[tuple[Running, list[int]]]:
    """Start two ranks that hold, each with a child in a session of its own; give the launcher, and what runs below it."""
    write_script(folder, _HOLD)
    args = ["--resident", "--nproc-per-node", "2", "train.py"]
    with start_rankwise(args, folder, env=residence.env) as job:
        wait_until(lambda: len([path for path in folder.glob("up.*") if len(path.read_text().split()) == 2]) == 2, 60)
        yield job, [int(word) for path in folder.glob("up.*") for word in path.read_text().split()]


def test_a_launcher_that_is_killed_leaves_nothing_and_the_server_serves_on(
    residence: Residence, tmp_path: Path
) -> None:
    """With kill -9: ranks and what they had started are gone in a moment."""
    with _start_held(residence, tmp_path) as (job, below):
        job.process.kill()
        wait_until(lambda: not any(_is_alive(pid) for pid in below), 5)
    servers = residence.pids()
    write_script(tmp_path, "import torch; print('well')")
    assert residence.run(tmp_path).out == "well\n"
    assert residence.pids() == servers


def test_a_server_that_is_killed_leaves_the_job_running_and_the_next_run_starts_anew(
    residence: Residence, tmp_path: Path
) -> None:
    """The ranks hang on their launcher only; the dead server's socket is removed."""
    with _start_held(residence, tmp_path) as (job, below):
        (server,) = residence.pids()
        os.kill(server, signal.SIGKILL)
        time.sleep(0.3)
        assert all(_is_alive(pid) for pid in below)
        (tmp_path / "go").touch()
        assert job.finish().code == 0
    write_script(tmp_path, "import torch; print('well')")
    result = residence.run(tmp_path)
    assert (result.code, result.out, result.err) == (0, "well\n", "")
    assert server not in residence.pids()


def test_a_supervisor_that_is_killed_leaves_nothing(residence: Residence, tmp_path: Path) -> None:
    """What its ranks had started falls to the server, which ends it; the job says what happened."""
    with _start_held(residence, tmp_path) as (job, below):
        (supervisor,) = (
            int(line.split()[0]) for line in list_marked() if f"rankwise-supervisor {job.process.pid} " in line
        )
        os.kill(supervisor, signal.SIGKILL)
        result = job.finish()
        assert result.code == 137
        assert "the launcher's own supervisor process was killed" in result.err
        wait_until(lambda: not any(_is_alive(pid) for pid in below), 5)
    assert residence.ask("stop") == "ended 1 resident server\n"


def test_what_a_job_leaves_behind_on_purpose_stays(residence: Residence, tmp_path: Path) -> None:
    """An uploader that outlives a job that went well lives on, below the server and after it."""
    script = "import subprocess, torch\nprint(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)"
    write_script(tmp_path, script)
    uploader = int(residence.run(tmp_path).out)
    assert _is_alive(uploader)
    write_script(tmp_path, "import torch")
    residence.run(tmp_path)
    residence.ask("stop")
    wait_until(lambda: not residence.pids())
    assert _is_alive(uploader)
    os.kill(uploader, signal.SIGKILL)


def test_a_server_ends_that_nobody_uses(residence: Residence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time that RANKWISE_RESIDENT_IDLE names; a run that lasts longer does not count as idle.

    Whoever has connected before that time is answered after it.
    """
    write_script(tmp_path, "import time, torch; time.sleep(2)")
    result = residence.run(tmp_path, env={"RANKWISE_RESIDENT_IDLE": "1"})
    assert (result.code, result.err) == (0, "")
    wait_until(lambda: not residence.pids(), 10)
    assert any(_ask_late(residence, tmp_path, monkeypatch) for _ in range(5))
    wait_until(lambda: not residence.pids(), 10)
    wrong = residence.run(tmp_path, env={"RANKWISE_RESIDENT_IDLE": "soon"})
    assert (wrong.code, "RANKWISE_RESIDENT_IDLE='soon' is not a number of seconds above 0" in wrong.err) == (
        2,
        True,
    )


def _ask_late(residence: Residence, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Connect to a server that is soon idle for too long, and ask it then; False where this host is too busy for that."""
    write_script(folder, "import torch")
    residence.run(folder, env={"RANKWISE_RESIDENT_IDLE": "2"})
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock,
        contextlib.suppress(ConnectionRefusedError),
    ):
        for path in residence.folder.glob("*.sock"):
            monkeypatch.chdir(path.parent)  # a path of a socket has 107 bytes at most
            sock.connect(path.name)
            begin_s = time.monotonic()
            time.sleep(2.5)
            sock.send(b'{"info": 1}')
            answer = sock.recv(10_000)
            if time.monotonic() - begin_s < 4.5:  # who says nothing for 5 s is sent away
                assert b'"served": 1' in answer
                return True
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_server_that_hangs_in_an_import_ends_with_its_launcher(
    residence: Residence, tmp_path: Path, number: signal.Signals
) -> None:
    """By Ctrl-C and by kill -9: the kernel ends the server, and what its import has started."""
    gate = """
        import os, pathlib, subprocess, time
        child = subprocess.Popen(["sleep", "1000"])
        pathlib.Path("importing").write_text(f"{os.getpid()} {child.pid} end")
        time.sleep(1000)
        """
    write_script(tmp_path, gate, "gate.py")
    write_script(tmp_path, "import torch")
    seen = tmp_path / "importing"
    args = ["--resident", "--preload", "gate", "train.py"]
    with start_rankwise(args, tmp_path, env=residence.env) as job:
        wait_until(lambda: seen.exists() and seen.read_text().endswith("end"), 60)
        job.process.send_signal(number)
        result = job.finish(20)
    assert result.code == (130 if number == signal.SIGINT else -9), result.err
    assert residence.pids() == []
    wait_until(lambda: not any(_is_alive(int(pid)) for pid in seen.read_text().split()[:2]))


def test_where_nobody_edits_and_runs_the_variable_does_not_count(residence: Residence, tmp_path: Path) -> None:
    """In a job of Slurm RANKWISE_RESIDENT=1 gives a line and no server; `always`, or the flag, asks for one."""
    write_script(tmp_path, "import torch")
    slurm = {**residence.env, "SLURM_JOB_ID": "7"}
    result = run_rankwise(["train.py"], tmp_path, env={**slurm, "RANKWISE_RESIDENT": "1"})
    assert result.code == 0
    assert result.err == (
        "rankwise: no resident server inside a job of Slurm, unless --resident or RANKWISE_RESIDENT=always asks for it\n"
    )
    assert not residence.folder.exists()
    off = run_rankwise(["--no-resident", "train.py"], tmp_path, env={**slurm, "RANKWISE_RESIDENT": "always"})
    assert (off.code, off.err, residence.folder.exists()) == (0, "", False)
    result = run_rankwise(["train.py"], tmp_path, env={**slurm, "RANKWISE_RESIDENT": "always"})
    assert (result.code, result.err, len(residence.pids())) == (0, "", 1)


def test_what_the_check_says_of_a_run_that_fails_at_once_is_not_lost(residence: Residence, tmp_path: Path) -> None:
    """A run of a server fails sooner than its script is read: what explains it is waited for."""
    script = """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            dist.barrier()
        open("missing")
        """
    write_script(tmp_path, script)
    # On a busy host the check takes longer than anybody should wait for it.
    code = """
import sys
from rankwise.cli.main import main
from rankwise.launcher import entry_check
entry_check._AFTER_FAILURE_S = 60.0
sys.exit(main(["run", "--resident", "--nproc-per-node", "2", "train.py"]))
"""
    for _ in range(2):
        command = [sys.executable, "-c", code]
        failed = Running(command, tmp_path, env={**residence.env, "RANKWISE_CHECK": None}).finish()
        assert failed.code == 1
        assert "RW102" in failed.err.partition("errors in train.py")[2]


def test_processes_that_wait_for_their_order_are_the_ranks_and_the_rest_ends(
    residence: Residence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are forked before the launcher is ready; one that is killed while it waits is passed over, and what nobody asks for ends with the run, and says nothing."""
    write_script(tmp_path, "import torch")
    monkeypatch.chdir(tmp_path)
    for name, value in {**residence.env, "RANKWISE_RESIDENT": "always"}.items():
        monkeypatch.setenv(name, str(value))
    signals, console, spec = Signals(()), Console(), parse(["--nproc-per-node", "3", "train.py"], dict(os.environ))
    host = Host(interpreter=find_interpreter(), num_ranks=3, prefixes=((),) * 3, num_threads=1)
    asked = ask_resident(spec, host, plan_warm_start(spec, host), signals, console)
    assert asked is not None
    workers = open_workers(signals, SYSTEM_CLOCK, asked)
    try:
        # The run's server, and what three ranks and a store take, once the supervisor has adopted that.
        children = Path(f"/proc/{asked[0]}/task/{asked[0]}/children")
        wait_until(lambda: len(children.read_text().split()) == 5)
        server, *waiting = map(int, children.read_text().split())  # as they were forked
        os.kill(waiting[0], signal.SIGKILL)
        wait_until(lambda: len(list_descendants(asked[0])) == 4)
        for tag in ("0.0", "1.0"):
            workers.start(tag, Command(argv=(sys.executable, "-c", "pass"), forks="script"))
        changes: list[Change] = []
        while sum(isinstance(one, Ended) for one in changes) < 2:
            changes += workers.wait_change(10)
        started = {one.tag: one.pid for one in changes if isinstance(one, Started)}
        assert started == {"0.0": waiting[1], "1.0": waiting[2]}
        assert [one.code for one in changes if isinstance(one, Ended)] == [0, 0]
        assert list_descendants(asked[0]) == [server, waiting[3]]
        workers.retire()
        wait_until(lambda: list_descendants(asked[0]) == [])
    finally:
        workers.close()
        signals.close()
    wait_until(lambda: not any(map(_is_alive, (server, *waiting))))
    assert capfd.readouterr() == ("", "")


def test_functions_are_launched_from_it_too(residence: Residence, tmp_path: Path) -> None:
    """`launch(fn)` of two programs, one after the other: the second one forks from the server of the first."""
    text = """
        import rankwise, sys

        def work(word):
            import torch
            return word, hash("x")

        print(rankwise.launch(work, "a", nprocs=2))
        """
    script, seen = write_script(tmp_path, text, "main.py"), []
    for _ in range(2):
        env = make_env({**residence.env, "RANKWISE_RESIDENT": "always"})
        seen.append(
            subprocess.run(
                [sys.executable, script], env=env, capture_output=True, text=True, check=True, timeout=60
            ).stdout
        )
    assert seen[0] == seen[1]  # the string hash is the server's
    assert len(residence.pids()) == 1


def test_many_runs_leave_nothing_in_the_server(residence: Residence, tmp_path: Path) -> None:
    """After ten runs it has the descriptors and children that it had after two, and no more memory; that lies in huge pages where there are any."""
    write_script(tmp_path, "import torch")
    for _ in range(2):
        residence.run(tmp_path)
    (server,) = residence.pids()

    def look() -> tuple[int, int, int]:
        status = Path(f"/proc/{server}/status").read_text()
        size = int(re.findall(r"VmRSS:\s+(\d+)", status)[0])
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        return len(list(Path(f"/proc/{server}/fd").iterdir())), len(children), size

    wait_until(lambda: look()[1] == 0)
    before = look()
    for _ in range(8):
        assert residence.run(tmp_path).code == 0
    # "No more" and not "as many": the server closes what belonged to a run a moment after its last process has gone.
    wait_until(lambda: look()[1] == 0 and look()[0] <= before[0])
    after = look()
    assert after[2] - before[2] < 5000, "kB"
    version = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
    if version >= (6, 1) and Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        rollup = Path(f"/proc/{server}/smaps_rollup").read_text()
        assert int(re.findall(r"AnonHugePages:\s+(\d+)", rollup)[0]) > 50_000, "kB"
