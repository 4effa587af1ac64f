"""A launch command is not what its author meant to type."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankwise.lint.finding import Edit, Found, Span
from rankwise.lint.rule import rule
from rankwise.lint.shell.flags import LAUNCHER_ONLY
from rankwise.lint.shell.launches import base_name
from rankwise.lint.shell.study import Shell, typed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.shell.model import Launch
    from rankwise.lint.shell.words import Word

_PROGRAMS = {"python", "python3", "torchrun", "accelerate", "deepspeed", "srun", "mpirun", "rankwise"}
_NO_MODULES = {"torchrun", "torch.distributed", "torch.distributed.torchrun", "distributed.launch", "torch.launch"}


@rule(
    "RW704",
    "error",
    "L4",
    "launcher, Python and script in the wrong order, or a file given as a module",
    looks_at="shell",
)
def launcher_and_script_mixed(shell: Shell) -> Iterator[Found]:
    for launch in shell.launches:
        script = launch.script
        if script is None or launch.flag("no_python"):
            continue
        text = script.text or ""
        if launch.flag("module") and text.endswith(".py"):
            module = text[:-3].removeprefix("./").replace("/", ".")
            message = f"-m takes a module's name, and {text} is a file"
            yield Found(script.span, message, f"-m {module}, or remove -m")
        elif base_name(script) in _PROGRAMS and launch.launcher != "python":
            message = f"{launch.label} runs {text!r} as the script"
            yield Found(script.span, message, _without(launch, text))
        elif text.partition("=")[0].lstrip("-").replace("-", "_") in LAUNCHER_ONLY and launch.is_elastic:
            message = f"{launch.label} runs {text!r} as the script: the dashes are missing"
            yield Found(script.span, message, f"write --{text.lstrip('-')}")
        elif launch.launcher == "python" and text in _NO_MODULES and launch.flag("module"):
            message = f"{text} can't be run as a module"
            yield Found(script.span, message, "write torchrun, or python -m torch.distributed.run")
        else:
            yield from _behind(launch)


def _without(launch: Launch, text: str) -> str:
    if text.startswith("python"):
        return f"remove {text}: {launch.label} starts Python itself; --no-python is for other programs"
    return "keep one of the two launchers"


def _behind(launch: Launch) -> Iterator[Found]:
    for first, second in zip(launch.args, launch.args[1:], strict=False):
        module = second.text or ""
        if first.text == "-m" and module.startswith(("torch.distributed.", "accelerate.commands", "rankwise.run")):
            script = launch.script.raw if launch.script else ""
            message = f"-m {module} comes after {script}, so {script} runs once and gets it as an argument"
            yield Found(first.span, message, f"torchrun [flags] {script}")


_DASHES = re.compile(r"-*[\u2010-\u2015\u2212][-\u2010-\u2015\u2212]*(?=[A-Za-z])")
_QUOTES = re.compile(r"[\u201c\u201d\u2018\u2019]")


@rule("RW705", "error", "L5", "typographic dashes or quotes in a launch command", looks_at="shell", fixable=True)
def typographic_characters(shell: Shell) -> Iterator[Found]:
    for launch in shell.launches:
        for word in launch.command.words:
            yield from _word(word)


def _word(word: Word) -> Iterator[Found]:
    if found := _DASHES.match(word.head):
        rest = word.head[found.end() :]
        plain = "-" if len(rest.partition("=")[0]) == 1 else "--"
        message = f"{word.raw} begins with a typographic dash, so it is not a flag"
        yield Found(word.span, message, f"type {plain}{rest}", edits=typed(word, found[0], plain))
    elif word.is_typed and (quote := _QUOTES.search(word.raw)) and word.raw[0] not in "\"'":
        message = f"{quote[0]} is a typographic quote, which the shell reads as a letter"
        yield Found(word.span, message, "type plain quotes")


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
    lines = shell.piece.lines
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
        launch = ends.get(_line_above(shell.piece.lines, line))
        if launch is None or launch.command.span.line == line or command.under:
            continue
        above = shell.piece.lines[launch.command.span.end_line - 1]
        if _BLANK_BEHIND.search(above):
            continue  # reported above
        is_flag = text.startswith("--")
        is_script = text.endswith(".py") and "/" not in text[:2] and launch.script is None and launch.is_elastic
        if is_flag or is_script:
            message = f"the command above has ended, so {command.words[0].raw} is a separate command"
            yield Found(command.words[0].span, message, _mended(shell.piece.lines, line))


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
_FLAGS = {
    *_NUMBERS,
    "master_addr",
    "rdzv_endpoint",
    "main_process_ip",
    "machine_rank",
    "num_gpus",
    "num_nodes",
}
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
    if shell.piece.is_fragment and shell.piece.path != "<command>":
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
        if meant is None or name == meant or name in shell.reading.assigned or shell.piece.path.endswith(".fish"):
            continue
        span = reference.span
        text = shell.piece.lines[span.line - 1][span.col - 1 : span.end_col - 1] if span.line == span.end_line else ""
        at = span.col + text.find(name)
        edits = [Edit(span=Span(span.line, at, span.line, at + len(name)), text=meant)] if name in text else []
        message = f"${name} is empty: bash's random number is ${meant}"
        yield Found(span, message, f"write ${meant}", edits=edits)
