"""The command `rankwise`: finds the subcommand and turns our errors into a line and an exit code."""

from __future__ import annotations

import difflib
import gc
import io
import os
import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from rankwise.base import __version__, terminal
from rankwise.base.errors import RankwiseError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_USAGE = f"""rankwise {__version__}: run PyTorch training on many processes

  rankwise run [flags] train.py [args]   launch a script on many ranks, like
                                         torchrun; `run --help` lists the flags
  rankwise submit --on slurm -- train.py submit it to a cluster: ssh, slurm,
                                         kubernetes, ray; by flags or job.toml
  rankwise jobs                          what has become of what was submitted;
                                         also `logs JOB` and `cancel JOB`
  rankwise resident [stop]               warm servers left by `run --resident`
  rankwise why PID                       which rank holds up a running job
  rankwise report FOLDER                 the report on a finished job, again
  rankwise check train.py                find distributed bugs before running
  rankwise rule NAME                     explain what a report or check names;
                                         `rankwise rules` lists what check finds
  rankwise plan train.py --gpus 8        how much memory a model will need
  rankwise env                           which rank this process is, and why
  rankwise doctor                        what is wrong with this host, and the
                                         commands that fix it
  rankwise doctor --hosts node0,node1    the same for several, and their links
  rankwise checkpoint ls runs/a          list checkpoints, and which are valid;
                                         also inspect, verify, export, import
  rankwise compare runs/a runs/b         where two runs diverge, and why
  rankwise --version

Run `rankwise COMMAND --help` for details.
"""
#: So many new objects are made, and not yet dropped, before they are searched for garbage.
_MOST_YOUNG = 50_000

#: The function of each command. Its module is imported when it is used: a command pays for itself only.
COMMANDS = {
    "run": "run.main",
    "submit": "submit.main",
    "jobs": "jobs.main",
    "logs": "jobs.main_logs",
    "cancel": "jobs.main_cancel",
    "check": "check.main",
    "plan": "plan.main",
    "why": "why.main",
    "report": "report.main",
    "checkpoint": "checkpoint.main",
    "compare": "compare.main",
    "resident": "resident.main",
    "rules": "rules.main",
    "rule": "rules.main_one",
    "env": "env.main",
    "doctor": "doctor.main",
}


def call(command: str, argv: Sequence[str]) -> int:
    """Run a command; return the exit code."""
    if command == "run":  # before its modules open anything: a stream that is closed would have its number
        from rankwise.base.files import fill_standard_streams  # noqa: PLC0415 - only there

        fill_standard_streams()
    module, _, name = COMMANDS[command].partition(".")
    function: Callable[[Sequence[str]], int] = getattr(import_module(f"rankwise.cli.{module}"), name)
    return function(argv)


def _mask(command: str, text: str) -> str:
    """Return an error's text without secrets.

    Where a command does not quote the environment, `key=` is the user's own word.
    """
    from rankwise.doctor.variables import masking  # noqa: PLC0415 - most commands go well

    return (masking.mask_text if command in {"env", "doctor"} else masking.mask_credentials)(text)


def main(argv: Sequence[str]) -> int:
    """Run a command line without the program's name; return the exit code."""
    if not argv or argv[0] in {"-h", "--help", "help"}:
        print(_USAGE, end="")
        return 0 if argv else 2
    if argv[0] in {"-V", "--version"}:
        print(__version__)
        return 0
    try:
        if argv[0] not in COMMANDS:
            near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
            hint = f"did you mean `rankwise {near[0]}`?" if near else f"for a script: rankwise run {argv[0]} …"
            raise UsageError(f"there is no command {argv[0]!r}", hint=hint)
        return call(argv[0], argv[1:])
    except RankwiseError as error:
        text = f"rankwise: {_mask(argv[0], str(error))}"
        print(terminal.wrap(text, terminal.width(2)), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def entry(command: str | None = None) -> None:
    """Entry point of the program; with ``command`` the arguments are that command's."""
    argv = sys.argv[1:] if command is None else [command, *sys.argv[1:]]
    # Nearly all that imports make stays: looking for garbage there takes a tenth of a command's start, and finds none.
    gc.set_threshold(_MOST_YOUNG, *gc.get_threshold()[1:])
    for stream in (sys.stdout, sys.stderr):
        # A console of another alphabet must not hide what was found.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = main(argv)
        if sys.stdout is not None:  # closed, as `>&-` does
            sys.stdout.flush()
    except BrokenPipeError:
        # Its reader has gone, as `| head` does: nobody is left to be told, and Python would complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    sys.exit(code)
