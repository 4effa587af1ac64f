"""Commands that are printed to be pasted: no value becomes a command of its own, and no other process's secret is shown."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from fake_hosts import look, make_host
from network_hosts import ask, find_one
from rankwise.base.host import find_port_holder
from rankwise.doctor.host import Host, JobShape
from rankwise.doctor.multi_host.coordinator_client import explain_failure
from rankwise.doctor.multi_host.plan import Plan
from rankwise.doctor.probes import ports

if TYPE_CHECKING:
    from pathlib import Path

_NO_NAMES = [
    "x;rm y",
    "x$(touch f)",
    "`touch f`",
    "a b",
    "x|y",
    "*",
    "me:secret@10.0.0.9",
    "-rf",
    "x\ntouch f",
    "x'y",
]
_LISTEN = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"


@pytest.mark.parametrize("name", _NO_NAMES)
def test_what_is_no_host_name_comes_into_no_command(name: str, tmp_path: Path) -> None:
    """I3: the probe of the address and the rendezvous say that it is none, and give a command without it."""
    told = find_one(ask("master-address", tmp_path, job=JobShape(num_nodes=2, master_addr=name)))
    assert (told.verdict, told.class_id) == ("fail", "I3")
    assert told.what.endswith(" is not a host name")
    assert told.fix.startswith("export MASTER_ADDR=…  #")
    failed = explain_failure(make_host(tmp_path), Plan(endpoint_host=name, endpoint_port=29500), socket.gaierror(-2, "unknown"))  # fmt: skip
    assert failed.class_id == "I3"
    assert failed.message.endswith(" is not a host name")
    assert failed.fix.startswith("export MASTER_ADDR=…  #")


@pytest.mark.parametrize("name", ["node0", "node-0.cluster_a", "fd00::1", "fe80::1%eth0", "münchen"])
def test_a_host_name_stays_in_its_command(name: str, tmp_path: Path) -> None:
    """A name without an address is asked for, and a shell reads it as one word."""
    for fix in (
        find_one(ask("master-address", tmp_path, names={}, job=JobShape(num_nodes=2, master_addr=name))).fix
        if ":" not in name
        else f"getent hosts {name}",
        explain_failure(make_host(tmp_path), Plan(endpoint_host=name, endpoint_port=1), socket.gaierror(-2, "unknown")).fix,
    ):  # fmt: skip
        assert shlex.split(fix.partition("  #")[0]) == ["getent", "hosts", name]


@pytest.mark.parametrize("error", [ConnectionRefusedError(), TimeoutError(), OSError(113, "No route to host")])
def test_a_name_that_leads_somewhere_is_one_word(error: OSError, tmp_path: Path) -> None:
    """Whatever /etc/hosts may call a host, its name is no command of its own."""
    name = "x;touch f"
    host = make_host(tmp_path, names={name: ["10.0.0.9"]}, files={"/etc/hosts": "10.0.0.9 x;touch\n"})
    fix = explain_failure(host, Plan(endpoint_host=name, endpoint_port=29500), error).fix
    assert "getent hosts 'x;touch f'" in fix


def test_a_port_s_holder_is_told_without_its_arguments() -> None:
    """I9: of another process the doctor shows the program only; what asks for the holder elsewhere gets the line as it was."""
    with subprocess.Popen(
        [sys.executable, "-c", _LISTEN, "--api-key", "abcdef12345", "-p", "hunter7"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        job = JobShape(num_nodes=1, master_addr="127.0.0.1", master_port=port)
        told = find_one([one for one in look(ports.PROBE, Host(env={}, job=job)) if one.class_id == "I9"])
        assert find_port_holder(port).startswith(f"pid {holder.pid} ({sys.executable} -c import socket"[:80])
        holder.communicate("\n", timeout=30)
    assert f"is held by pid {holder.pid} (python" in told.what
    assert "hunter7" not in told.what
    assert "abcdef12345" not in told.what
    assert "import socket" not in told.what
    assert told.fix == f"kill {holder.pid}  # if it is left over"


def test_a_script_is_told_and_its_password_is_not(tmp_path: Path) -> None:
    """I9: which script it is can be seen; its arguments can't, whatever their flags are called."""
    listening = "  sl  local_address\n   0: 00000000:733C 00000000:0000 0A 0:0 0:0 0 0 0 4711 1\n"
    files = {
        "/proc/net/tcp": listening,
        "/proc/77/cmdline": "python\0/x/t.py\0--api-key\0abcdef12345\0-p\0hunter7\0",
        "/proc/77/fd/x": "",
    }
    make_host(tmp_path, files=files)
    (tmp_path / "proc/77/fd/3").symlink_to("socket:[4711]")
    told = find_one(ask("ports", tmp_path))
    assert told.what.endswith("is held by pid 77 (python t.py)")
