"""The command `rankwise`: finds the subcommand and turns our errors into a line and an exit code."""

from __future__ import annotations

import difflib
import io
import os
import signal
import sys
from typing import TYPE_CHECKING

from rankwise import __version__
from rankwise.base.errors import RankwiseError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_USAGE = f"""rankwise {__version__}: run any PyTorch training program on many processes

  rankwise run [flags] train.py [its arguments]   start a script on many ranks, as torchrun does
  rankwise run --help                             all flags
  rankwise resident                               warm servers that `run --resident` has left behind; resident stop
  rankwise rules                                  all that the check finds; any name of a report: rankwise rule D14
  rankwise check train.py                         mistakes of a distributed program, before it runs
  rankwise check --help                           folders, notebooks, shell scripts, commands; --fix, formats
  rankwise plan train.py --gpus 8                 how much memory a model will need, and what fits
  rankwise why PID                                which rank of a running job keeps the others waiting
  rankwise report FOLDER                          the verdict on a job again, from its evidence or dumps
  rankwise env                                    which rank this process is, and which variable says so
  rankwise doctor                                 what is wrong with this host, and the command that mends it
  rankwise doctor --hosts node0,node1             with several: every link between them, clocks, versions
  rankwise checkpoint ls runs/a                   which checkpoints there are, and which are whole
  rankwise checkpoint --help                      inspect, verify, export, import
  rankwise compare runs/a runs/b                  where two runs diverge, how, and why that may be
  rankwise --version
"""


def _run(argv: Sequence[str]) -> int:
    from rankwise.base.files import fill_standard_streams  # noqa: PLC0415 - a command pays for itself only

    fill_standard_streams()
    from rankwise.cli.run import main  # noqa: PLC0415 - a command pays for itself only

    return main(argv)


def _check(argv: Sequence[str]) -> int:
    from rankwise.cli.check import main  # noqa: PLC0415 - a command pays for itself only

    return main(argv)


def _plan(argv: Sequence[str]) -> int:
    from rankwise.cli.plan import main  # noqa: PLC0415 - a command pays for itself only

    return main(argv)


def _report(argv: Sequence[str]) -> int:
    from rankwise.cli.report import main  # noqa: PLC0415 - a command pays for itself only

    return main(argv)


def _why(argv: Sequence[str]) -> int:
    from rankwise.cli.why import main  # noqa: PLC0415 - a command pays for itself only

    return main(argv)


def _checkpoint(argv: Sequence[str]) -> int:
    from rankwise.cli.checkpoint import main  # noqa: PLC0415 - a command pays for itself only

    return main(argv)


def _compare(argv: Sequence[str]) -> int:
    from rankwise.cli.compare import main  # noqa: PLC0415 - a command pays for itself only

    return main(argv)


def _resident(argv: Sequence[str]) -> int:
    from rankwise.cli.resident import main  # noqa: PLC0415 - a command pays for itself only

    return main(argv)


def _rules(argv: Sequence[str]) -> int:
    from rankwise.cli.rules import main  # noqa: PLC0415 - a command pays for itself only

    return main(argv)


def _rule(argv: Sequence[str]) -> int:
    from rankwise.cli.rules import main_one  # noqa: PLC0415 - a command pays for itself only

    return main_one(argv)


def _env(argv: Sequence[str]) -> int:
    from rankwise.cli.env import main  # noqa: PLC0415 - a command pays for itself only

    return main(argv)


def _doctor(argv: Sequence[str]) -> int:
    from rankwise.cli.doctor import main  # noqa: PLC0415 - a command pays for itself only

    return main(argv)


def _probe(argv: Sequence[str]) -> int:
    from rankwise.cli.probe import main  # noqa: PLC0415 - a command pays for itself only

    return main(argv)


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": _run,
    "check": _check,
    "plan": _plan,
    "why": _why,
    "report": _report,
    "checkpoint": _checkpoint,
    "compare": _compare,
    "resident": _resident,
    "rules": _rules,
    "rule": _rule,
    "env": _env,
    "doctor": _doctor,
    "probe": _probe,
}


def _mask(command: str, text: str) -> str:
    """Return an error's text without secrets. Where a command does not quote the environment, `key=` is the user's own word."""
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
        if argv[0] not in _COMMANDS:
            near = difflib.get_close_matches(argv[0], _COMMANDS, n=1)
            hint = (
                f"did you mean `rankwise {near[0]}`?" if near else f"for a script: rankwise run {argv[0]} …"
            )
            raise UsageError(f"there is no command {argv[0]!r}", hint=hint)
        return _COMMANDS[argv[0]](argv[1:])
    except RankwiseError as error:
        print(f"rankwise: {_mask(argv[0], str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def entry(command: str | None = None) -> None:
    """Entry point of the program; with ``command`` the arguments are that command's."""
    argv = sys.argv[1:] if command is None else [command, *sys.argv[1:]]
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
