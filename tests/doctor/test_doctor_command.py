"""`rankwise doctor` as users type it: what it refuses, what it prints, what it exits with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from rankwise import __version__
from rankwise.cli.doctor_flags import build_parser, read_hostfile
from rankwise.cli.main import main
from rankwise.doctor import registry
from rankwise.doctor.host import Host


@pytest.fixture(autouse=True)
def _has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the probe of /dev/shm, which many tests take for one that is well, be so in a container, too."""
    monkeypatch.setattr(Host, "usage", lambda *_: (64 << 30, 32 << 30))
    monkeypatch.setattr(Host, "may_write", lambda *_: True)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--hosts", "a,b", "--hostfile", "f"], "mean the same thing"),
        (["--hosts", "a,b", "--nnodes", "2"], "leave out --nnodes"),
        (["--rdzv-endpoint", "a:1", "--master-addr", "b"], "mean the same thing"),
        (["--node-rank", "1"], "how many hosts are there"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "a"], "numbered from 0 to 1"),
        (["--nnodes", "2", "--node-rank", "0"], "--master-addr ADDRESS-OF-NODE-0"),
        (["--nnodes", "0"], "'0' is not a number above 0"),
        (["--master_port", "70000"], "'70000' is not a port"),
        (["--arrival-timeout", "nan"], "not a number of seconds"),
        (["--hosts", "a", "--rdzv-endpoint", "a:1"], "leave out --rdzv-endpoint"),
        (["--nnodes", "1:4"], "pass how many there are now, as in --nnodes 4"),
        (["--nnodes", "4:4"], "--nnodes 4: pass their rendezvous"),
        (["--workers", "-3"], "'-3' is not a number from 0"),
        (["--hosts", "gpu[01-"], "the brackets of 'gpu[01-' are not closed"),
        (["--hosts=-oProxyCommand=x"], "is not a host name"),
        (["--rdzv-endpoint", "foo:x"], "'x' is not a port"),
        (["--bogus"], "unrecognized arguments: --bogus"),
    ],
)
def test_flags_that_make_no_sense_are_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, with the words that are wrong and the way out in two lines, before anything is looked at."""
    assert main(["doctor", *argv]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert len(told.err.splitlines()) == 2
    assert told.out == ""


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--hosts", "--hosts names no host"), ("--only", "--only names no probe"),
        *((flag, f"an empty value (is a variable of the job script not set?): {flag}") for flag in (
            "--hostfile", "--master-addr", "--rdzv-endpoint", "--script", "--checkpoints", "--python", "--ssh", "--token-file",
        )),
    ],
)  # fmt: skip
def test_a_variable_that_nobody_has_set_is_refused(flag: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--hosts "$NODES"` of a job script must not look at this host alone and say that all is well; to skip nothing is no mistake."""
    assert main(["doctor", flag, "", "--skip", ""]) == 2
    assert said in capsys.readouterr().err
    assert main(["doctor", flag, " ", "--skip", ""]) == 2
    assert main(["doctor", "--only", "shared-memory", "--skip", ""]) == 0


def test_unknown_probes_and_hosts_that_are_none_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt probe gets the near one; a host file without hosts is told."""
    assert main(["doctor", "--only", "host-name"]) == 2
    assert "did you mean hostname?" in capsys.readouterr().err
    (tmp_path / "hosts").write_text("# nobody\n\n")
    assert main(["doctor", "--hostfile", str(tmp_path / "hosts")]) == 2
    assert "names no host" in capsys.readouterr().err
    (tmp_path / "hosts").write_text("gpu[01-02, 04] slots=8\n")
    assert main(["doctor", "--hostfile", str(tmp_path / "hosts")]) == 2
    assert "the brackets of 'gpu[01-02,' are not closed" in capsys.readouterr().err
    assert main(["doctor", "--only", "resource"]) == 2
    assert "did you mean resources?" in capsys.readouterr().err
    assert main(["doctor", "--only", "hostname", "--skip", "network"]) == 2
    assert "--skip leaves no probe" in capsys.readouterr().err
    assert main(["doctor", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"]) == 2
    assert "can't rendezvous at 127.0.0.1" in capsys.readouterr().err


def test_topics_and_probes_choose_what_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    """--list shows what the same flags would look at; every probe stands in the whole list."""
    assert main(["doctor", "--list"]) == 0
    told = capsys.readouterr().out
    assert all(f"{one.id} " in told for one in registry.all_probes())
    assert main(["doctor", "--list", "--only", "resources", "--skip", "cores"]) == 0
    told = capsys.readouterr().out
    assert "shared-memory" in told
    assert "cores" not in told
    assert "hostname" not in told
    assert main(["doctor", "--list", "--only", "limits"]) == 0
    told = capsys.readouterr().out
    assert "limits of a process" in told
    assert "shared-memory" not in told


def test_json_is_what_was_read(capsys: pytest.CaptureFixture[str]) -> None:
    """One object, with the readings of the host; nothing else is on standard output."""
    assert main(["doctor", "--only", "shared-memory", "--format", "json"]) == 0
    (host,) = json.loads(capsys.readouterr().out)["hosts"]
    (reading,) = host["readings"]
    assert (reading["probe"], reading["verdict"], reading["hosts"]) == ("shared-memory", "ok", [host["name"]])
    assert reading["facts"]["size"] > 0


def test_json_says_first_what_a_gate_asks_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Version, time, the worst verdict, counts, the exit code with --strict in it, and each finding with its hosts and its fix."""
    monkeypatch.setenv("NCCL_DEBUGG", "INFO")
    flags = ["--only", "nccl-variables,shared-memory", "--format", "json"]
    assert main(["doctor", *flags]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told)[:7] == ["rankwise", "schema", "made", "verdict", "exit_code", "counts", "findings"]
    assert (told["rankwise"], told["schema"]) == (__version__, 1)
    assert (told["verdict"], told["exit_code"]) == ("warn", 0)
    assert (told["counts"]["fail"], told["counts"]["warn"]) == (0, 1)
    made = datetime.strptime(told["made"], "%Y-%m-%dT%H:%M:%S%z")
    assert abs(datetime.now(tz=timezone.utc) - made) < timedelta(minutes=5)
    (finding,) = told["findings"]
    assert set(finding) == {"probe", "hosts", "verdict", "what", "why", "fix", "class"}
    assert (finding["probe"], finding["hosts"]) == ("nccl-variables", [told["hosts"][0]["name"]])
    assert finding["fix"]
    assert main(["doctor", *flags, "--strict"]) == 1
    assert json.loads(capsys.readouterr().out)["exit_code"] == 1


def test_an_endpoint_without_a_number_of_hosts_keeps_nobody_waiting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """This host is looked at, with the endpoint as its master's address; and it is said that no others were waited for."""
    assert main(["doctor", "--only", "master-address", "--rdzv-endpoint", "no-such-host.invalid:1"]) == 1
    told = capsys.readouterr()
    assert "only this host is looked at: --rdzv-endpoint without --nnodes" in told.err
    assert "FAIL  master-address  the master's name no-such-host.invalid has no address here" in told.out
    assert "rendezvous" not in told.out


def test_a_name_without_an_address_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The rendezvous has failed by it, and the probe of the address need not say so again."""
    flags = ["--nnodes", "2", "--rdzv-endpoint", "no-such-host.invalid:1", "--arrival-timeout", "1"]
    assert main(["doctor", "--only", "master-address,shared-memory", *flags]) == 1
    told = capsys.readouterr().out
    assert told.count("has no address here") == 1
    assert told.splitlines()[-1].startswith("1 fail, 1 ok")


def test_hosts_that_ssh_does_not_reach_are_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with ssh's own words; the error behind them does not repeat the first."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho no way >&2\nexit 255\n")
    ssh.chmod(0o755)
    assert main(["doctor", "--only", "shared-memory", "--hosts", "a1,a2", "--ssh", str(ssh)]) == 1
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if "a1" in line and "no way" in line] == ["rankwise: ssh does not reach a1: no way"]
    assert "rankwise: none of the 2 hosts can be looked at" in told


def test_hosts_are_asked_from_a_folder_that_has_been_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That the current folder is gone hides nothing: ssh's own words are shown."""
    (tmp_path / "ssh").write_text("#!/bin/sh\necho no way >&2\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["doctor", "--only", "shared-memory", "--hosts", "a1", "--ssh", f"{tmp_path}/ssh"]) == 1
    assert "ssh does not reach a1: no way" in capsys.readouterr().err


def test_a_failure_is_exit_code_1_and_a_warning_only_if_strict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interface that is none fails; a variable left over from debugging is a warning."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eht0")
    assert main(["doctor", "--only", "gloo-variables"]) == 1
    told = capsys.readouterr().out
    assert "FAIL" in told
    assert "[I6]" in told
    assert "GLOO_SOCKET_IFNAME=eht0" in told
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("NCCL_DEBUGG", "INFO")
    assert main(["doctor", "--only", "nccl-variables"]) == 0
    assert "warn" in capsys.readouterr().out
    assert main(["doctor", "--only", "nccl-variables", "--strict"]) == 1


def test_a_page_of_a_probe_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    """`rankwise rule` shows what, why, how and what to do."""
    assert main(["rule", "shared-memory"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("shared-memory: space in /dev/shm\n")
    assert "docker run --shm-size=16g" in told
    assert main(["rule", "nonsense"]) == 2


def run(command: str, **env: str) -> tuple[int, str, str]:
    """Run a shell command line with the tested rankwise first on PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "PATH": path, **env}, capture_output=True, timeout=60, check=False
    )  # fmt: skip
    return done.returncode, done.stdout.decode("latin-1"), done.stderr.decode(errors="replace")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_report_gets_through_or_says_why() -> None:
    """A console of another alphabet gets all of it, `| head` is no error, and a full disk is one line and no traceback."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    code, told, error = run("GLOO_SOCKET_IFNAME=eht… rankwise doctor --only gloo-variables", **ascii_only)
    assert (code, error) == (1, "")
    assert "GLOO_SOCKET_IFNAME=eht\\u" in told
    code, _, error = run("rankwise doctor --list | head -n 1; exit ${PIPESTATUS[0]}")
    assert (code, error) == (0, "")
    code, _, error = run("rankwise doctor --list > /dev/full")
    assert code == 1
    assert error.startswith("rankwise: the report can't be written to standard output: ")
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "abc", "WORLD_SIZE": "2"},
        {"RANK": "0"},
        {"TF_CONFIG": "{bad"},
        {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "1", "RANK": "0"},
    ],
    ids=["no number", "half", "no JSON", "impossible"],
)
def test_variables_that_make_no_sense_are_a_finding_and_no_refusal(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs where it is needed most: the host is looked at, and the variables fail."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--only", "launcher-variables,shared-memory"]) == 1
    told = capsys.readouterr().out
    assert "FAIL  launcher-variables" in told
    assert "ok    shared-memory" in told


def test_ranks_may_be_counted_and_hosts_written_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--nproc-per-node auto` is what `rankwise env` prints; hosts are read in Slurm's and Open MPI's way."""
    assert main(["doctor", "--nproc-per-node", "auto", "--only", "shared-memory"]) == 0
    assert build_parser().parse_args(["--hosts", "gpu[01-02,07],big"]).hosts == (
        "gpu01",
        "gpu02",
        "gpu07",
        "big",
    )
    assert build_parser().parse_args(["--hosts", "gpu[01, 03] , big"]).hosts == ("gpu01", "gpu03", "big")
    (tmp_path / "hosts").write_text("node[0-1] slots=8\nnode2:8  # the last\nfd00::7\nnode0\n")
    assert read_hostfile(tmp_path / "hosts") == ("node0", "node1", "node2", "fd00::7")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "--nnodes N, --nnodes" not in capsys.readouterr().out


_MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip


def test_a_rank_of_mpirun_is_no_place_for_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a healthy step nothing is wrong, even strictly; it is if the user says that a launcher starts two ranks there."""
    for name, value in _MPIRUN.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--only", "launcher-variables", "--strict"]) == 0
    assert "rank 1 of 2 (OMPI_COMM_WORLD_RANK=1" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor", "--only", "launcher-variables", "--strict"]) == 1
    assert "[I10]" in capsys.readouterr().out
    assert main(["doctor", "--only", "launcher-variables", "--strict", "--nproc-per-node", "2"]) == 1
    assert "[I24]" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_password_in_the_place_to_meet_is_not_shown(
    form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not in what the rendezvous tells, not while it waits, and not in an error."""
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "me:hunter3@no-such-host.invalid:1")
    monkeypatch.setenv("PET_NNODES", "2")
    flags = ["--only", "shared-memory", "--arrival-timeout", "1", "--format", form]
    assert main(["doctor", *flags]) == 1
    assert (
        main(
            [
                "doctor",
                *flags,
                "--nnodes",
                "2",
                "--master-addr",
                "me:hunter3@no-such-host.invalid",
                "--node-rank",
                "1",
            ]
        )
        == 1
    )
    told = capsys.readouterr()
    assert "no-such-host.invalid" in told.out
    assert "hunter3" not in told.out + told.err
