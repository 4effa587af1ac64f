"""How `rankwise check` tells what it has found."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING

from rankwise.base.errors import UsageError
from rankwise.base.files import write_atomic
from rankwise.base.terminal import has_colour, width
from rankwise.cli.printing import put
from rankwise.lint.registry import all_rules
from rankwise.lint.reporters import render
from rankwise.lint.running.shown_lines import lines_reader

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping

    from rankwise.lint.finding import Finding
    from rankwise.lint.running.files import Outcome

_FOR_PEOPLE = ("text", "concise")


def show(args: argparse.Namespace, outcome: Outcome, given: Mapping[str, bytes]) -> int:
    """Print what was found; return the exit code.

    Args:
        args: The flags.
        outcome: What was found.
        given: Texts that are no files, by name.

    Raises:
        UsageError: The output file can't be written.
    """
    for line in outcome.notes:
        if not args.quiet:
            print(f"rankwise: note: {line}", file=sys.stderr)
    for line in outcome.failures:
        print(f"rankwise: error: {line}", file=sys.stderr)
    if not (outcome.num_files or outcome.failures):
        print(f"rankwise: no file to check in {' '.join(args.paths) or '.'}", file=sys.stderr)
    texts = {name: data.decode("utf-8", "replace") for name, data in given.items()}
    text = render(
        outcome.findings,
        args.format,
        lines_of=lines_reader(texts | _command_text(args.command)),
        color=args.output_file is None and has_colour(1),
        width=None if args.output_file else width(1),
    )
    # Of what was not checked nobody knows whether there are findings.
    is_whole = outcome.num_checked > 0 and not outcome.failures
    if args.format in _FOR_PEOPLE and not outcome.findings and (args.quiet or not is_whole):
        text = ""
    if args.statistics:
        text += _count(outcome.findings) if args.format in _FOR_PEOPLE else ""
    _put(args, text)
    return 0 if args.exit_zero and outcome.exit_code == 1 else outcome.exit_code


def _put(args: argparse.Namespace, text: str) -> None:
    if args.output_file is not None:
        try:
            write_atomic(args.output_file, text)
        except OSError as error:
            raise UsageError(f"--output-file {args.output_file}: {error.strerror}") from None
        return
    put(text)


def _command_text(command: list[str]) -> dict[str, str]:
    if not command:
        return {}
    from rankwise.lint.shell.study import unit_of_command  # noqa: PLC0415 - only where there is one

    return {"<command>": unit_of_command(command).code}


def _count(findings: Iterable[Finding]) -> str:
    names = {rule.id: rule.name for rule in all_rules()}
    counts = Counter(one.rule for one in findings)
    return "".join(f"{number:6}  {rule}  {names.get(rule, '')}\n" for rule, number in counts.most_common())
