"""`rankwise doctor`: is it the host, the network, the variables? On one host, or on several at once."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from rankwise.base import terminal
from rankwise.base.environ import environ
from rankwise.base.errors import UsageError
from rankwise.base.files import write_atomic
from rankwise.cli.doctor_flags import build_parser, check_flags, read_hostfile
from rankwise.cli.doctor_hosts import look
from rankwise.cli.doctor_ssh import look_over_ssh
from rankwise.cli.printing import put
from rankwise.cli.probe import list_probes
from rankwise.doctor import registry
from rankwise.doctor.examine import mask_reading
from rankwise.doctor.meeting.together_json import to_json
from rankwise.doctor.probe import TOPICS
from rankwise.doctor.reading import find_worst
from rankwise.doctor.reporters import page, text
from rankwise.doctor.reporters.grouping import count_verdicts, list_readings
from rankwise.doctor.variables.masking import make_mask

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rankwise.doctor.meeting.together import Together
    from rankwise.doctor.probe import Probe


def main(argv: Sequence[str]) -> int:
    """Look, judge, show; return the exit code."""
    parser = build_parser()
    args = parser.parse_args(list(argv))
    check_flags(args, parser)
    probes = choose_probes(args.only, args.skip)
    if args.list:
        put("\n".join((*list_probes(probes), "")))
        return 0
    hosts = args.hosts or (read_hostfile(args.hostfile) if args.hostfile else ())
    seen = (look_over_ssh(args, probes, argv, hosts), True) if hosts else look(args, probes)
    if seen is None:
        return 0  # another process of this host takes part
    told, is_teller = seen
    # The probes' readings are masked where they were made; a meeting's tell of addresses that came from the environment.
    mask = make_mask(environ())
    together = replace(told, readings=tuple(mask_reading(one, mask) for one in told.readings))
    _show(args, together, is_teller=is_teller)
    return exit_code(together, strict=args.strict)


def choose_probes(only: Sequence[str], skip: Sequence[str]) -> tuple[Probe, ...]:
    """Return the probes that were asked for, by ids or topics.

    Raises:
        UsageError: There is no such probe, or none is left.
    """
    chosen = tuple(one for one in registry.all_probes() if not only or one in _find(only))
    left = tuple(one for one in chosen if one not in _find(skip))
    if not left:
        raise UsageError("--skip leaves no probe", hint="`rankwise doctor --list` lists all of them")
    return left


def _find(words: Sequence[str]) -> set[Probe]:
    found: set[Probe] = set()
    for word in words:
        topic = next((one for one in TOPICS if one == word.lower()), None)
        found |= (
            {one for one in registry.all_probes() if one.topic == topic} if topic else {registry.probe(word)}
        )
    return found


def exit_code(together: Together, *, strict: bool) -> int:
    """Return what the command exits with."""
    worst = find_worst(list_readings(together))
    return int(worst == "fail" or bool(together.missing) or (strict and worst == "warn"))


def _show(args: argparse.Namespace, together: Together, *, is_teller: bool) -> None:
    if args.html is not None and is_teller:
        made = datetime.now(tz=timezone.utc).astimezone().strftime("%Y-%m-%d %H:%M %Z")
        write_atomic(args.html, page.render(together, made=made))
    if not is_teller:
        first = together.hosts[0].name if together.hosts else "the first host"
        counts = count_verdicts(list_readings(together))
        print(f"rankwise doctor: {counts}; the whole report stands on {first}", file=sys.stderr)
    elif args.format == "json":
        put(json.dumps(to_json(together), indent=1) + "\n")
    else:
        color, width = terminal.has_colour(1), terminal.width(1)
        put(text.render(together, color=color, width=width, verbose=args.verbose, quiet=args.quiet) + "\n")
