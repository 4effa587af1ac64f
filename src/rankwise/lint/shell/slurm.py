"""What Slurm is asked for: by `#SBATCH` lines, and by the `srun` in front of a command."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.lint.finding import Span
from rankwise.lint.shell.launches import base_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.lint.shell.model import Launch
    from rankwise.lint.shell.words import Word

_LINE = re.compile(r"#SBATCH\s+(.*)")
_SHORT = {"-N": "nodes", "-n": "ntasks", "-c": "cpus-per-task", "-G": "gpus"}
#: Options of srun with their values, if these are known, and their words.
_Known = dict[str, tuple["str | None", "Word"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The `#SBATCH` lines of a script.

    Attributes:
        options: Long names without dashes, and their values.
        spans: Where each stands.
    """

    options: dict[str, str]
    spans: dict[str, Span]

    @property
    def is_batch(self) -> bool:
        """Whether there are such lines at all."""
        return bool(self.options)

    def number(self, name: str) -> int | None:
        """An option that is a number; of a range (``2-4``) the lower one."""
        text = self.options.get(name, "").partition("-")[0]
        return int(text) if text.isdecimal() else None

    @property
    def num_nodes(self) -> int | None:
        """Nodes of the job; None where the lines do not say, or not as a number."""
        return self.number("nodes")

    @property
    def num_tasks(self) -> int | None:
        """Tasks of the job, as a plain `srun` starts them."""
        if "ntasks" in self.options:
            return self.number("ntasks")
        per_node = self.number("ntasks-per-node")
        nodes = self.num_nodes if "nodes" in self.options else 1
        if "ntasks-per-node" in self.options:
            return None if per_node is None or nodes is None else per_node * nodes
        return nodes


def read_batch(lines: Sequence[str]) -> Batch:
    """Read the `#SBATCH` lines of a script."""
    options: dict[str, str] = {}
    spans: dict[str, Span] = {}
    for number, line in enumerate(lines, start=1):
        if not line.startswith("#SBATCH") or not (found := _LINE.match(line)):
            continue
        for name, value in _pairs(_split(found[1])):
            options[name] = value
            spans[name] = Span(number, 1, number, len(line.rstrip()) + 1)
    return Batch(options=options, spans=spans)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for number, word in enumerate(words):
        then = words[number + 1] if number + 1 < len(words) else ""
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            pairs.append((name, value if equals else "" if then.startswith("-") else then))
        elif word[:2] in _SHORT:
            pairs.append((_SHORT[word[:2]], word[2:].lstrip("=") or then))
    return pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """How `srun` or `mpirun` starts a command.

    Attributes:
        nodes: On how many nodes; None if that can't be told.
        tasks: How often in all; None if that can't be told.
        word: ``srun``.
        where: What asks for the number of tasks, if it is an option: its spelling and its place.
    """

    nodes: int | None
    tasks: int | None
    word: Word
    where: tuple[str, Span] | None = None

    @property
    def per_node(self) -> int | None:
        """Tasks on the fullest node."""
        if self.nodes is None or self.tasks is None or self.nodes < 1:
            return None
        return -(-self.tasks // self.nodes)


def tasks_of(launch: Launch, batch: Batch) -> Tasks | None:
    """How often a launch is started by the `srun` in front of it; None where there is none."""
    at = next((number for number, word in enumerate(launch.wraps) if base_name(word) == "srun"), None)
    if at is None:
        return None
    words = launch.wraps[at:]
    is_sure = not any(word.is_open or word.text is None for word in words[1:])
    known: _Known = {name: (value, word) for name, value, word in _options(words) if is_sure or value is not None}
    nodes = _number(known, "nodes", batch.num_nodes if "nodes" in batch.options else (1 if batch.is_batch else None))
    if "ntasks" in known:
        return Tasks(nodes=nodes, tasks=_number(known, "ntasks", None), word=words[0], where=_where(known, "ntasks"))
    if "ntasks-per-node" in known:
        each = _number(known, "ntasks-per-node", None)
        tasks = each * nodes if each and nodes else None
        return Tasks(nodes=nodes or 1, tasks=tasks or each, word=words[0], where=_where(known, "ntasks-per-node"))
    if not is_sure:
        return Tasks(nodes=nodes, tasks=None, word=words[0])
    asked = next((name for name in ("ntasks", "ntasks-per-node") if name in batch.options), None)
    where = (f"#SBATCH --{asked}", batch.spans[asked]) if asked else None
    if asked is None:
        return Tasks(nodes=nodes, tasks=nodes, word=words[0])
    tasks = batch.num_tasks
    if "nodes" in known and asked == "ntasks-per-node" and nodes and (each := batch.number(asked)):
        tasks = nodes * each
    return Tasks(nodes=nodes, tasks=tasks, word=words[0], where=where)


def _options(words: Sequence[Word]) -> list[tuple[str, str | None, Word]]:
    found: list[tuple[str, str | None, Word]] = []
    for number, word in enumerate(words):
        head, then = word.head, words[number + 1].text if number + 1 < len(words) else None
        if head.startswith("--"):
            name, equals, value = head[2:].partition("=")
            found.append((name, (value if word.text is not None else None) if equals else then, word))
        elif head[:2] in _SHORT:
            found.append((_SHORT[head[:2]], head[2:].lstrip("=") or then, word))
    return found


def _number(known: _Known, name: str, default: int | None) -> int | None:
    if name not in known:
        return default
    text = (known[name][0] or "").partition("-")[0]
    return int(text) if text.isdecimal() else None


def _where(known: _Known, name: str) -> tuple[str, Span]:
    return f"srun --{name}", known[name][1].span
