"""`rankwise doctor`: is it the host, the network, the variables? On one host, or on several at once."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import datetime, timezone
from itertools import groupby
from typing import TYPE_CHECKING

from rankwise.base import __version__, terminal
from rankwise.base.environ import environ
from rankwise.base.errors import UsageError
from rankwise.cli.doctor_flags import build_parser, check_flags, read_hostfile, read_token
from rankwise.cli.doctor_hosts import look
from rankwise.cli.doctor_ssh import look_over_ssh
from rankwise.cli.printing import put
from rankwise.doctor import registry
from rankwise.doctor.reporters import text
from rankwise.doctor.reporters.grouping import count_verdicts, judge, list_readings
from rankwise.doctor.reporters.record import record
from rankwise.doctor.units import align
from rankwise.doctor.variables.masking import make_mask, mask_reading

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from rankwise.doctor.multi_host.cluster_report import ClusterReport
    from rankwise.doctor.probe import Probe


def main(argv: Sequence[str]) -> int:
    """Look, judge, show; return the exit code."""
    parser = build_parser()
    args = parser.parse_args(list(argv))
    check_flags(args, parser)
    probes = choose_probes(args.only, args.skip)
    if args.list:
        put(terminal.wrap("\n".join((*list_probes(probes), "")), terminal.width(1)))
        return 0
    if args.token_file is not None:
        args.token = read_token(args.token_file)
    hosts = args.hosts or (read_hostfile(args.hostfile) if args.hostfile else ())
    seen = (look_over_ssh(args, probes, argv, hosts), True) if hosts else look(args, probes)
    if seen is None:
        return 0  # another process of this host takes part
    found, is_teller = seen
    # The probes' readings are masked where they were made; a rendezvous's tell of addresses that came from the
    # environment.
    mask = make_mask(environ())
    report = replace(found, readings=tuple(mask_reading(one, mask) for one in found.readings))
    _show(args, report, is_teller=is_teller)
    return exit_code(report, strict=args.strict)


def choose_probes(only: Sequence[str], skip: Sequence[str]) -> tuple[Probe, ...]:
    """Return the probes that were asked for, by ids or topics.

    Raises:
        UsageError: There is no such probe, or none is left.
    """
    wanted = {one for word in only for one in registry.choose(word)}
    unwanted = {one for word in skip for one in registry.choose(word)}
    left = tuple(one for one in registry.all_probes() if (not only or one in wanted) and one not in unwanted)
    if not left:
        raise UsageError("--skip leaves no probe", hint="`rankwise doctor --list` lists all of them")
    return left


def list_probes(probes: Sequence[Probe]) -> Iterator[str]:
    """Return a table of probes by topic, as lines."""
    rows = [(one.id, ", ".join(one.classes) or "-", one.title) for one in probes]
    head, *lines = align([("probe", "class", "what it looks at"), *rows])
    yield head
    for topic, found in groupby(zip(probes, lines, strict=True), key=lambda each: each[0].topic):
        yield from ("", topic)
        yield from (line for _, line in found)
    yield from ("", "`rankwise rule PROBE` explains one of them")


def exit_code(report: ClusterReport, *, strict: bool) -> int:
    """Return what the command exits with."""
    worst = judge(report)
    return int(worst == "fail" or (strict and worst == "warn"))


def _show(args: argparse.Namespace, report: ClusterReport, *, is_teller: bool) -> None:
    if not is_teller:
        first = report.hosts[0].name if report.hosts else "the first host"
        counts = count_verdicts(list_readings(report))
        print(f"rankwise doctor: {counts}; the whole report is on {first}", file=sys.stderr)
        return
    if args.format == "json":
        code, now = exit_code(report, strict=args.strict), datetime.now(tz=timezone.utc)
        found = record(report, version=__version__, made=f"{now:%Y-%m-%dT%H:%M:%SZ}", exit_code=code)
        put(json.dumps(found, indent=1) + "\n")
    else:
        color, width = terminal.has_colour(1), terminal.width(1)
        put(text.render(report, color=color, width=width, verbose=args.verbose, quiet=args.quiet) + "\n")
