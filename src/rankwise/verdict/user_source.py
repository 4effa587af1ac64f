"""What the user's source says of where ranks stand: which conditions their lines are under, and which calls led there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, final

from rankwise.evidence.reader.notes import parse_traceback
from rankwise.verdict.guards import Guard, guards_at
from rankwise.verdict.source_text import are_alternatives, find_function, split_site

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.evidence.reader.scene import RankFacts


@final
class UserSource:
    """The user's files, and the ranks whose stacks lead through them."""

    def __init__(self, by_rank: Mapping[int, RankFacts], sources: Mapping[str, str]) -> None:
        self._by_rank, self._sources = by_rank, sources

    def are_alternatives(self, site: str | None, other: str | None) -> bool:
        """Tell whether two lines of the user's are arms of one condition: one place, written twice."""
        (file, line), (other_file, number) = split_site(site), split_site(other)
        return file == other_file and are_alternatives(self.text_of(file), line, number)

    def text_of(self, file: str) -> str:
        """Return the text of a file of the user's; nothing if it is not known."""
        return self._sources.get(file, "")

    def guards_at(self, site: str | None) -> tuple[Guard, ...]:
        """Return the conditions that a line of the user's stands under, innermost first."""
        file, line = split_site(site)
        return tuple(replace(guard, file=file) for guard in guards_at(self.text_of(file), line))

    def guards_where(self, rank: int, site: str | None) -> tuple[Guard, ...]:
        """Return the conditions that a collective of a rank stands under, innermost first: those of its callers, too, if they are known."""
        return tuple(guard for line in self.lines_where(rank, site) for guard in self.guards_at(line))

    def lines_where(self, rank: int, site: str | None) -> tuple[str, ...]:
        """Return the user's lines that led a rank to one of its collectives, innermost first: only the line itself if no more is known."""
        facts = self._by_rank.get(rank)
        raised = facts.fault.callstack if facts is not None and facts.fault else ""
        last = raised.rpartition("Traceback (most recent call last)")[2]
        for stack in (facts.stack if facts is not None else None, parse_traceback(last)):
            lines = [str(frame) for frame in stack.frames if frame.is_users] if stack else []
            if lines and lines[0] == site:
                return tuple(lines)
            # A line of the same function, a moment ago: most likely the same call of it.
            if lines and site and self._are_of_one_function(lines[0], site):
                return (site, *lines[1:])
        return (site,) if site else ()

    def _are_of_one_function(self, line: str, other: str) -> bool:
        (file, number), (other_file, other_number) = split_site(line), split_site(other)
        one, two = (find_function(self.text_of(file), at) for at in (number, other_number))
        return file == other_file and one is not None and two is not None and one.lineno == two.lineno

    def guards_of(self, rank: int) -> tuple[Guard, ...]:
        """Return the conditions that all of the user's lines on a rank's stack stand under, innermost first."""
        stack = self._by_rank[rank].stack
        sites = [str(frame) for frame in stack.frames if frame.is_users] if stack else []
        return tuple(guard for site in sites for guard in self.guards_at(site))
