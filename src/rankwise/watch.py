"""`python -m rankwise.watch train.py …`: the script as Python runs it, and evidence in a folder should its ranks hang or fail.

For jobs that another launcher starts: ``torchrun --nproc-per-node 4 -m rankwise.watch train.py``, ``srun python -m rankwise.watch
train.py``. This program makes the files, and then the plain command takes its place in the same process (exec), with the hook
in front of its PYTHONPATH as `rankwise run` has it. So the script sees nothing that `python train.py` would not show it.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from rankwise.base.environ import environ
from rankwise.base.errors import UsageError
from rankwise.base.identity import read_identity
from rankwise.evidence import offline_setup
from rankwise.launcher.rank_command import hook_path_env

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_USAGE = """usage: python -m rankwise.watch [--folder DIR] [--every S] script.py [its arguments]
       python -m rankwise.watch [--folder DIR] [--every S] -m module [its arguments]

Run a rank as Python would, and record evidence of it in a folder: from it, rankwise report DIR shows which rank hangs, or failed, and why.

  --folder DIR   holds a folder for each run (default: $RANKWISE_EVIDENCE, or ./rankwise-evidence)
  --every S      seconds between two copies of a rank that makes progress (default: 30); one that makes none is copied sooner

RANKWISE_WATCH=0 runs the script alone.
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a command line asks for.

    Attributes:
        place: The folder that holds a folder for each run.
        every_s: Seconds between two copies.
        words: What Python is to be given: a script or ``-m module``, and its arguments.
    """

    place: Path
    every_s: float = offline_setup.EVERY_S
    words: tuple[str, ...]


def read_words(argv: Sequence[str], env: Mapping[str, str]) -> Wish | None:
    """Read a command line without the program's name.

    Args:
        argv: The words.
        env: The environment.

    Returns:
        What it asks for; None for help.

    Raises:
        UsageError: It asks for nothing, or for what there is not.
    """
    given = {
        "--folder": env.get(offline_setup.VARIABLE, "") or offline_setup.DEFAULT_PLACE,
        "--every": str(offline_setup.EVERY_S),
    }
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] not in {"-m", "-c"} and not rest[0].startswith("-m"):
        name, has_value, value = rest.pop(0).partition("=")
        if name in {"-h", "--help"}:
            return None
        if name not in given:
            raise UsageError(
                f"there is no option {name}",
                hint="Python's own options go before -m: python -u -m rankwise.watch train.py",
            )
        if not has_value and not rest:
            raise UsageError(f"{name} needs a value", hint=f"for example {name} {given[name]}")
        given[name] = value if has_value else rest.pop(0)
    if not rest or (rest[0] in {"-m", "-c"} and len(rest) == 1):
        raise UsageError("there is no script to run", hint="python -m rankwise.watch train.py")
    try:
        every_s = float(given["--every"])
    except ValueError:
        every_s = 0.0
    if not 0 < every_s < float("inf"):
        raise UsageError(
            f"--every {given['--every']} is not a number of seconds above 0", hint="for example --every 30"
        )
    return Wish(place=Path(given["--folder"]), every_s=every_s, words=tuple(rest))


def main(argv: Sequence[str]) -> int:
    """Make the files, and become the script; return an exit code only where that can't be."""
    env = environ()
    try:
        wish = read_words(argv, env)
    except UsageError as error:
        sys.stderr.write(f"rankwise: {error}\n")
        return error.exit_code
    if wish is None:
        sys.stdout.write(_USAGE)
        return 0
    if offline_setup.is_recorded():
        return _run_here(wish.words)
    prepared = _prepare(wish, env)
    if prepared is not None:
        if prepared.identity.rank == 0:
            offline_setup.say(
                f"evidence of this run is written to {_shorten(prepared.folder)}; if it hangs or fails: rankwise report {_shorten(prepared.folder)}"
            )
        prepared.keep_over_exec()
        hook = {"RANKWISE_RANK": json.dumps(prepared.orders), **hook_path_env()}
        env |= {name: value for name, value in hook.items() if value is not None}
    return _become([*find_interpreter(sys.orig_argv), *wish.words], env)


def find_interpreter(argv: Sequence[str]) -> list[str]:
    """Return Python and its own options from the words that it was started with, up to our name.

    Args:
        argv: As ``sys.orig_argv`` has them.
    """
    for at, word in enumerate(argv):
        if word == "-mrankwise.watch" or (word == "-m" and argv[at + 1 : at + 2] == ["rankwise.watch"]):
            return [sys.executable, *argv[1:at]]
    return [sys.executable]


def _prepare(wish: Wish, env: Mapping[str, str]) -> offline_setup.OfflineSetup | None:
    if not offline_setup.is_wanted(env):
        return None
    if sys.flags.ignore_environment or sys.flags.no_site:
        offline_setup.say("no evidence is recorded: with -I, -E or -S, Python does not load the recorder")
        return None
    program = next((word for word in wish.words if not word.startswith("-")), "")
    try:
        identity = read_identity(env)
        if identity is not None:
            return offline_setup.prepare(wish.place, identity, every_s=wish.every_s, program=program)
        offline_setup.say(
            "no evidence is recorded: no variable shows which rank this is (RANK and WORLD_SIZE, Slurm's, mpirun's)"
        )
    except (OSError, UsageError) as error:
        offline_setup.say(f"no evidence is recorded: {error}")
    return None


def _become(command: list[str], env: Mapping[str, str]) -> int:
    if os.name != "nt":
        os.execve(command[0], command, dict(env))
    return subprocess.call(command, env=dict(env))


def _run_here(words: Sequence[str]) -> int:
    """Run the script in this very process, which `rankwise run` looks at, and knows by its number."""
    if words[0].startswith("-m"):
        module, args = (words[1], words[2:]) if words[0] == "-m" else (words[0][2:], words[1:])
        sys.argv = ["-m", *args]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0
    sys.argv = list(words)
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")
    return 0


def _shorten(folder: Path) -> str:
    with_here = Path.cwd()
    return str(folder.relative_to(with_here)) if folder.is_relative_to(with_here) else str(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
