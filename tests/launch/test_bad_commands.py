"""Wrong commands end at once with one clear line and a hint, and nothing is started (failures.md L1-L10, I4, I9)."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankwise.cli.main import main
from support import make_env, run_rankwise, start_rankwise, wait_until, write_script

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

pytestmark = pytest.mark.linux
AT_ONCE_S = 20.0


def refuse(
    args: Sequence[str],
    folder: Path,
    *words: str,
    env: Mapping[str, str | None] | None = None,
    within_s: float = AT_ONCE_S,
) -> str:
    """Assert that a command is refused at once, in a line and a hint that hold ``words``, with nothing started."""
    if not (folder / "train.py").exists():
        write_script(folder, "open('started', 'w').close()")
    result = run_rankwise(args, folder, env=env, timeout_s=30)
    check_refused(result.code, result.err, folder, *words)
    assert result.wall_s < within_s, result.wall_s
    return result.err


def check_refused(code: int, err: str, folder: Path, *words: str) -> None:
    """Assert that a command was refused in a line and a hint that hold ``words``, with nothing started."""
    assert code == 2, f"{code}\n{err}"
    assert not (folder / "started").exists()
    assert "Traceback" not in err
    lines = err.rstrip("\n").splitlines()
    assert lines[0].startswith("rankwise: ")
    # A hint of its own, or what was expected in the same line.
    assert ": expected " in lines[0] if len(lines) == 1 else lines[1].strip().startswith("->") and len(lines) == 2
    for word in words:
        assert word in err, err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        pytest.param(["--proc_per_node=2", "train.py"], ["--proc_per_node", "--nproc-per-node"], id="L2-misspelt"),
        pytest.param(["--max_restrats=2", "train.py"], ["--max-restarts"], id="L2-restart"),
        pytest.param(["--gpus", "2", "train.py"], ["--gpus"], id="L2-unknown"),
        pytest.param(["train.py", "--nproc_per_node=2"], ["--nproc_per_node=2", "before train.py"], id="L3-after"),
        pytest.param(["train.py", "--lr", "1", "--nnodes", "2"], ["--nnodes", "before train.py"], id="L3-nnodes"),
        pytest.param(["--nproc_per_node", "--work-dir", "x", "train.py"], ["--nproc"], id="L4-lost-value"),
        pytest.param(["--nproc_per_node=two", "train.py"], ["'two' is neither a number nor a kind of device"], id="L4-word"),
        pytest.param(["--nproc-per-node", "0", "train.py"], ["--nproc-per-node"], id="L4-zero"),
        pytest.param(["--report", ".", "train.py"], ["--report", "folder"], id="report-a-folder"),
        pytest.param(["--hang-timeout", "soon", "train.py"], ["'soon'", "seconds"], id="seconds-word"),
        pytest.param(["--nproc-per-node", "-1", "train.py"], ["--nproc-per-node"], id="L4-negative"),
        pytest.param(["--nproc-per-node", "2"], ["no script"], id="L4-no-script"),
        pytest.param([], ["no script"], id="L4-nothing"),
        pytest.param(["-m", "train.py"], ["-m", "train"], id="L4-module-file"),
        pytest.param(["trian.py"], ["trian.py", "train.py"], id="L4-no-such-script"),
        pytest.param(["."], ["__main__"], id="L4-folder"),
        pytest.param(["--no-python", "no-such-program"], ["no-such-program"], id="L4-no-program"),
        pytest.param(["--run-path", "train.py"], ["absolute"], id="L4-run-path"),
        pytest.param(["torchrun", "--nproc-per-node", "2", "train.py"], ["torchrun"], id="L5-double-command"),
        pytest.param(["\u2013nproc_per_node=2", "train.py"], ["\u2013nproc_per_node", "--nproc_per_node"], id="L5-en-dash"),
        pytest.param(["\u2014nproc-per-node", "2", "train.py"], ["--nproc-per-node"], id="L5-em-dash"),
        pytest.param(["--nproc-per-node", "2", "\u2013nnodes", "1", "train.py"], ["--nnodes"], id="L5-second-dash"),
        pytest.param(["--standalone", "--nnodes", "2", "train.py"], ["--standalone", "--nnodes"], id="L8"),
        pytest.param(["--nnodes", "2", "train.py"], ["--master-addr"], id="I4-default"),
        pytest.param(["--nnodes", "1:2", "--master-addr", "10.0.0.1", "train.py"], ["c10d"], id="L10-range"),
        pytest.param(["--nnodes", "0", "train.py"], ["--nnodes"], id="nnodes-zero"),
        pytest.param(["--nnodes", "two", "train.py"], ["--nnodes"], id="nnodes-word"),
        pytest.param(["--nnodes", "2", "--node-rank", "2", "--master-addr", "10.0.0.1", "train.py"], ["--node-rank"], id="I11"),
        pytest.param(["--nnodes", "2", "--rdzv-backend", "c10d", "train.py"], ["--rdzv-endpoint"], id="I21-no-endpoint"),
        pytest.param(["--rdzv-endpoint", "host", "--nnodes", "2", "train.py"], ["--rdzv-endpoint"], id="no-port"),
        pytest.param(["--rdzv-conf", "x", "train.py"], ["--rdzv-conf"], id="conf"),
        pytest.param(["--master-port", "70000", "train.py"], ["70000"], id="port-range"),
        pytest.param(["--master-port", "http", "train.py"], ["--master-port"], id="port-word"),
        pytest.param(["--max-restarts", "-1", "train.py"], ["--max-restarts"], id="restarts"),
        pytest.param(["--max-restarts", "x", "train.py"], ["--max-restarts 'x' is not a whole number"], id="restarts-word"),
        pytest.param(["--on-hang", "halt", "train.py"], ["--on-hang 'halt' is none of stop, report, restart"], id="no-choice"),
        pytest.param(["--nproc", "2", "train.py"], ["--nproc", "did you mean --nproc-per-node?"], id="both-spellings"),
        pytest.param(["--m", "2", "train.py"], ["did you mean --module or --master-addr or --master-port or "], id="ambiguous"),
        pytest.param(["-r", "7", "train.py"], ["-r", "7"], id="redirects"),
        pytest.param(["-t", "0:9", "train.py"], ["0:9"], id="tee"),
        pytest.param(["--local-ranks-filter", "a", "train.py"], ["--local-ranks-filter"], id="filter"),
        pytest.param(["--signals-to-handle", "SIGTREM", "train.py"], ["SIGTERM"], id="signal"),
        pytest.param(["-m", "--no-python", "train"], ["--no-python"], id="two-ways"),
        pytest.param(["--log-dir", "train.py", "train.py"], ["--log-dir"], id="log-dir-is-a-file"),
        pytest.param(["--log-dir", "/proc/nowhere", "train.py"], ["/proc/nowhere"], id="log-dir-impossible"),
        pytest.param(["--logs-specs", "x", "train.py"], ["--logs-specs"], id="logs-specs"),
        pytest.param(["--hang-timeout", "-3", "train.py"], ["--hang-timeout"], id="hang-timeout"),
        pytest.param(["--numa-binding", "nodes", "train.py"], ["--numa-binding"], id="numa"),
        pytest.param(["--event-log-handler"], ["--event-log-handler"], id="flag-at-the-end"),
    ],
)  # fmt: skip
def test_a_bad_command_is_refused_at_once(
    args: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, one line that quotes what was typed, one hint with what was meant; no process of the job starts.

    In this process, as the command's own is no part of it; those below are in one of their own.
    """
    env = make_env()
    for name in os.environ.keys() - env.keys():
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path, "open('started', 'w').close()")
    check_refused(main(["run", *args]), capfd.readouterr().err, tmp_path, *words)


@pytest.mark.parametrize(("name", "value"), [("PET_NNODES", "x"), ("PET_NPROC_PER_NODE", "x y"), ("PET_MAX_RESTARTS", "many"),
                                             ("PET_MODULE", "yes"), ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon"), ("PYTHON_EXEC", "/no/python"), ("RANKWISE_WATCH", "maybe")])  # fmt: skip
def test_a_bad_variable_is_refused_at_once(name: str, value: str, tmp_path: Path) -> None:
    """A PET_* or other variable of no use is named, as a bad flag would be."""
    write_script(tmp_path, "open('started', 'w').close()")
    result = run_rankwise(["train.py"], tmp_path, env={name: value})
    assert result.code == 2, result.err
    assert "Traceback" not in result.err
    assert value in result.err
    assert not (tmp_path / "started").exists()
    assert result.wall_s < AT_ONCE_S


def test_gpu_without_a_gpu(tmp_path: Path) -> None:
    """L6: --nproc-per-node gpu on a host without one says so (torch is asked, so it takes a moment)."""
    write_script(tmp_path, "open('started', 'w').close()")
    if Path("/proc/driver/nvidia/gpus").is_dir():
        pytest.skip("this host has GPUs")
    result = run_rankwise(["--nproc-per-node", "gpu", "train.py"], tmp_path)
    assert result.code == 2
    assert "Cuda is not available" in result.err or "gpu" in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "started").exists()


def test_more_ranks_than_gpus_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L7: more ranks than GPUs is said above the run; a CPU job goes on."""
    from rankwise.launcher import checks
    from rankwise.launcher.command import parse

    write_script(tmp_path, "pass")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "count_gpus", lambda: 2)
    argv = ["--nproc-per-node", "4", "train.py"]
    found = checks.check_command(parse(argv, {}), argv)
    assert [(finding.id, finding.severity) for finding in found] == [("L7", "warning")]
    assert "4 ranks on 2 GPUs" in found[0].what


def test_a_taken_port_names_its_holder(tmp_path: Path) -> None:
    """I9: a --master-port in use is refused with the pid and command of who holds it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        refuse(
            ["--master-port", str(port), "train.py"],
            tmp_path,
            str(port),
            f"pid {os.getpid()}",
            "--master-port",
        )


def test_a_second_job_on_the_same_port_names_the_first(tmp_path: Path) -> None:
    """I9: the second of two jobs with one fixed port reads who has it; the first goes on."""
    from support import free_port

    port = str(free_port())
    write_script(tmp_path, "import pathlib, time\npathlib.Path('up').touch()\nwhile not pathlib.Path('go').exists(): time.sleep(0.02)")  # fmt: skip
    with start_rankwise(["--master-port", port, "train.py"], tmp_path) as first:
        wait_until((tmp_path / "up").exists)
        result = run_rankwise(["--master-port", port, "train.py"], tmp_path)
        assert result.code == 2
        assert port in result.err
        assert "pid " in result.err
        (tmp_path / "go").touch()
        assert first.finish().code == 0


def test_localhost_of_two_nodes_warns_when_it_is_given(tmp_path: Path) -> None:
    """I4: `localhost` as the master of two nodes, given on purpose, is warned of (both agents may be on one host)."""
    from rankwise.launcher.checks import check_command
    from rankwise.launcher.command import parse

    script = str(write_script(tmp_path, "pass"))
    for address in ("localhost", "127.0.0.1", "::1"):
        argv = ["--nnodes", "2", "--master-addr", address, "--master-port", "29511", script]
        found = check_command(parse(argv, {}), argv)
        assert [(finding.id, finding.severity) for finding in found] == [("I4", "warning")], address


def test_ignored_flags_are_named(tmp_path: Path) -> None:
    """L9: flags that a backend does not use are named above the run, which goes on."""
    write_script(tmp_path, "print('ran')")
    args = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "--node-rank",
        "0",
        "--master_addr",
        "10.0.0.9",
        "train.py",
    ]
    result = run_rankwise(args, tmp_path)
    assert (result.code, result.out) == (0, "ran\n"), result.err
    assert "--node-rank is not used" in result.err
    assert "--master-addr is not used" in result.err


def test_a_script_that_takes_the_flag_itself_gets_it(tmp_path: Path) -> None:
    """L3's other side: a launcher's flag behind the script reaches a script that speaks of it, or one behind `--`."""
    write_script(tmp_path, "import argparse; p = argparse.ArgumentParser(); p.add_argument('--nnodes'); print(p.parse_args().nnodes)", "own.py")  # fmt: skip
    assert run_rankwise(["own.py", "--nnodes", "3"], tmp_path).out == "3\n"
    (tmp_path / "sub").mkdir()
    write_script(tmp_path, "import sys; print(sys.argv[1:])", "sub/any.py")
    assert run_rankwise(["--", "any.py", "--nnodes=3"], tmp_path / "sub").out == "['--nnodes=3']\n"


def test_an_option_of_the_scripts_own_parser(tmp_path: Path) -> None:
    """L1: a script without --local-rank gets none from us (torch.distributed.launch's habit)."""
    write_script(tmp_path, "import argparse; argparse.ArgumentParser().parse_args(); print('fine')")
    assert run_rankwise(["train.py"], tmp_path).out == "fine\n"


def test_subcommands_are_guessed(tmp_path: Path) -> None:
    """A misspelt subcommand is answered with the right one; a script in its place with `run`."""
    import subprocess

    for word, meant in (("rum", "rankwise run"), ("train.py", "rankwise run train.py")):
        done = subprocess.run([sys.executable, "-m", "rankwise", word], cwd=tmp_path, env=make_env(), capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == 2
        assert meant in done.stderr


def test_fewer_agents_than_nodes_is_said_while_waiting(tmp_path: Path) -> None:
    """L10: an agent that waits for other nodes says after some seconds for whom, and Ctrl-C ends it."""
    import signal

    from support import free_port

    write_script(tmp_path, "pass")
    args = [
        "--nnodes",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"localhost:{free_port()}",
        "--rdzv-id",
        "x",
        "train.py",
    ]
    with start_rankwise(args, tmp_path) as agent:
        wait_until(lambda: "waiting for other nodes" in agent.err, 25, "a word about who is missing")
        agent.send(signal.SIGINT)
        assert agent.finish(10).code == 130


def test_a_rendezvous_backend_that_torch_does_not_know(tmp_path: Path) -> None:
    """--rdzv-backend nope ends in a line that names it; torch must be asked, so it takes its import's time."""
    args = ["--nnodes", "2", "--rdzv-backend", "nope", "--rdzv-endpoint", "127.0.0.1:1", "train.py"]
    refuse(args, tmp_path, "--rdzv-backend nope", within_s=20)


def test_a_swallowed_value_is_named(tmp_path: Path) -> None:
    """`--nproc-per-node train.py`: the flag took the script as its value."""
    refuse(["--nproc-per-node", "train.py"], tmp_path, "took 'train.py' as its value")


@pytest.mark.parametrize("typed", ["--nprocs", "--num_processes", "--gpus", "-np", "--n"])
def test_other_launchers_words_are_understood(typed: str, tmp_path: Path) -> None:
    """What other launchers call the number of ranks leads to --nproc-per-node."""
    refuse([typed, "2", "train.py"], tmp_path, "--nproc-per-node" if typed != "--n" else "--n")


def test_a_local_rank_is_refused(tmp_path: Path) -> None:
    """--local_rank before the script would be read as the beginning of --local-ranks-filter and hide other ranks."""
    refuse(["--local_rank", "0", "train.py"], tmp_path, "LOCAL_RANK")
