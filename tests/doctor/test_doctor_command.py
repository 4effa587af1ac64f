"""`rankwise doctor` as users type it: what it refuses, what it prints, what it exits with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rankwise.cli.main import main
from rankwise.doctor import registry

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--hosts", "a,b", "--hostfile", "f"], "say the same thing twice"),
        (["--hosts", "a,b", "--nnodes", "2"], "leave out --nnodes"),
        (["--rdzv-endpoint", "a:1", "--master-addr", "b"], "say the same thing twice"),
        (["--node-rank", "1"], "how many hosts are there"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "a"], "numbered from 0 to 1"),
        (["--nnodes", "2", "--node-rank", "0"], "--master-addr ADDRESS-OF-NODE-0"),
        (["--nnodes", "0"], "'0' is no number above 0"),
        (["--master_port", "70000"], "'70000' is no port"),
        (["--arrival-timeout", "nan"], "no number of seconds"),
        (["--html", "nowhere/x.html"], "its folder does not exist"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, with both words and the way out, before anything is looked at."""
    with pytest.raises(SystemExit) as end:
        main(["doctor", *argv])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_unknown_probes_and_hosts_that_are_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt probe gets the near one; a host file without hosts is told."""
    assert main(["doctor", "--only", "host-name"]) == 2
    assert "did you mean hostname?" in capsys.readouterr().err
    (tmp_path / "hosts").write_text("# nobody\n\n")
    assert main(["doctor", "--hostfile", str(tmp_path / "hosts")]) == 2
    assert "names no host" in capsys.readouterr().err
    assert main(["doctor", "--only", "hostname", "--skip", "network"]) == 2
    assert "--skip leaves no probe" in capsys.readouterr().err
    assert main(["doctor", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"]) == 2
    assert "can't meet at 127.0.0.1" in capsys.readouterr().err


def test_topics_and_probes_choose_what_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    """--list shows what the same flags would look at; every probe stands in the whole list."""
    assert main(["doctor", "--list"]) == 0
    told = capsys.readouterr().out
    assert all(f"{one.id} " in told for one in registry.all_probes())
    assert main(["doctor", "--list", "--only", "limits", "--skip", "cores"]) == 0
    told = capsys.readouterr().out
    assert "shared-memory" in told
    assert "cores" not in told
    assert "hostname" not in told


def test_json_is_what_was_read(capsys: pytest.CaptureFixture[str]) -> None:
    """One object, with the readings of the host; nothing else is on standard output."""
    assert main(["doctor", "--only", "shared-memory", "--format", "json"]) == 0
    (host,) = json.loads(capsys.readouterr().out)["hosts"]
    (reading,) = host["readings"]
    assert (reading["probe"], reading["verdict"], reading["hosts"]) == ("shared-memory", "ok", [host["name"]])
    assert reading["facts"]["size"] > 0


def test_a_failure_is_exit_code_1_and_a_warning_only_if_strict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interface that is none fails; a variable left over from debugging is a warning."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eht0")
    page = tmp_path / "page.html"
    assert main(["doctor", "--only", "gloo-variables", "--html", str(page)]) == 1
    told = capsys.readouterr().out
    assert "FAIL" in told
    assert "[I6]" in told
    assert "GLOO_SOCKET_IFNAME=eht0" in page.read_text()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("NCCL_DEBUGG", "INFO")
    assert main(["doctor", "--only", "nccl-variables"]) == 0
    assert "warn" in capsys.readouterr().out
    assert main(["doctor", "--only", "nccl-variables", "--strict"]) == 1


def test_a_page_of_a_probe_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    """`rankwise probe` shows what, why, how and what to do."""
    assert main(["probe", "shared-memory"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("shared-memory: room in /dev/shm (limits; class X16)\n")
    assert "docker run --shm-size=16g" in told
    assert main(["probe", "nonsense"]) == 2
