"""`rankwise probe hostname`: the page of one probe of the doctor; and the list of all."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rankwise.base import terminal
from rankwise.base.flags import Parser
from rankwise.cli.printing import put
from rankwise.cli.prose import page_width, write_page
from rankwise.doctor import registry
from rankwise.doctor.units import align

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.doctor.probe import Probe


def main(argv: Sequence[str]) -> int:
    """Show the page of one probe; return the exit code."""
    parser = Parser(
        prog="rankwise probe",
        description="Explain a probe of `rankwise doctor`: what it looks at, why, and how to fix it.",
    )
    parser.add_argument("probe", metavar="PROBE", help="Its id: hostname; `rankwise doctor --list` lists all.")
    args = parser.parse_args(list(argv))
    one = registry.probe(args.probe)
    classes = f"; class {', '.join(one.classes)}" if one.classes else ""
    lines = write_page(registry.page(one), width=page_width(), color=terminal.has_colour(1))
    put(f"{one.id}: {one.title} ({one.topic}{classes})\n\n" + "\n".join(lines).rstrip() + "\n")
    return 0


def list_probes(probes: Sequence[Probe]) -> Iterator[str]:
    """Return a table of probes by topic, as lines."""
    rows = [(one.id, ", ".join(one.classes) or "-", one.title) for one in probes]
    head, *lines = align([("probe", "class", "what it looks at"), *rows])
    yield head
    for topic, found in groupby(zip(probes, lines, strict=True), key=lambda each: each[0].topic):
        yield from ("", topic)
        yield from (line for _, line in found)
    yield from ("", "`rankwise probe ID` explains one of them")
