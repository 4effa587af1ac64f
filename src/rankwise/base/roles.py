"""Ranks that have roles, such as servers of parameters and workers: who has which, and what a rank tells its launcher of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rankwise.base.requeue import write_note

#: How a launcher tells the ranks how many of each role there are.
COUNTS = "RANKWISE_ROLE_COUNTS"
#: Lines in a rank's notes: it has joined without a group of all ranks, so that its death need not end the others; and: it would.
_APART, _NEEDED = b'{"note": "apart"}\n', b'{"note": "needed"}\n'


@final
@dataclass(frozen=True, slots=True)
class Role:
    """The role of one rank.

    Attributes:
        name: As in ``--role-counts``.
        index: Which one of this role it is, from 0.
        size: How many have it.
    """

    name: str
    index: int
    size: int

    def __str__(self) -> str:
        return f"{'server' if self.name == 'ps' else self.name} {self.index}"


def read_counts(text: str) -> tuple[tuple[str, int], ...]:
    """Read ``ps=2,worker=6``; empty if it is empty or something else."""
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    return (
        tuple((name, int(number)) for name, number in pairs) if all(one[1].isdigit() for one in pairs) else ()
    )


def list_roles(counts: tuple[tuple[str, int], ...]) -> tuple[Role, ...]:
    """Return each rank's role: roles in the order given, a rank after the other."""
    return tuple(Role(name, index, size) for name, size in counts for index in range(size))


def note_apart() -> None:
    """Tell the launcher, if it is ours, that this rank may be started again alone."""
    write_note(_APART)


def note_needed() -> None:
    """Tell it that the job can't go on without this process."""
    write_note(_NEEDED)


def is_apart(notes: str) -> bool:
    """Tell from a rank's notes whether it has joined without a group of all ranks."""
    return _APART.decode() in notes


def is_needed(notes: str) -> bool:
    """Tell from a rank's notes whether its death ends the job."""
    return _NEEDED.decode() in notes
