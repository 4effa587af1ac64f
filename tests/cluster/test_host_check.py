"""Hosts before a job starts, and what a node is told: the rules, without hosts."""

from __future__ import annotations

import os
from typing import Any

import pytest

from clocks import FakeClock
from rankwise.base.errors import UsageError
from rankwise.cluster import host_check
from rankwise.cluster.host_facts import find_script
from rankwise.cluster.job import JobSpec
from rankwise.cluster.node_process import NOTICE, Orders

FACTS: dict[str, Any] = {
    "workdir": True, "python": "3.11.2", "rankwise": "0.2.0", "torch": "2.13.0", "files": {"train.py": "aa"}, "gpus": 8, "cpus": 64,
    "memory_bytes": 2**39, "rendezvous": "",
}  # fmt: skip
SAID = {
    "torch": ({"torch": "2.12.1"}, "the hosts differ: torch is 2.13.0 on a, 2.12.1 on b"),
    "none": ({"torch": None}, "torch is 2.13.0 on a, missing on b"),
    "file": ({"files": {"train.py": "bb"}}, "train.py is aa on a, this machine, bb on b"),
    "beside": ({"files": {"train.py": "aa", "x.py": "cc"}}, "x.py is missing on a, cc on b"),
    "script": ({"files": {}}, "train.py is not in /job on b"),
    "rankwise": ({"rankwise": None}, "b has no rankwise in its Python"),
    "folder": ({"workdir": False}, "b has no folder /job"),
    "gpus": ({"gpus": 4, "cpus": 2}, "b has 4 GPUs, and the job asks for 8; b has 2 cores, and the job asks for 64"),
    "port": ({"rendezvous": "port 29500 can't be taken: Address already in use"}, "b: port 29500 can't be taken: Address already in use"),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_what_differs_is_named_with_all_values(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host's value is in the error, before anything is started."""
    change, said = SAID[case]
    spec = JobSpec(name="x", on="ssh", command=("train.py",), workdir="/job", gpus_per_node=8, cpus_per_node=64)
    monkeypatch.setattr(host_check, "ask_all", lambda *_: {"a": FACTS, "b": {**FACTS, **change}})
    monkeypatch.setattr(host_check, "_list_files_here", lambda _: {"train.py": "aa"})
    with pytest.raises(UsageError) as error:
        host_check.check_hosts(spec, host_check.Look(ways={"a": [], "b": []}, python="python"))
    assert said in error.value.message


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("--max-restarts 3 a/train.py -m x", ("a/train.py", False)),
        ("-m pkg.train --config x.py", ("pkg.train", True)),
        ("--no-python ./run.sh", ("", False)),
    ],
)
def test_the_script_of_a_command_is_found(command: str, script: tuple[str, bool]) -> None:
    """Flags of the launcher stand before it, and its own arguments behind it."""
    assert find_script(command.split()) == script


def test_a_silent_client_is_gone() -> None:
    """A network that is cut ends no connection: who says nothing for a minute is gone, as is one whose words end."""
    clock = FakeClock()
    reading, writing = os.pipe()
    orders = Orders(reading, clock)
    os.write(writing, NOTICE)
    assert orders.read() == NOTICE
    clock.sleep(59)
    assert (orders.read(), orders.is_gone) == (b"", False)
    clock.sleep(2)
    assert (orders.read(), orders.is_gone) == (b"", True)
    again = Orders(reading, clock)
    os.close(writing)
    assert (again.read(), again.is_gone) == (b"", True)
    os.close(reading)
