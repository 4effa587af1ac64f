"""From a piece of shell text to what is known of it: `study_shell`."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.errors import UsageError
from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.finding import Edit, Span
from rankwise.lint.shell.launches import read_launch
from rankwise.lint.shell.model import Reading
from rankwise.lint.shell.slurm import Batch, read_batch
from rankwise.lint.shell.source import whole_source
from rankwise.lint.shell.walk import Walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tree_sitter import Parser

    from rankwise.lint.shell.model import Launch
    from rankwise.lint.shell.words import Word

#: ``<NUM_GPUS>`` in a page is a gap to fill, and no redirection.
_GAP = re.compile(r"(?<![<\w\d&])<([A-Za-z][\w .:/|-]{0,60}?)>(?![>&(])")
_NOT_IN_A_NAME = re.compile(r"\W", re.ASCII)


@dataclass(kw_only=True)
class Shell:
    """One piece of shell text and what was learned of it.

    Attributes:
        unit: The text.
        reading: Its commands and its variables, in the order in which they run.
        batch: Its `#SBATCH` lines.
        has_errors: Whether the parser stumbled.
    """

    unit: CodeUnit
    reading: Reading
    batch: Batch
    has_errors: bool

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """The commands that start ranks, or Python scripts, in order; a loop that is known gives one each turn."""
        found = (read_launch(command) for command in self.reading.commands if not command.is_doubtful)
        return tuple(launch for launch in found if launch is not None)

    @property
    def is_script(self) -> bool:
        """Whether it is a whole script, whose commands run one after the other on one host."""
        return not self.unit.is_fragment and self.unit.path != "<command>"

    def is_named(self, name: str) -> bool:
        """Whether the text itself has a variable of this name."""
        return name in self.reading.assigned or any(name == one.name for one in self.reading.references)

    def knows(self, launch: Launch, name: str) -> bool | None:
        """Whether the script that a launch names speaks of an option; None if it is not found beside this text."""
        text = launch.script.text if launch.script else None
        if text is None or launch.flag("module") or not text.endswith(".py"):
            return None
        folder = Path(self.unit.path).parent
        for file in (folder / text, folder.parent / text, Path(text)):
            try:
                return name in file.read_text(errors="replace").replace("-", "_")
            except OSError:
                continue
        return None

    def scripts(self) -> list[tuple[str, tuple[str, ...]]]:
        """Python files that its launches name, each with the known arguments that it gets."""
        found: dict[str, tuple[str, ...]] = {}
        for launch in self.launches:
            text = launch.script.text if launch.script else None
            if text and text.endswith(".py") and not launch.flag("module"):
                found.setdefault(text, tuple(word.text for word in launch.args if word.text is not None))
        return list(found.items())


def typed(word: Word, old: str, new: str) -> tuple[Edit, ...]:
    """The edit that puts ``new`` in the place of the beginning ``old`` of a word, where that is what is typed."""
    if not word.is_typed or not word.raw.startswith(old) or "\n" in word.raw:
        return ()
    span = word.span
    return (Edit(span=Span(span.line, span.col, span.line, span.col + len(old)), text=new),)


def study_shell(unit: CodeUnit) -> Shell:
    """Read a piece of shell text.

    Raises:
        UsageError: The parser is not installed.
    """
    parser = _parser()
    text = _GAP.sub(_filled, "\n".join(unit.lines))
    source = whole_source(text)
    root = parser.parse(source.data).root_node
    batch = read_batch(unit.lines)
    reading = Reading()
    walk = Walk(source=source, parser=parser, reading=reading)
    for name, number in (
        ("SLURM_NNODES", batch.num_nodes),
        ("SLURM_JOB_NUM_NODES", batch.num_nodes),
        ("SLURM_NTASKS", batch.num_tasks if "ntasks" in batch.options or "ntasks-per-node" in batch.options else None),
        ("SLURM_NTASKS_PER_NODE", batch.number("ntasks-per-node")),
    ):
        if number is not None:
            walk.variables[name] = (str(number),)
    walk.run(root)
    return Shell(unit=unit, reading=reading, batch=batch, has_errors=root.has_error)


def unit_of_command(argv: Sequence[str]) -> CodeUnit:
    """A command as the user typed it, split by their shell, as a piece to check."""
    # One word with blanks is a whole line that was quoted.
    is_line = len(argv) == 1 and len(argv[0].split()) > 1
    return CodeUnit(path="<command>", language="shell", code=argv[0] if is_line else shlex.join(argv), is_fragment=True)


def _filled(found: re.Match[str]) -> str:
    """A variable in the place of a gap, as long as the gap."""
    return f"${_NOT_IN_A_NAME.sub('_', found[1])}_"


@cache
def _parser() -> Parser:
    try:
        tree_sitter = import_module("tree_sitter")
        grammar = import_module("tree_sitter_bash")
    except ImportError as error:
        raise UsageError(
            f"shell scripts and commands can't be checked: {error.name} is not installed",
            hint="pip install tree-sitter tree-sitter-bash",
        ) from error
    try:
        parser: Parser = tree_sitter.Parser(tree_sitter.Language(grammar.language()))
    except ValueError as error:
        from importlib.metadata import version  # noqa: PLC0415 - it takes a while to import

        versions = " and ".join(f"{name} {version(name)}" for name in ("tree-sitter", "tree-sitter-bash"))
        raise UsageError(
            f"shell scripts and commands can't be checked: {versions} do not fit together ({error})",
            hint="pip install --upgrade tree-sitter tree-sitter-bash",
        ) from error
    return parser
