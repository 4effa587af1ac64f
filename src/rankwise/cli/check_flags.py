"""The flags of `rankwise check`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.errors import UsageError
from rankwise.base.flags import Parser
from rankwise.lint.registry import all_rules
from rankwise.lint.reporters import FORMATS
from rankwise.lint.running.settings import (
    Settings,
    check_selectors,
    load_settings,
    load_settings_file,
    override,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_USAGE = "rankwise check [flags] [FILE or FOLDER …] [-- torchrun … train.py …]"
_EPILOG = (
    "Looks at Python, notebooks, shell scripts and the fenced code of Markdown pages; runs none of it. "
    "After -- comes a command as you would type it. A line is silenced by `# noqa: RW101`, a file by `# rankwise: noqa`; "
    "a project's settings are in [tool.rankwise.check] of its pyproject.toml. "
    "Exit codes: 0 clean; 1 errors or warnings; 2 the check could not run."
)


def read_command(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; what stands behind ``--`` is ``command``.

    Raises:
        UsageError: It is wrong.
    """
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    args = _build_parser().parse_args(words[:at])
    args.command = words[at + 1 :]
    if at < len(words) and not args.command:
        raise UsageError("there is no command after --", hint="rankwise check -- torchrun train.py")
    if "-" in args.paths and (len(args.paths) > 1 or args.command or args.fix or args.diff):
        raise UsageError("- must stand alone: standard input is checked by itself, and not fixed")
    return args


def find_settings(args: argparse.Namespace) -> Settings:
    """Return the settings of the project, with the flags over them.

    Raises:
        UsageError: One of both is wrong.
    """
    first = Path(args.paths[0]) if args.paths and args.paths != ["-"] else Path(args.stdin_filename or "stdin")
    start = first if first.is_dir() else first.parent
    if args.isolated:
        found = Settings()
    else:
        found = load_settings(start) if args.config is None else load_settings_file(args.config)
    settings = override(
        found,
        select=_split(args.select),
        ignore=_split(args.ignore),
        extend_select=_split(args.extend_select),
        severity=args.severity,
    )
    check_selectors(settings, all_rules())
    return settings


def find_cache_folder(args: argparse.Namespace, settings: Settings) -> Path | None:
    """Where results are kept; None where they are not."""
    if args.no_cache:
        return None
    return args.cache_dir or settings.folder / ".rankwise_cache"


def _split(values: Sequence[str]) -> list[str]:
    return [word for value in values for word in value.replace(",", " ").split()]


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of processes, 0 for as many as fit")
    return min(int(text), os.cpu_count() or 1)


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "rankwise check", usage=_USAGE, description="Find bugs of distributed programs before they run.", epilog=_EPILOG
    )
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help="files, folders, or - for standard input (default: .)")
    for flag, text in (
        ("--select", "show these only"),
        ("--ignore", "do not show these"),
        ("--extend-select", "show these too"),
    ):
        add(
            flag,
            action="append",
            default=[],
            metavar="RULE,…",
            help=f"{text}: RW101, RW1, a rule's name, ALL",
        )
    add("--severity", choices=("error", "warning", "hint"), help="lowest severity to show (default: warning)")
    add("--format", choices=FORMATS, default="text", help="output format (default: text)")
    add("--output-file", "-o", type=Path, metavar="FILE", help="write findings to this file")
    add("--fix", action="store_true", help="fix what can be fixed safely")
    add("--diff", action="store_true", help="show what --fix would change, without changing it")
    add("--statistics", action="store_true", help="count the findings of each rule")
    add("--exit-zero", action="store_true", help="exit with 0 even if something was found")
    add("--quiet", "-q", action="store_true", help="print findings only")
    add("--config", type=Path, metavar="FILE", help="read settings from this TOML file")
    add("--isolated", action="store_true", help="ignore all settings files")
    add(
        "--stdin-filename",
        metavar="PATH",
        help="name for standard input (default: stdin.py, or stdin.sh by its first line)",
    )
    add(
        "--jobs",
        "-j",
        type=_number,
        default=0,
        metavar="N",
        help="number of processes (default: one per core)",
    )
    add(
        "--cache-dir",
        type=Path,
        metavar="FOLDER",
        help="folder for cached results (default: .rankwise_cache)",
    )
    add("--no-cache", action="store_true", help="check every file again, and cache nothing")
    return parser
