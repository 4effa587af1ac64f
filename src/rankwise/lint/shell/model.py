"""What is known of a shell text: its commands, and the launches among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.lint.finding import Span
    from rankwise.lint.shell.source import Source
    from rankwise.lint.shell.words import Word

_ELSEWHERE = frozenset(
    [
        "srun",
        "ssh",
        "pdsh",
        "mpirun",
        "mpiexec",
        "mpiexec.hydra",
        "clush",
        "pssh",
        "parallel-ssh",
        "parallel",
        "kubectl",
        "ibrun",
        "jsrun",
        "aprun",
        "prun",
        "orterun",
        "flux",
        "gcloud",
        "blaunch",
        "cat",
        "tee",
        "sbatch",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A variable that is given a value.

    Attributes:
        name: The variable.
        value: What it is set to.
        span: The assignment.
        is_exported: Whether child processes see it.
    """

    name: str
    value: Word
    span: Span
    is_exported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A simple command.

    Attributes:
        words: The command and its arguments, expanded.
        span: From the first word to the last.
        env: Variables that it sees, as far as this text sets them.
        is_background: Whether the shell goes on without waiting for it.
        arms: For each ``if`` and ``case`` around it (by a number) the arm in which it stands.
        under: Commands that get this one as text, outermost first: ``ssh host "…"``, ``srun bash -c "…"``.
        in_function: Whether it stands in a function, which runs when it is called.
        in_open_loop: Whether it stands in a loop of unknown length.
        is_doubtful: Whether the parser stumbled over it.
    """

    words: tuple[Word, ...]
    span: Span
    env: Mapping[str, Setting]
    is_background: bool = False
    arms: tuple[tuple[int, int], ...] = ()
    under: tuple[Command, ...] = ()
    in_function: bool = False
    in_open_loop: bool = False
    is_doubtful: bool = False

    def excludes(self, other: Command) -> bool:
        """Whether the two stand in different arms of one ``if``, so that only one of them runs."""
        mine = dict(self.arms)
        return any(mine.get(number, arm) != arm for number, arm in other.arms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag of a launcher.

    Attributes:
        name: Its name in the launcher's table (``nproc_per_node``), or as typed if it has none.
        word: The word that holds it.
        spelled: The flag in that word, without its value.
        value: Its value; None if it has none, or if it is missing.
        is_known: Whether the launcher has such a flag.
    """

    name: str
    word: Word
    spelled: str
    value: Word | None
    is_known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command that starts ranks, or could.

    Attributes:
        launcher: ``torchrun``, ``launch`` (torch.distributed.launch), ``rankwise``, ``accelerate``, ``deepspeed``,
            or ``python`` for a script that is started without a launcher.
        command: The command that it was read from.
        at: Which of its words is the launcher.
        wraps: Words in front of the launcher (``srun …``, ``nohup``), those of ``command.under`` too.
        flags: Flags before the script, as typed.
        script: What is run; None if it is not there, or can't be told.
        args: Words behind the script.
        is_partial: Whether words that only the run knows may hold more flags, or the script.
        is_ended: Whether ``--`` says where the launcher's flags end.
    """

    launcher: str
    command: Command
    at: int
    wraps: tuple[Word, ...]
    flags: tuple[Flag, ...] = ()
    script: Word | None = None
    args: tuple[Word, ...] = ()
    is_partial: bool = False
    is_ended: bool = False

    def flag(self, *names: str) -> Flag | None:
        """The last flag of one of these names: the one that counts."""
        return next((flag for flag in reversed(self.flags) if flag.is_known and flag.name in names), None)

    def value(self, *names: str) -> str | None:
        """The value of a flag, if it is given and known."""
        flag = self.flag(*names)
        return flag.value.text if flag and flag.value else None

    @property
    def label(self) -> str:
        """The launcher as people write it."""
        return {
            "launch": "torch.distributed.launch",
            "rankwise": "rankwise run",
            "accelerate": "accelerate launch",
        }.get(self.launcher, self.launcher)

    @property
    def is_static(self) -> bool:
        """Whether nodes meet at a fixed address under fixed numbers: the default."""
        if self.flag("standalone") or "PET_RDZV_BACKEND" in self.command.env:
            return False
        return self.flag("rdzv_backend") is None or self.value("rdzv_backend") == "static"

    def runs_elsewhere(self) -> bool:
        """Whether a program in front of it may start it on other hosts."""
        return any((word.text or "").rsplit("/", 1)[-1] in _ELSEWHERE for word in self.wraps)

    @property
    def word(self) -> Word:
        """The launcher's word."""
        return self.command.words[self.at]

    @property
    def is_elastic(self) -> bool:
        """Whether it takes torchrun's flags."""
        return self.launcher in {"torchrun", "launch", "rankwise"}

    @property
    def is_unclear(self) -> bool:
        """Whether a flag that is not seen may be given after all: by a variable, or misspelt."""
        return self.is_partial or any(not flag.is_known for flag in self.flags)

    @property
    def num_nodes(self) -> int | None:
        """How many nodes at least; None if that can't be told."""
        names = ("nnodes", "num_machines", "num_nodes")
        flag = self.flag(*names)
        if flag is None:
            return None if self.is_unclear or self.launcher in {"accelerate", "python"} else self._from_env()
        text = self.value(*names)
        low = text.partition(":")[0] if text else ""
        return int(low) if low.isdecimal() else None

    def _from_env(self) -> int | None:
        setting = self.command.env.get("PET_NNODES")
        if setting is None or not self.is_elastic:
            return 1
        low = (setting.value.text or "").partition(":")[0]
        return int(low) if low.isdecimal() else None

    @property
    def num_per_node(self) -> int | None:
        """How many ranks on each node; None if that can't be told."""
        text = self.value("nproc_per_node", "num_gpus")
        if text is not None:
            return int(text) if text.isdecimal() else None
        given = self.flag("nproc_per_node", "num_gpus") or "PET_NPROC_PER_NODE" in self.command.env
        return 1 if self.is_elastic and not self.is_unclear and not given else None


@dataclass(frozen=True, slots=True)
class Reference:
    """A place where the text uses a variable."""

    name: str
    source: Source
    start: int
    end: int

    @property
    def span(self) -> Span:
        """Where the name stands."""
        return self.source.span(self.start, self.end)


@dataclass(slots=True)
class Reading:
    """What the walk through a text has collected."""

    commands: list[Command] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    assigned: dict[str, int] = field(default_factory=dict)
