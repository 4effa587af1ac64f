"""A Python text as the rules see it: its tree, and what a run of it would do on each rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ast

    from rankwise.lint.code_unit import CodeUnit
    from rankwise.lint.interpreter.history import History
    from rankwise.lint.interpreter.values import Call
    from rankwise.lint.program import Module, Project


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """One way into the text: the program itself, or a function that it does not call.

    Attributes:
        name: ``the program``, or the function's or class's name.
        histories: What each of the virtual ranks did; only rank 0's where nothing asked for the rank.
    """

    name: str
    histories: tuple[History, ...]

    @property
    def is_program(self) -> bool:
        """Whether it is the text run as a program."""
        return self.name == "the program"


@dataclass(kw_only=True)
class Script:
    """One piece of Python and what was learned of it.

    Attributes:
        unit: The text.
        tree: Its syntax tree.
        module: The same as a module of the project.
        entries: What a run of it does, on each rank.
        notes: What was noticed by the way (`model.notes`).
        has_init: Whether the program makes a process group (or a framework does).
        memo: What rules have worked out and others may ask for.
        project: The modules beside it, and the files that what is found depends on.
    """

    unit: CodeUnit
    tree: ast.Module
    module: Module | None = None
    entries: list[Entry] = field(default_factory=list)
    notes: list[Any] = field(default_factory=list)
    has_init: bool = False
    memo: dict[str, Any] = field(default_factory=dict)
    project: Project

    @cached_property
    def all_calls(self) -> list[Call]:
        """Library calls of all entries, in order, each place once (as the first rank that comes there makes it)."""
        seen: set[tuple[int, str, str]] = set()
        calls = []
        for entry in self.entries:
            for history in entry.histories:
                for call in history.calls:
                    key = (id(call.node), call.name, entry.name)
                    if key not in seen:
                        seen.add(key)
                        calls.append(call)
        return calls

    @cached_property
    def calls(self) -> list[Call]:
        """As `all_calls`, only those that stand in this text, each place once."""
        seen: dict[tuple[int, str], Call] = {}
        for call in self.all_calls:
            if call.module is self.module:
                seen.setdefault((id(call.node), call.name), call)
        return list(seen.values())

    def calls_of(self, *names: str) -> list[Call]:
        """Calls in this text of one of these canonical names."""
        return [call for call in self.calls if call.name in names]
