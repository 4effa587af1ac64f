"""Ranks that have roles, such as servers of parameters and workers: who has which, and what a rank tells its launcher of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, final

from rankwise.base.requeue import write_note

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: How a launcher tells the ranks how many of each role there are.
COUNTS = "RANKWISE_ROLE_COUNTS"
#: How it tells a rank that ranks which die are started again alone: the exit code of the process before it, 0 if it is
#: the first.
RETURNS = "RANKWISE_RETURNS"
#: Lines in a rank's notes: it has joined without a group of all ranks, so that its death need not end the others; and:
#: it would.
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
        return f"{self.title} {self.index}"

    @property
    def title(self) -> str:
        """What people call it."""
        return "server" if self.name == "ps" else self.name


def read_counts(text: str) -> tuple[tuple[str, int], ...]:
    """Read ``ps=2,worker=6``; empty if it is empty or something else."""
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    return tuple((name, int(number)) for name, number in pairs) if all(one[1].isdigit() for one in pairs) else ()


def list_roles(counts: tuple[tuple[str, int], ...]) -> tuple[Role, ...]:
    """Return each rank's role: roles in the order given, a rank after the other."""
    return tuple(Role(name, index, size) for name, size in counts for index in range(size))


def are_spare(ranks: Iterable[int], roles: Sequence[Role]) -> bool:
    """Tell whether a job with servers continues without some ranks: workers, but not the first one, which may be the coordinator."""
    return all(rank < len(roles) and roles[rank].name == "worker" and roles[rank].index > 0 for rank in ranks)


#: Ranks in a sentence, without their roles yet: neither ``[rank 1]`` nor ``(rank 1)``.
_RANKS = re.compile(r"(?<![\w\[(-])rank(s?) (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)(?![-\w]|, \d| \()")
#: Lines of a report that are the script's own words.
_QUOTE = "    | "


def name_roles(text: str, roles: Sequence[Role]) -> str:
    """Return sentences about ranks with their roles: ``server 1 (rank 1)``, ``ranks 2-4 (workers 0-2)``.

    Args:
        text: Lines; those that quote the script stay.
        roles: Of all ranks; none where ranks have no roles.
    """
    if not roles:
        return text
    lines = text.split("\n")
    return "\n".join(
        line if line.startswith(_QUOTE) else _RANKS.sub(lambda found: _name(found, roles), line) for line in lines
    )


def _name(found: re.Match[str], roles: Sequence[Role]) -> str:
    ranks: list[int] = []
    for span in found[2].split(", "):
        first, _, last = span.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    if any(rank >= len(roles) for rank in ranks):
        return found[0]
    if not found[1]:
        return f"{roles[ranks[0]]} ({found[0]})" if len(ranks) == 1 else found[0]
    parts = []
    for title, group in groupby((roles[rank] for rank in ranks), key=lambda role: role.title):
        numbers = [role.index for role in group]
        is_span = len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1
        text = f"{numbers[0]}-{numbers[-1]}" if is_span else ", ".join(map(str, numbers))
        parts.append(f"{title}{'s' if len(numbers) > 1 else ''} {text}")
    return f"{found[0]} ({', '.join(parts)})"


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
