"""Write docs/reference/cli.md from the parsers of the commands: every flag with its help."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.cli.main import COMMANDS, call

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parent
TARGET = DOCS / "reference" / "cli.md"
_HEAD = """\
# Commands

Every command with its flags, as `rankwise COMMAND --help` shows them; this page is made from the parsers by `make docs`. Each flag of `rankwise run` can be written with dashes or with underscores; those that torchrun has can be given as `PET_*` variables ([how](../tutorial/launching.md#flags-from-the-environment)).
"""
#: Where a command is shown at work.
_GUIDES = {
    "run": "../tutorial/launching.md",
    **dict.fromkeys(("submit", "jobs", "logs", "cancel"), "../howto/clusters.md"),
    "check": "../howto/check.md",
    "plan": "../howto/plan-memory.md",
    "why": "../howto/hangs.md#a-job-that-hangs-right-now",
    "report": "../howto/hangs.md#saved-dumps",
    "checkpoint": "../howto/resume.md",
    "compare": "../howto/compare.md",
    "resident": "../howto/edit-and-run.md",
    "rules": "../rules/check/README.md",
    "rule": "errors.md",
    "env": "environment.md",
    "doctor": "../howto/doctor.md",
}


class _FoundError(Exception):
    """Carries a command's parser out of its `--help`."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def find_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command, however it makes it."""

    def raise_found(parser: argparse.ArgumentParser, _: object = None) -> None:
        raise _FoundError(parser)

    own = argparse.ArgumentParser.print_help
    argparse.ArgumentParser.print_help = raise_found  # type: ignore[assignment, method-assign]
    try:
        call(command, ["--help"])
    except _FoundError as found:
        return found.parser
    finally:
        argparse.ArgumentParser.print_help = own  # type: ignore[method-assign]
    raise ValueError(f"rankwise {command} --help shows no parser")


def _escape(text: str) -> str:
    """Return words of a help text as Markdown: what stands in backticks is code, and the rest has no marks."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else re.sub(r"[<*]", r"\\\g<0>", part) for part in parts)


def write_parser(parser: argparse.ArgumentParser, level: int, guide: str = "") -> Iterator[str]:
    """Yield the section of a parser, and those of its subcommands below it."""
    yield from ("", f"{'#' * level} {parser.prog}", "")
    if parser.description:
        yield from (_escape(parser.description) + (f" [How to use it]({guide})." if guide else ""), "")
    yield f"    {_usage(parser)}"
    children: dict[str, argparse.ArgumentParser] = {}
    for group in parser._action_groups:
        rows = []
        for action in group._group_actions:
            if isinstance(action, argparse._SubParsersAction):
                children |= action.choices
            elif not isinstance(action, argparse._HelpAction) and action.help is not argparse.SUPPRESS:
                rows.append(_write_action(parser, action))
        if rows:
            title = {"positional arguments": "Arguments", "options": "Flags"}.get(group.title or "", group.title or "")
            yield from ("", f"**{title[0].upper()}{title[1:]}**", "")
            if group.description:
                yield from (_escape(group.description), "")
            yield from rows
    if parser.epilog:
        yield from ("", _escape(parser.epilog))
    for child in children.values():
        yield from write_parser(child, level + 1)


def _usage(parser: argparse.ArgumentParser) -> str:
    if parser.usage:
        return re.sub(r"\s+", " ", parser.usage % {"prog": parser.prog}).removeprefix("usage: ")
    places = [
        "COMMAND" if isinstance(one, argparse._SubParsersAction) else _name_value(one)
        for one in parser._actions
        if not one.option_strings
    ]
    return " ".join([parser.prog, "[flags]", *places])


def _name_value(action: argparse.Action) -> str:
    """Return what stands for a value: ``SECONDS``, ``{text,json}``; "" for a flag without one."""
    if action.nargs == 0:
        return ""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    name = action.metavar or choices or (action.dest if not action.option_strings else action.dest.upper())
    shown = " ".join(name) if isinstance(name, tuple) else str(name)
    ends = {"*": f"[{shown} ...]", "?": f"[{shown}]", "+": f"{shown} ...", argparse.REMAINDER: "..."}
    return ends.get(str(action.nargs), shown)


def _write_action(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    # Spellings with underscores are those with dashes once more.
    names = [one for one in action.option_strings if "_" not in one] or list(action.option_strings)
    value = _name_value(action)
    shown = ", ".join(f"`{name}{' ' + value if value else ''}`" for name in names) or f"`{value}`"
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return f"- {shown}" + (f": {_escape(text)}" if text else "")


def render() -> str:
    """Return the page."""
    lines = [_HEAD.rstrip()]
    for command in COMMANDS:
        lines += write_parser(find_parser(command), 2, _GUIDES[command])
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
