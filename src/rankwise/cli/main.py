"""The command `rankwise`: finds the subcommand and turns our errors into a line and an exit code."""

from __future__ import annotations

import difflib
import io
import os
import signal
import sys
from typing import TYPE_CHECKING

from rankwise import __version__
from rankwise.base import terminal
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


def _run(argv: Sequence[str]) -> int:
    from rankwise.base.files import fill_standard_streams  # noqa: PLC0415 - a command pays for itself only

    fill_standard_streams()
    from rankwise.cli.run import main  # noqa: PLC0415 - a command pays for itself only

    return main(argv)


def _submit(argv: Sequence[str]) -> int:
    from rankwise.cli.submit import main  # noqa: PLC0415 - a command pays for itself only

    return main(argv)


def _jobs(argv: Sequence[str]) -> int:
    from rankwise.cli.jobs import main  # noqa: PLC0415 - a command pays for itself only

    return main(argv)


def _logs(argv: Sequence[str]) -> int:
    from rankwise.cli.jobs import main_logs  # noqa: PLC0415 - a command pays for itself only

    return main_logs(argv)


def _cancel(argv: Sequence[str]) -> int:
    from rankwise.cli.jobs import main_cancel  # noqa: PLC0415 - a command pays for itself only

    return main_cancel(argv)


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
    "submit": _submit,
    "jobs": _jobs,
    "logs": _logs,
    "cancel": _cancel,
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
        text = f"rankwise: {_mask(argv[0], str(error))}"
        print(terminal.wrap(text, terminal.width(2)), file=sys.stderr)
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
