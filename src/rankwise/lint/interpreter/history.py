"""What one virtual rank did, in order: collectives, undecided branches, loops, calls of the user's functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterable, Iterator

    from rankwise.lint.interpreter.values import Call, Function, Guard, Value
    from rankwise.lint.program import Module

ExitKind = Literal["return", "continue", "break", "raise", "exit"]


@dataclass(frozen=True, slots=True)
class Exit:
    """Where a path leaves a loop, a function or the program."""

    kind: ExitKind
    node: ast.AST
    module: Module
    guards: tuple[Guard, ...] = ()


@dataclass(frozen=True, slots=True)
class Op:
    """Something that ranks do together: all that take part must reach it.

    Attributes:
        family: Ops of one family can meet each other: ``barrier``, ``collective``, ``backward``, ``forward``,
            ``state``, ``wrap``, ``group``, ``point`` (to and from one peer).
        name: For messages and for the comparison of what meets what.
        call: The call that does it.
        is_sure: Whether it is certain that it waits for the others.
        in_group: Whether it is for a group other than all ranks.
        waits_for_all: Whether uneven numbers of it are taken care of (`join`).
    """

    family: str
    name: str
    call: Call
    is_sure: bool = True
    in_group: bool = False
    is_joined: bool = False


@dataclass(slots=True)
class Arm:
    """One way through a branch that is not decided."""

    label: str
    items: list[Item] = field(default_factory=list)
    exit: Exit | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """A branch that is not decided by who the rank is.

    Attributes:
        node: The test, the `try`, or the `match`.
        value: What the test gave.
        arms: The ways through it; an empty arm where there is no `else`.
    """

    node: ast.AST
    module: Module
    value: Value
    arms: tuple[Arm, ...]
    kind: Literal["if", "except", "finally", "match"] = "if"
    guards: tuple[Guard, ...] = ()


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop; its items are those of one turn. ``turns`` is how many turns it makes, where that is known."""

    node: ast.AST
    module: Module
    value: Value
    items: list[Item]
    turns: int | None = None
    guards: tuple[Guard, ...] = ()


@dataclass(frozen=True, slots=True)
class Inline:
    """A call of a function of the user's, and what it did."""

    node: ast.AST
    module: Module
    function: Function
    items: list[Item]


Item = Op | Fork | Loop | Inline | Exit


def walk(items: Iterable[Item]) -> Iterator[Item]:
    """Items and all that is in them, in the order of the run; branches that were not decided one after the other."""
    waiting = list(items)[::-1]
    while waiting:
        item = waiting.pop()
        yield item
        if isinstance(item, (Loop, Inline)):
            waiting += item.items[::-1]
        elif isinstance(item, Fork):
            for arm in item.arms[::-1]:
                waiting += arm.items[::-1]


@dataclass(slots=True)
class History:
    """All that one rank did from one entry of the program on; ``is_cut`` if there was too much of it to see all.

    ``loops`` are all loops, each with those around it; among the items are only those in which something is done
    together.
    """

    rank: int
    entry: str
    is_cut: bool = False
    items: list[Item] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    loops: list[tuple[tuple[ast.AST, ...], Loop]] = field(default_factory=list)
