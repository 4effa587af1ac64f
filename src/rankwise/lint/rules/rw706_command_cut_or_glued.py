r"""A launch command ends too early, or two commands have become one.

**Why it breaks.** A command continues on the next line only if the very last character is a backslash. With a space
after it, or without it, the command ends: the launcher starts without the rest, and the rest is `command not found`. A
backslash without a space before it joins the value to the next line's first word.

Bad:

```bash
torchrun --nproc_per_node=2 \
    --master_port=29617
    train.py --epochs 3
```

Good:

```bash
torchrun --nproc_per_node=2 \
    --master_port=29617 \
    train.py --epochs 3
```

Bad:

```bash
torchrun --nproc_per_node=2 train.py torchrun --nproc_per_node=2 test.py
```

Good:

```bash
torchrun --nproc_per_node=2 train.py
torchrun --nproc_per_node=2 test.py
```

**When it says nothing.** A backslash at the end of the file; indented lines after a joined backslash.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankwise.lint.finding import Edit, Span
from rankwise.lint.rule import Rule
from rankwise.lint.shell.launches import base_name
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.shell.model import Launch

_BLANK_BEHIND = re.compile(r"\\([ \t]+)$")
_GLUED = re.compile(r"[^\s\\]\\$")


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for launch in shell.launches:
        yield from _second(shell, launch)
        yield from _lines(shell, launch)
    yield from _left_over(shell)


def _second(shell: Shell, launch: Launch) -> Iterator[Finding]:
    """A launcher among the script's arguments."""
    args = launch.args
    for number, word in enumerate(args):
        then = args[number + 1].text if number + 1 < len(args) else None
        name = base_name(word)
        is_second = (name == "torchrun" and then is not None) or (name == "accelerate" and then == "launch")
        is_python = (
            name in {"python", "python3"} and then is not None and (then == "-m" or then.endswith(".py"))
        )
        if is_second or is_python:
            message = f"a second command begins at {word.raw}, and is passed to {launch.script.raw if launch.script else ''} as arguments"
            yield shell.finding(RULE, word.span, message, "put it on a line of its own")
            return


def _lines(shell: Shell, launch: Launch) -> Iterator[Finding]:
    """Backslashes at the ends of a launch's lines."""
    if launch.command.under:
        return
    first, last = launch.command.span.line, launch.command.span.end_line
    lines = shell.lines
    for number in range(first, min(last + 1, len(lines))):
        line, then = lines[number - 1], lines[number]
        if (found := _BLANK_BEHIND.search(line)) and then.strip() and not line.lstrip().startswith("#"):
            span = Span(number, found.start() + 1, number, len(line) + 1)
            blanks = Span(number, found.start(1) + 1, number, len(line) + 1)
            message = "a space follows the backslash, so the command ends here and the next line is a separate command"
            yield shell.finding(RULE, span, message, "delete the space", edits=[Edit(span=blanks, text="")])
        elif number < last and _GLUED.search(line) and re.match(r"-|\S+\.py\b", then):
            word = line.split()[-1][:-1]
            span = Span(number, len(line), number, len(line) + 1)
            edit = Edit(span=Span(number, len(line), number, len(line)), text=" ")
            message = f"there is no space before the backslash or on the next line, so {word} and {then.split()[0]} become one word"
            yield shell.finding(RULE, span, message, "put a space before the backslash", edits=[edit])


def _left_over(shell: Shell) -> Iterator[Finding]:
    """A line that begins with a flag, or with the script that the launch above lacks."""
    ends = {launch.command.span.end_line: launch for launch in shell.launches if not launch.command.under}
    for command in shell.reading.commands:
        text, line = command.words[0].head, command.span.line
        launch = ends.get(_line_above(shell.lines, line))
        if launch is None or launch.command.span.line == line or command.under:
            continue
        above = shell.lines[launch.command.span.end_line - 1]
        if _BLANK_BEHIND.search(above):
            continue  # reported above
        is_flag = text.startswith("--")
        is_script = (
            text.endswith(".py") and "/" not in text[:2] and launch.script is None and launch.is_elastic
        )
        if is_flag or is_script:
            message = f"the command above has ended, so {command.words[0].raw} is a separate command"
            yield shell.finding(RULE, command.words[0].span, message, _mended(shell.lines, line))


def _line_above(lines: list[str], line: int) -> int:
    """The last line above that is not a comment."""
    line -= 1
    while line > 1 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
    return line


def _mended(lines: list[str], line: int) -> str:
    above = lines[line - 2].lstrip() if line > 1 else ""
    return (
        "move the comment: it ends the command"
        if above.startswith("#")
        else "end the line above with a backslash"
    )


RULE: Rule[Shell] = Rule(
    id="RW706",
    name="command-cut-or-glued",
    severity="error",
    classes=("L5",),
    summary="a launch command ends too early, or two commands are one",
    looks_at="shell",
    check=_check,
    fixable=True,
)
