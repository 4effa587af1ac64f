"""A job as its user writes it once, in job.toml or as flags, checked before anything is submitted."""

from __future__ import annotations

import itertools
import re
import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import UsageError
from rankwise.base.host_list import expand_hosts
from rankwise.cluster.job_fields import Table, Word, parse_duration, parse_size, read_table, suggest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: Where a job can run; each has a module, and a table of its own words in job.toml.
CLUSTERS = ("local", "ssh", "slurm", "kubernetes", "ray")

#: A requeue without a limit.
ALWAYS = sys.maxsize

WORDS: dict[str, Word] = {
    "name": Word("Name of the job; the script's by default."),
    "on": Word("Where it runs.", choices=CLUSTERS),
    "nodes": Word("How many nodes; MIN:MAX if the job may shrink and grow.", metavar="N|MIN:MAX"),
    "ranks_per_node": Word(
        "Ranks on each node: a number, gpu, cpu or auto; the number of GPUs by default, or 1.", metavar="N"
    ),
    "gpus_per_node": Word("GPUs of each node.", "number", "N"),
    "cpus_per_node": Word("CPU cores of each node.", "number", "N"),
    "memory": Word("Main memory of each node, as in 64G.", metavar="SIZE"),
    "time": Word("How long it may run, as in 2:00:00 or 90m.", metavar="TIME"),
    "grace": Word(
        "How long the ranks have to save and leave, from the notice to the kill (default: 2m).",
        metavar="TIME",
    ),
    "image": Word("Container image."),
    "workdir": Word("Folder that the command is run in, on every node; this one by default.", metavar="DIR"),
    "python": Word("The Python on the nodes.", metavar="PATH"),
    "env": Word("A variable of the job's environment.", "table", "NAME=VALUE"),
    "files": Word(
        "A file or folder that is copied to the nodes first, relative to the workdir.",
        "list",
        "PATH",
        is_names=True,
    ),
    "requeue": Word(
        "How often the job is started again after it was preempted or stopped in time (exit code 75): a number, or always.",
        metavar="N|always",
    ),
    "standby": Word("Nodes beyond those that train: each takes the place of one that is lost.", "number", "N"),
    "checkpoint": Word(
        "Folder of the checkpoints, which all nodes share; the script finds it in RANKWISE_CHECKPOINT.",
        metavar="DIR",
    ),
    "command": Word("The script and its arguments, as behind `rankwise run`.", "command"),
}

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,46}[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: What a node is started with is said by the job's own words.
_OURS = (
    "nnodes",
    "nproc-per-node",
    "node-rank",
    "master-addr",
    "master-port",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "local-addr",
    "standalone",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One job, as the user wants it, on one kind of cluster.

    Attributes:
        name: Letters, digits, dots, dashes and underscores.
        on: One of `CLUSTERS`.
        min_nodes: With how many nodes it can train; ``max_nodes`` is how many it would like.
        ranks_per_node: A number, ``gpu``, ``cpu`` or ``auto``.
        gpus_per_node: 0: none is asked for, or the cluster's own words do so.
        cpus_per_node: 0: the cluster's default; likewise ``memory_bytes`` and ``time_s``.
        grace_s: From the notice to the kill.
        image: Container image; empty: none.
        workdir: Absolute; where the command is run on every node.
        python: Empty: the cluster's default.
        files: To copy to the nodes, relative to ``workdir``.
        requeue: How often it is started again after exit code 75; `ALWAYS`: without limit.
        standby: Nodes beyond ``max_nodes``.
        checkpoint: Folder; empty: none.
        command: What stands behind `rankwise run`: its flags, the script, the script's arguments.
        own: The cluster's own words.
    """

    name: str
    on: str
    command: tuple[str, ...]
    workdir: str
    min_nodes: int = 1
    max_nodes: int = 1
    ranks_per_node: str = "1"
    gpus_per_node: int = 0
    cpus_per_node: int = 0
    memory_bytes: int = 0
    time_s: int = 0
    grace_s: int = 120
    image: str = ""
    python: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    requeue: int = 0
    standby: int = 0
    checkpoint: str = ""
    own: Table = field(default_factory=lambda: Table({}))

    @property
    def num_nodes(self) -> int:
        """How many nodes are asked for, those that stand by included."""
        return self.max_nodes + self.standby

    @property
    def variables(self) -> dict[str, str]:
        """What is set on each node beside its own environment."""
        return {**({"RANKWISE_CHECKPOINT": self.checkpoint} if self.checkpoint else {}), **self.env}


def load_file(path: Path) -> dict[str, Any]:
    """Return what a job file says.

    Raises:
        UsageError: It is not there, or is no TOML.
    """
    try:
        # By name: Python 3.10 has only the package of the same make.
        toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise UsageError(
            f"{path}: Python 3.10 can't read TOML", hint="pip install tomli, or say all by flags"
        ) from None
    try:
        found: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} can't be read: {getattr(error, 'strerror', None) or error}",
            hint="name the job file by --file, or say all by flags",
        ) from None
    except toml.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}", hint='texts are quoted in TOML: image = "name"') from None
    return found


def find_on(file: Mapping[str, Any], flags: Mapping[str, object]) -> str:
    """Return which kind of cluster the job is for.

    Raises:
        UsageError: Nobody says it, or there is none of that name.
    """
    on = flags.get("on") or file.get("on")
    if on not in CLUSTERS:
        problem = "nothing says where the job is to run" if on is None else f"there is no cluster {on!r}"
        hint = suggest(str(on), CLUSTERS) if on else f"--on {'|'.join(CLUSTERS)}, or `on` in job.toml"
        raise UsageError(problem, hint=hint)
    return str(on)


def read(path: Path | None, flags: Mapping[str, object], own_words: Mapping[str, Word], folder: Path) -> JobSpec:
    """Read a job from its file and from flags, which win.

    Args:
        path: job.toml; None: all is said by flags.
        flags: By word, common ones and those of the cluster; None for what was not given.
        own_words: The words that only this cluster has.
        folder: Where relative paths begin, for those of the flags; those of the file begin beside it.

    Raises:
        UsageError: A word is unknown, or a value can't be.
    """
    file = {} if path is None else load_file(path)
    on = find_on(file, flags)
    common = {name: value for name, value in file.items() if name not in CLUSTERS}
    own = file.get(on, {})
    if not isinstance(own, dict):
        raise UsageError(f"{path}: {on} is to be a table", hint=f"its words stand below a line [{on}]")
    home = Path(folder if path is None else path.parent).absolute()
    if path is not None:
        if not isinstance(common.get("workdir", ""), str):
            raise UsageError(
                f"{path}: workdir = {common['workdir']!r} is not the name of a folder", hint="put it in quotes"
            )
        common["workdir"] = str(home / str(common.get("workdir", "")))
    if flags.get("workdir"):
        flags = {**flags, "workdir": str(Path(folder).absolute() / str(flags["workdir"]))}
    before = f"{path}: " if path else ""
    written = read_table(common, WORDS, before, CLUSTERS)
    own_written = read_table(own, own_words, f"{before}[{on}] ")
    typed = read_table({n: v for n, v in flags.items() if n in WORDS}, WORDS, "--")
    own_typed = read_table({n: v for n, v in flags.items() if n not in WORDS}, own_words, "--", WORDS)
    env = {**written.table("env"), **typed.table("env")}
    merged = Table({**written.values, **typed.values, **({"env": env} if env else {})})
    own_all = Table({**own_written.values, **own_typed.values})
    if "nodes" not in merged.values and (hosts := expand_hosts(own_all.text("hosts"))):
        # Who names hosts means all of them.
        merged = Table({**merged.values, "nodes": str(max(1, len(hosts) - merged.number("standby")))})
    return _build(merged, own_all, on, home)


def _build(table: Table, own: Table, on: str, home: Path) -> JobSpec:
    command = _check_command(table.list("command"))
    low, high = _parse_nodes(table.text("nodes", "1"))
    gpus = table.number("gpus_per_node")
    ranks = table.text("ranks_per_node", str(gpus or 1))
    if ranks not in {"gpu", "cpu", "auto"} and not re.fullmatch(r"[1-9]\d*", ranks):
        raise UsageError(f"ranks_per_node {ranks!r} is neither a number from 1 nor gpu, cpu or auto")
    if gpus and ranks.isdecimal() and int(ranks) > gpus:
        raise UsageError(
            f"{ranks} ranks on a node of {gpus} GPUs", hint="ask for as many GPUs as ranks, or drop gpus_per_node"
        )
    workdir = table.text("workdir", str(home))
    env = table.table("env")
    for name in env:
        if not _VARIABLE.fullmatch(name):
            raise UsageError(f"env: {name!r} is not a variable's name")
    return JobSpec(
        name=_find_name(table.text("name"), command),
        on=on,
        command=command,
        workdir=workdir,
        min_nodes=low,
        max_nodes=high,
        ranks_per_node=ranks,
        gpus_per_node=gpus,
        cpus_per_node=table.number("cpus_per_node"),
        memory_bytes=parse_size(table.text("memory"), "memory") if table.text("memory") else 0,
        time_s=parse_duration(table.text("time"), "time") if table.text("time") else 0,
        grace_s=parse_duration(table.text("grace", "2m"), "grace"),
        image=table.text("image"),
        python=table.text("python"),
        env=env,
        files=_check_files(table.list("files"), Path(workdir)),
        requeue=_parse_requeue(table.text("requeue", "0")),
        standby=table.number("standby"),
        checkpoint=table.text("checkpoint"),
        own=own,
    )


def _check_command(command: tuple[str, ...]) -> tuple[str, ...]:
    if not command:
        raise UsageError("no script is given", hint="rankwise submit --on … -- train.py [its arguments]")
    refuse_rendezvous(itertools.takewhile(lambda word: word.startswith("-"), command))
    return command


def refuse_rendezvous(flags: Iterable[str]) -> None:
    """Refuse flags of `rankwise run` that say what the job itself does.

    Args:
        flags: Those that stand before the script, or the first of them.

    Raises:
        UsageError: One of them says where the nodes meet, or how many ranks they have.
    """
    for word in flags:
        if word.startswith("--") and word[2:].partition("=")[0].replace("_", "-") in _OURS:
            raise UsageError(
                f"{word}: where the nodes meet, and how many ranks they have, is up to the job",
                hint="use nodes and ranks_per_node",
            )


def _parse_nodes(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < low <= high:
        raise UsageError(f"nodes {text!r} is neither a number from 1 nor MIN:MAX, as in 2:4")
    return low, high


def _parse_requeue(text: str) -> int:
    if text == "always":
        return ALWAYS
    if not text.isdecimal():
        raise UsageError(f"requeue {text!r} is neither a number from 0 nor always")
    return int(text)


def _check_files(files: tuple[str, ...], workdir: Path) -> tuple[str, ...]:
    for file in files:
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise UsageError(
                f"files: {file} is not below the workdir", hint="name it relative to the workdir, or change that"
            )
        if not (workdir / file).exists():
            raise UsageError(f"files: there is no {workdir / file}", hint="name them relative to the workdir")
    return files


def _find_name(name: str, command: tuple[str, ...]) -> str:
    if not name:
        script = next((word for word in command if word.endswith((".py", ".sh"))), command[-1])
        name = re.sub(r"[^A-Za-z0-9]+", "-", Path(script).stem).strip("-")[:40].strip("-") or "job"
    if not _NAME.fullmatch(name):
        raise UsageError(f"name {name!r}: up to 48 letters, digits, dots, dashes and underscores are meant")
    return name
