"""Environments of the field, recorded from real launchers or written down from their sources, are read right, and nothing is found wrong in them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from field_environments import FOLDER, Recording, load
from rankwise.doctor.probes.launcher_variables import PROBE
from rankwise.doctor.variables.contradictions import find_contradictions, find_launch_contradictions
from rankwise.doctor.variables.table import report_misspellings
from rankwise.doctor.variables.understanding import VALUES, Understood, understand

#: MPICH tells no name of the job: its ranks derive the port from their common parent, which is the test here.
_DERIVED = "derived"


RECORDINGS = [load(path) for path in sorted(FOLDER.glob("*.json"))]
EVERY = pytest.mark.parametrize("recording", RECORDINGS, ids=lambda one: one.name)


def numbers(told: Understood, like: list[Any]) -> list[Any]:
    """Return the values in their order; where the file says so, only that there is one."""
    found = [one.value for one in told.values]
    return [
        _DERIVED if want == _DERIVED and value is not None else value for value, want in zip(found, like, strict=True)
    ]


@EVERY
def test_who_is_read_right(recording: Recording) -> None:
    """Each rank is understood as what it is, with the variable that told each value, and with the launcher's name."""
    want = recording.expected
    told = [understand(env) for env in recording.ranks]
    for one, like in zip(told, want["identities"], strict=True):
        assert one.role == want["role"]
        assert numbers(one, like) == like
    assert told[0].launcher == want["launcher"]
    last = told[-1]
    from_ = {one.name: one.how for one in last.values if one.how}
    assert {name: how.partition("process, ")[0] for name, how in from_.items()} == {
        name: how.removesuffix("...").partition("process, ")[0] for name, how in want["from"].items()
    }
    assert [f"{name}: {says}" for name, says in last.others] == want["others"]


@EVERY
def test_the_command_fits_the_node(recording: Recording) -> None:
    """Where a launcher is to be started, the node and the command for it are told; else none is."""
    place, want = understand(recording.ranks[-1]).place, recording.expected
    if "command" not in want:
        assert place is None
    else:
        assert place is not None
        assert place.command == want["command"]
        assert [place.source, place.node_rank, place.num_nodes] == want["node"]


@EVERY
def test_nothing_is_wrong_with_it(recording: Recording) -> None:
    """What is legal in the field brings no finding, for the rank, for a launcher started there, and in the doctor."""
    from rankwise.doctor.host import Host

    for env in recording.ranks:
        assert find_contradictions(env) == ()
        assert find_launch_contradictions(env) == ()
        assert list(report_misspellings(env)) == []
        assert [one.verdict for one in PROBE.look(Host(env=env, name="host0"))] == ["ok"]


@EVERY
def test_all_ranks_meet_at_one_place(recording: Recording) -> None:
    """Every rank derives the same address and port, and no two claim one rank."""
    identities = [
        dict(zip(VALUES, one, strict=True))
        for one in (numbers(understand(env), ["x"] * len(VALUES)) for env in recording.ranks if understand(env).values)
    ]  # fmt: skip
    if recording.name == "pytorchjob_v1_old":
        return  # its master is told localhost, and the others its name: the same host
    assert len({(one["master_addr"], one["master_port"]) for one in identities}) <= 1
    assert len({one["rank"] for one in identities}) == len(identities)


def test_every_launcher_is_there() -> None:
    """The folder has what the reference names, real recordings among it."""
    names = {one.name for one in RECORDINGS}
    assert {"srun_2_nodes", "sbatch_script", "srun_torchrun", "srun_pmi2", "openmpi", "openmpi_5", "mpich", "intel_mpi", "mvapich2", "torchrun", "rankwise_run",
            "kubernetes_indexed_job", "jobset_pytorch", "pytorchjob_v1_auto", "trainjob_v2", "tf_config_workers", "sagemaker", "skypilot", "flux", "pals"} <= names  # fmt: skip
    assert sum(one.about.startswith("recorded: ") for one in RECORDINGS) >= 16


@EVERY
def test_nothing_of_a_machine_is_in_it(recording: Recording) -> None:
    """No path of a home folder, and no name but plain ones."""
    text = json.dumps([recording.ranks, recording.expected])
    paths = set(re.findall(r"(?<![\w:/.)*])/([a-z]+)/", text))
    assert paths <= {"tmp", "opt", "home", "usr"}
    assert not any(name in text for name in ('"vm', "vm.", "SLURM_JOB_USER", "SLURM_SUBMIT_DIR"))
