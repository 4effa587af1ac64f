"""`rankwise check`: find the mistakes of a distributed program in its text, before it runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.cli.check_flags import find_cache_folder, find_settings, read_command
from rankwise.cli.check_output import show
from rankwise.lint.inputs.reading import decide_kind
from rankwise.lint.running.files import Outcome, Plan, check_files, check_text, merge

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rankwise.lint.finding import Finding
    from rankwise.lint.running.settings import Settings


def main(argv: Sequence[str]) -> int:
    """Check what is named, show what was found; return 0 if nothing was, 1 if something was, 2 if it can't be done."""
    args = read_command(argv)
    given = _read_stdin(args) if args.paths == ["-"] else {}
    settings = find_settings(args)
    outcome = _check(args, settings, given)
    if args.fix or args.diff:
        from rankwise.lint.running.text_edits import diff, mend_files, write  # noqa: PLC0415 - few runs mend anything

        mended = list(mend_files(outcome.findings, settings))
        if args.diff:
            print("".join(diff(one) for one in mended), end="")
            return 1 if mended else 2 * bool(outcome.failures)
        for one in mended:
            write(one)
        outcome = _check(args, settings, given) if mended else outcome
    return show(args, outcome, given)


def _read_stdin(args: argparse.Namespace) -> dict[str, bytes]:
    """The text on standard input by its name; one that was given no name gets that of its first line's language."""
    data = sys.stdin.buffer.read()
    if args.stdin_filename is None:
        return {"stdin.sh" if decide_kind("stdin", data[:4096]) == "shell" else "stdin.py": data}
    return {args.stdin_filename: data}


def _check(args: argparse.Namespace, settings: Settings, given: dict[str, bytes]) -> Outcome:
    if args.command:
        from rankwise.lint.running.command import check_command  # noqa: PLC0415 - the shell's parser is an extra

        found = check_command(args.command, settings)
        return merge(found, check_files(args.paths, settings, _plan(args, settings))) if args.paths else found
    if given:
        ((path, data),) = given.items()
        found = check_text(path, data, settings)
        return found if args.stdin_filename else replace(found, findings=tuple(map(_name_flag, found.findings)))
    return check_files(args.paths or ["."], settings, _plan(args, settings))


def _name_flag(one: Finding) -> Finding:
    """Say of a text that is no Python how it is told to be another language."""
    if one.rule != "RW901":
        return one
    return replace(one, fix=f"{one.fix}; a shell script needs `--stdin-filename x.sh`")


def _plan(args: argparse.Namespace, settings: Settings) -> Plan:
    return Plan(jobs=args.jobs, cache_folder=find_cache_folder(args, settings))
