"""From a command to the launch that it is: which launcher, which flags, which script."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rankwise.lint.shell.flags import TABLES, FlagTable
from rankwise.lint.shell.model import Command, Flag, Launch, Setting
from rankwise.lint.shell.words import Word, joined, value_after_equals

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Commands that run the command behind them.
_WRAPPERS = frozenset(["srun", "nohup", "exec", "time", "timeout", "env", "sudo", "numactl", "taskset", "nice", "ionice", "stdbuf", "setsid",
                       "mpirun", "mpiexec", "mpiexec.hydra", "singularity", "apptainer", "docker", "podman", "enroot", "shifter", "conda", "mamba",
                       "micromamba", "uv", "poetry", "pipenv", "pdm", "hatch", "pixi", "ssh", "kubectl", "nsys", "ncu", "strace", "command",
                       "coverage", "bsub", "jsrun", "aprun", "flux", "unbuffer", "xvfb-run", "ltrace", "gdb", "salloc", "prun", "orterun", "ibrun",
                       "uvx", "pueue", "tsp", "stdbuf", "ts", "sbatch"])  # fmt: skip
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "launch",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "rankwise.run": "rankwise",
}
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*(?:\.exe)?")
_SCRIPT_NAMES = re.compile(r"SCRIPT|ENTRY|MAIN|PROGRAM|TRAIN_FILE|TRAINER_FILE|PY_FILE", re.IGNORECASE)
_PLACEHOLDER = re.compile(r"\.\.\.|…|\[.*\]|\(.*\)|\{.*\}")


def base_name(word: Word) -> str:
    """The program that a word names, without its folder."""
    return (word.text or "").rsplit("/", 1)[-1]


def read_launch(command: Command) -> Launch | None:
    """Return the launch that a command is; None for any other command."""
    words = command.words
    at = _launcher_at(words)
    if at is None:
        return None
    wraps = (*(word for outer in command.under for word in outer.words), *words[:at])
    command = _with_env_words(command, words[:at])
    found = _launcher_from(words, at)
    if found is None:
        return None
    launcher, begin = found
    if launcher == "python":
        return _python(command, at, begin, wraps)
    parsed = _parse(TABLES[launcher], words[begin:])
    return Launch(
        launcher=launcher,
        command=command,
        at=at,
        wraps=wraps,
        flags=tuple(parsed.flags),
        script=parsed.script,
        args=parsed.args,
        is_partial=parsed.is_partial,
        is_ended=parsed.is_ended,
    )


def _launcher_at(words: Sequence[Word]) -> int | None:
    if _is_launcher(words, 0):
        return 0
    if base_name(words[0]) not in _WRAPPERS:
        return None
    return next((number for number in range(1, len(words)) if _is_launcher(words, number)), None)


def _is_launcher(words: Sequence[Word], at: int) -> bool:
    name = base_name(words[at])
    then = base_name(words[at + 1]) if at + 1 < len(words) else ""
    if name in {"accelerate", "accelerate-launch"}:
        return then == "launch" or name == "accelerate-launch"
    if name == "rankwise":
        return then == "run"
    if name in {"torchrun", "deepspeed"} or _PYTHON.fullmatch(name):
        return True
    # $PYTHON -m torch.distributed.run
    return words[at].text is None and then == "-m" and at + 2 < len(words) and words[at + 2].text in _MODULES


def _launcher_from(words: Sequence[Word], at: int) -> tuple[str, int] | None:
    """The launcher, and the number of the first word behind it."""
    name = base_name(words[at])
    if name in {"accelerate", "rankwise"}:
        return name, at + 2
    if name == "accelerate-launch":
        return "accelerate", at + 1
    if name in {"torchrun", "deepspeed"}:
        return name, at + 1
    return _behind_python(words, at + 1)


def _behind_python(words: Sequence[Word], begin: int) -> tuple[str, int] | None:
    """What Python is told to run, behind its own flags."""
    while begin < len(words):
        text = words[begin].text
        if text in {"-c", "-"}:
            return None
        if text == "-m":
            return _module(words, begin)
        if text is None or not text.startswith("-"):
            break
        begin += 2 if text in {"-W", "-X"} else 1
    if begin >= len(words):
        return None
    script = words[begin]
    for launcher in ("torchrun", "deepspeed"):  # python $(which torchrun) …
        if base_name(script) == launcher or re.search(rf"(which|command -v) +{launcher}", script.raw):
            return launcher, begin + 1
    return "python", begin


def _module(words: Sequence[Word], at: int) -> tuple[str, int] | None:
    if at + 1 >= len(words):
        return None
    text = words[at + 1].text
    if text in {"rankwise", "accelerate"} and at + 2 < len(words) and words[at + 2].text in {"run", "launch"}:
        return text or "", at + 3
    if text in _MODULES:
        return _MODULES[text], at + 2
    return "python", at


def _python(command: Command, at: int, begin: int, wraps: tuple[Word, ...]) -> Launch:
    """A script that is started by Python itself."""
    words = command.words
    flags: tuple[Flag, ...] = ()
    if words[begin].text == "-m":
        flags = (Flag(name="module", word=words[begin], spelled="-m", value=None),)
        begin += 1
    return Launch(
        launcher="python",
        command=command,
        at=at,
        wraps=wraps,
        flags=flags,
        script=words[begin] if begin < len(words) else None,
        args=tuple(words[begin + 1 :]),
    )


def _with_env_words(command: Command, wraps: Sequence[Word]) -> Command:
    """Count ``env A=1 torchrun …`` as ``A=1 torchrun …``."""
    names = [base_name(word) for word in wraps]
    first = next((number for number, name in enumerate(names) if name in {"env", "sudo"}), None)
    if first is None:
        return command
    found: dict[str, Setting] = {}
    for word in wraps[first + 1 :]:
        name, equals, _ = word.head.partition("=")
        value = value_after_equals(word)
        if equals and value is not None and re.fullmatch(r"[A-Za-z_]\w*", name):
            found[name] = Setting(name=name, value=value, span=word.span, is_exported=True)
    return replace(command, env={**command.env, **found}) if found else command


@dataclass(slots=True)
class _Parsed:
    flags: list[Flag] = field(default_factory=list)
    script: Word | None = None
    args: tuple[Word, ...] = ()
    is_partial: bool = False
    is_ended: bool = False


def _parse(table: FlagTable, words: Sequence[Word]) -> _Parsed:
    """Read flags and script as argparse does."""
    parsed = _Parsed()
    opened: tuple[int, int] | None = None  # the last word that may be anything, and how many flags came before it
    at = 0
    while at < len(words):
        word = words[at]
        if _is_anything(word):
            if _SCRIPT_NAMES.search(" ".join(word.names)):
                return _end(parsed, words, at)
            parsed.is_partial, opened = True, (at, len(parsed.flags))
            at += 1
        elif word.text == "--":
            parsed.is_ended = True
            return _end(parsed, words, at + 1)
        elif not _is_flag(word):
            return _end(parsed, words, at)
        else:
            flag, at = _read_flag(table, words, at)
            if opened and not flag.is_known:  # it was the script, and these are its arguments
                parsed.flags = parsed.flags[: opened[1]]
                return _end(parsed, words, opened[0])
            parsed.flags.append(flag)
    if opened and parsed.script is None:
        parsed.flags = parsed.flags[: opened[1]]
        return _end(parsed, words, opened[0])
    return parsed


def _end(parsed: _Parsed, words: Sequence[Word], at: int) -> _Parsed:
    if at < len(words):
        parsed.script, parsed.args = words[at], tuple(words[at + 1 :])
    return parsed


def _is_anything(word: Word) -> bool:
    return word.is_open or (word.text is not None and bool(_PLACEHOLDER.fullmatch(word.text)))


def _is_flag(word: Word) -> bool:
    head = word.head
    return len(head) > 1 and head.startswith("-") and " " not in head.partition("=")[0]


def _read_flag(table: FlagTable, words: Sequence[Word], at: int) -> tuple[Flag, int]:
    word = words[at]
    spelled = word.head.partition("=")[0]
    value = value_after_equals(word)
    name, _ = table.find(spelled)
    if name is None and not spelled.startswith("--") and (short := table.spellings.get(spelled[:2])) in table.values:
        rest = word.head[2:]
        inner = Word(raw=rest, parts=joined([rest, *word.parts[1:]]), span=word.span, is_typed=False)
        return Flag(name=short or "", word=word, spelled=spelled[:2], value=inner), at + 1
    then = words[at + 1] if at + 1 < len(words) else None
    if name is None:
        takes = value is None and then is not None and _may_be_value(then, is_last=at + 2 >= len(words))
        flag = Flag(name=spelled, word=word, spelled=spelled, value=then if takes else value, is_known=False)
        return flag, at + 1 + takes
    if name in table.switches or value is not None:
        return Flag(name=name, word=word, spelled=spelled, value=value), at + 1
    if then is None or _is_flag_for_argparse(then):
        return Flag(name=name, word=word, spelled=spelled, value=None), at + 1
    return Flag(name=name, word=word, spelled=spelled, value=then), at + 2


def _is_flag_for_argparse(word: Word) -> bool:
    head = word.head
    return head.startswith("-") and len(head) > 1 and not re.match(r"-\d|-\.\d", head) and " " not in head


def _may_be_value(word: Word, *, is_last: bool) -> bool:
    """Whether the word behind a flag that we do not know is its value, and not the script."""
    head = word.head
    if head.startswith("-") or is_last or _is_anything(word):
        return False
    return not (head.endswith(".py") or (word.parts and str(word.parts[-1]).endswith(".py")))
