"""job.toml and the flags: the same words, checked before anything is submitted."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankwise.base.errors import UsageError
from rankwise.cluster import job
from rankwise.cluster.job_fields import Word, parse_duration, parse_size, read_table
from rankwise.cluster.launch_command import RendezvousPlace, ShellText, build_launch, join_words
from rankwise.launcher.command import parse

if TYPE_CHECKING:
    from collections.abc import Mapping

OWN = {
    "partition": Word("Where."), "options": Word("More.", "list"), "port": Word("Port.", "number"),
    "shared": Word("Shared.", "switch"), "labels": Word("Labels.", "table"),
}  # fmt: skip
FILE = """
on = "slurm"
nodes = "2:4"
gpus_per_node = 8
memory = "64G"
time = "2:00:00"
command = "train.py --lr '0 1'"
requeue = "always"
[env]
A = 1
B = true
[slurm]
partition = "gpu"
options = ["--x=1"]
shared = true
[ray]
nonsense = 1
"""


def read(tmp_path: Path, text: str = FILE, **flags: object) -> job.JobSpec:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return job.read(path, flags, OWN, tmp_path / "elsewhere")


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    """All words of the file are read; those that are typed replace them, and tables are joined."""
    spec = read(tmp_path, nodes="3", env=["A=2", "C=x=y"], partition="big", port="7", time=None)
    assert (spec.min_nodes, spec.max_nodes, spec.ranks_per_node) == (3, 3, "8")
    assert (spec.memory_bytes, spec.time_s, spec.requeue) == (64 * 2**30, 7200, job.ALWAYS)
    assert spec.env == {"A": "2", "B": "true", "C": "x=y"}
    assert spec.command == ("train.py", "--lr", "0 1")
    assert (spec.own.text("partition"), spec.own.list("options"), spec.own.number("port")) == ("big", ("--x=1",), 7)  # fmt: skip
    assert spec.own.is_on("shared")
    assert (spec.name, spec.workdir) == ("train", str(tmp_path))


def test_folders_of_flags_begin_where_one_stands(tmp_path: Path) -> None:
    """The file's workdir begins beside it, that of a flag in the current folder."""
    text = 'workdir = "a"\n' + FILE
    assert read(tmp_path, text).workdir == str(tmp_path / "a")
    assert read(tmp_path, text, workdir="b").workdir == str(tmp_path / "elsewhere" / "b")


BAD: dict[str, tuple[Mapping[str, object], str]] = {
    "unknown": ({"nods": "4"}, "--nods: there is no such word\n  -> did you mean nodes?"),
    "kind": ({"gpus_per_node": "many"}, "--gpus-per-node = 'many' is not a whole number"),
    "nodes": ({"nodes": "4:2"}, "nodes '4:2' is neither a number from 1 nor MIN:MAX"),
    "time": ({"time": "90"}, "time '90' is not a duration\n  -> as in 2:00:00"),
    "unit": ({"memory": "64"}, "memory '64' has no unit: 64G or 64 bytes?\n  -> write 64G, or 64B for bytes"),
    "fraction": ({"nodes": 2.5}, "--nodes = 2.5 is not N|MIN:MAX"),
    "clock": (
        {"time": datetime.time(2, 0)},
        '--time = 02:00:00 is a date or a time of day to TOML\n  -> put it in quotes: "02:00:00"',
    ),
    "memory": ({"memory": "much"}, "memory 'much' is not an amount"),
    "ranks": ({"ranks_per_node": "9"}, "9 ranks on a node of 8 GPUs"),
    "requeue": ({"requeue": "often"}, "requeue 'often' is neither a number from 0 nor always"),
    "env": ({"env": ["A"]}, "--env 'A' is not NAME=value"),
    "name": ({"env": ["1A=2"]}, "env: '1A' is not a variable's name"),
    "files": ({"files": ["../x"]}, "files: ../x is not below the workdir"),
    "absent": ({"files": ["lost.py"]}, "files: there is no "),
    "rendezvous": ({"command": ["--nnodes=2", "x.py"]}, "--nnodes=2: where the nodes meet"),
    "cluster": ({"on": "slrum"}, "there is no cluster 'slrum'\n  -> did you mean slurm?"),
    "quote": ({"command": "x.py '"}, "can't be read: No closing quotation"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_word_is_named_with_its_value(case: str, tmp_path: Path) -> None:
    """Each error says which word, what it holds, and what may be meant."""
    flags, said = BAD[case]
    with pytest.raises(UsageError) as error:
        read(tmp_path, **flags)
    assert said in str(error.value)


def test_an_unknown_word_of_the_file_is_named_with_its_place(tmp_path: Path) -> None:
    """A slip in a table names the file, the table, and the nearest word."""
    with pytest.raises(UsageError, match=r"job.toml: \[slurm\] partitoin: there is no such word\n  -> did you mean partition"):  # fmt: skip
        read(tmp_path, FILE.replace("partition", "partitoin"))
    with pytest.raises(UsageError, match=r"job.toml: slrum: there is no such word\n  -> did you mean slurm"):
        read(tmp_path, FILE.replace("[slurm]", "[slrum]"))
    with pytest.raises(UsageError, match="nothing says where the job is to run"):
        read(tmp_path, FILE.replace('on = "slurm"', ""))
    with pytest.raises(UsageError, match=r"job.toml: Invalid"):
        read(tmp_path, "on = ")


def test_only_names_are_split_at_commas(tmp_path: Path) -> None:
    """A text for a list is one item, as a line of shell may have commas; names are several; paths need not be texts."""
    own = {"setup": Word("Line.", "list"), "hosts": Word("Hosts.", is_names=True), "keys": Word("Keys.", "list", is_names=True)}  # fmt: skip
    given = {"setup": "export A=eth0,eth1", "hosts": "a, b[1-2,4]", "keys": "a, b"}
    table = read_table(given, own, "")
    assert table.values == {"setup": ("export A=eth0,eth1",), "hosts": "a,b[1-2,4]", "keys": ("a", "b")}
    assert read_table({"hosts": ["a", " b"], "keys": ["a,b"]}, own, "").values == {"hosts": "a,b", "keys": ("a,b",)}  # fmt: skip
    (tmp_path / "a").touch()
    spec = read(tmp_path, checkpoint=tmp_path / "c", files=[Path("a")], env={"HOME": tmp_path}, python=Path("/p"))
    assert (spec.checkpoint, spec.files, spec.env["HOME"], spec.python) == (str(tmp_path / "c"), ("a",), str(tmp_path), "/p")  # fmt: skip
    with pytest.raises(UsageError, match=r"job.toml: workdir = 5 is not the name of a folder"):
        read(tmp_path, "workdir = 5\n" + FILE)


@pytest.mark.parametrize(("text", "seconds"), [("2:00:00", 7200), ("1-00:00:01", 86401), ("1h30m", 5400), ("45s", 45)])  # fmt: skip
def test_durations(text: str, seconds: int) -> None:
    """Only what nobody can misread is a duration."""
    assert parse_duration(text, "time") == seconds


@pytest.mark.parametrize(("text", "size"), [("64G", 64 * 2**30), ("512MiB", 2**29), ("1.5T", 3 * 2**39), ("100B", 100), ("2 mb", 2**21)])  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    """Units are powers of 1024."""
    assert parse_size(text, "memory") == size


def test_what_starts_a_node_is_a_good_command(tmp_path: Path) -> None:
    """`rankwise run` itself reads it: with a rendezvous for several nodes, without one for a single node."""
    place = RendezvousPlace(endpoint=ShellText("$head:29500"), run_id="x-1")
    words = build_launch(read(tmp_path), place, python="/opt/python")
    assert words[:4] == ["/opt/python", "-m", "rankwise", "run"]
    spec = parse(words[4:], {})
    assert (spec.min_nodes, spec.max_nodes, spec.nproc_per_node) == (2, 4, "8")
    assert (spec.rendezvous.backend, spec.rendezvous.endpoint, spec.rendezvous.run_id) == ("c10d", "$head:29500", "x-1")  # fmt: skip
    assert (spec.program.script, spec.program.args, spec.shutdown_timeout_s) == ("train.py", ("--lr", "0 1"), 96)  # fmt: skip
    assert ' "$head:29500" ' in join_words(words)
    assert join_words(words).endswith("train.py --lr '0 1'")
    alone = read(tmp_path, nodes="1", command=["--shutdown-timeout", "7", "-m", "pkg.train"])
    spec = parse(build_launch(alone, None, python="python")[4:], {})
    assert spec.is_one_node
    assert (spec.shutdown_timeout_s, spec.program.script, spec.program.how) == (7, "pkg.train", "module")
