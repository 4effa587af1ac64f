"""A launch command is not what its author meant to type."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankwise.lint.finding import Edit, Found, Span
from rankwise.lint.rule import rule
from rankwise.lint.shell.launches import base_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.shell.model import Launch
    from rankwise.lint.shell.study import Shell
    from rankwise.lint.shell.words import Word


_BLANK_BEHIND = re.compile(r"\\([ \t]+)$")
_GLUED = re.compile(r"[^\s\\]\\$")


@rule(
    "RW706", "error", "L5", "a launch command ends too early, or two commands are one", looks_at="shell", fixable=True
)
def command_cut_or_glued(shell: Shell) -> Iterator[Found]:
    for launch in shell.launches:
        yield from _second(launch)
        yield from _lines(shell, launch)
    yield from _left_over(shell)


def _second(launch: Launch) -> Iterator[Found]:
    """A launcher among the script's arguments."""
    args = launch.args
    for number, word in enumerate(args):
        then = args[number + 1].text if number + 1 < len(args) else None
        name = base_name(word)
        is_second = (name == "torchrun" and then is not None) or (name == "accelerate" and then == "launch")
        is_python = name in {"python", "python3"} and then is not None and (then == "-m" or then.endswith(".py"))
        if is_second or is_python:
            message = f"a second command begins at {word.raw}, and is passed to {launch.script.raw if launch.script else ''} as arguments"
            yield Found(word.span, message, "put it on a line of its own")
            return


def _lines(shell: Shell, launch: Launch) -> Iterator[Found]:
    """Backslashes at the ends of a launch's lines."""
    if launch.command.under:
        return
    first, last = launch.command.span.line, launch.command.span.end_line
    lines = shell.unit.lines
    for number in range(first, min(last + 1, len(lines))):
        line, then = lines[number - 1], lines[number]
        if (found := _BLANK_BEHIND.search(line)) and then.strip() and not line.lstrip().startswith("#"):
            span = Span(number, found.start() + 1, number, len(line) + 1)
            blanks = Span(number, found.start(1) + 1, number, len(line) + 1)
            message = "a space follows the backslash, so the command ends here and the next line is a separate command"
            yield Found(span, message, "delete the space", edits=[Edit(span=blanks, text="")])
        elif number < last and _GLUED.search(line) and re.match(r"-|\S+\.py\b", then):
            word = line.split()[-1][:-1]
            span = Span(number, len(line), number, len(line) + 1)
            edit = Edit(span=Span(number, len(line), number, len(line)), text=" ")
            message = f"there is no space before the backslash or on the next line, so {word} and {then.split()[0]} become one word"
            yield Found(span, message, "put a space before the backslash", edits=[edit])


def _left_over(shell: Shell) -> Iterator[Found]:
    """A line that begins with a flag, or with the script that the launch above lacks."""
    ends = {launch.command.span.end_line: launch for launch in shell.launches if not launch.command.under}
    for command in shell.reading.commands:
        text, line = command.words[0].head, command.span.line
        launch = ends.get(_line_above(shell.unit.lines, line))
        if launch is None or launch.command.span.line == line or command.under:
            continue
        above = shell.unit.lines[launch.command.span.end_line - 1]
        if _BLANK_BEHIND.search(above):
            continue  # reported above
        is_flag = text.startswith("--")
        is_script = text.endswith(".py") and "/" not in text[:2] and launch.script is None and launch.is_elastic
        if is_flag or is_script:
            message = f"the command above has ended, so {command.words[0].raw} is a separate command"
            yield Found(command.words[0].span, message, _mended(shell.unit.lines, line))


def _line_above(lines: list[str], line: int) -> int:
    """The last line above that is not a comment."""
    line -= 1
    while line > 1 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
    return line


def _mended(lines: list[str], line: int) -> str:
    above = lines[line - 2].lstrip() if line > 1 else ""
    return "move the comment: it ends the command" if above.startswith("#") else "end the line above with a backslash"


_NUMBERS = {
    "nproc_per_node",
    "nnodes",
    "node_rank",
    "master_port",
    "num_processes",
    "num_machines",
    "main_process_port",
}
_FLAGS = {*_NUMBERS, "master_addr", "rdzv_endpoint", "main_process_ip", "machine_rank", "num_gpus", "num_nodes"}
_TORCH = {"MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE"}
_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


@rule("RW711", "error", "L4", "a flag gets the name of a variable instead of its value", looks_at="shell", fixable=True)
def variable_without_dollar(shell: Shell) -> Iterator[Found]:
    for launch in shell.launches:
        for flag in launch.flags:
            if flag.is_known and flag.name in _FLAGS and flag.value is not None:
                yield from _value(shell, flag.name, flag.spelled, flag.value, flag.word)
    for setting in shell.reading.settings:
        if setting.name in {"MASTER_PORT", "MASTER_ADDR", "WORLD_SIZE", "RANK", "LOCAL_RANK"}:
            yield from _value(shell, setting.name, setting.name, setting.value, setting.value)


def _value(shell: Shell, name: str, spelled: str, value: Word, word: Word) -> Iterator[Found]:
    text = value.text or ""
    for part in text.split(":") if name == "rdzv_endpoint" else [text]:
        if not _NAME.fullmatch(part) or not _is_meant(shell, name, part):
            continue
        message = f"{spelled} gets the name {part} itself: a $ is missing"
        yield Found(word.span, message, f"write ${part}", edits=_edits(shell, word, part))
        return


def _is_meant(shell: Shell, name: str, text: str) -> bool:
    """Whether a name in capitals is neither a placeholder of a page nor a host."""
    if shell.is_named(text):
        return True
    is_number = name in _NUMBERS or name in {"MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"}
    if shell.unit.is_fragment and shell.unit.path != "<command>":
        return is_number and text in _TORCH
    return is_number or text in {"MASTER_ADDR", *_TORCH}


def _edits(shell: Shell, word: Word, name: str) -> list[Edit]:
    found = re.search(rf"(?<![\w$]){name}$|(?<![\w$]){name}(?=:)", word.raw)
    if found is None or not word.is_typed or "\n" in word.raw or not shell.is_named(name):
        return []
    col = word.span.col + found.start()
    return [Edit(span=Span(word.span.line, col, word.span.line, col), text="$")]


_DICE = {"random": "RANDOM", "srandom": "SRANDOM"}


@rule("RW712", "error", "I9", "$random is empty: bash's random number is $RANDOM", looks_at="shell", fixable=True)
def random_in_wrong_case(shell: Shell) -> Iterator[Found]:
    for reference in shell.reading.references:
        name = reference.name
        meant = _DICE.get(name.lower())
        if meant is None or name == meant or name in shell.reading.assigned or shell.unit.path.endswith(".fish"):
            continue
        span = reference.span
        text = shell.unit.lines[span.line - 1][span.col - 1 : span.end_col - 1] if span.line == span.end_line else ""
        at = span.col + text.find(name)
        edits = [Edit(span=Span(span.line, at, span.line, at + len(name)), text=meant)] if name in text else []
        message = f"${name} is empty: bash's random number is ${meant}"
        yield Found(span, message, f"write ${meant}", edits=edits)
