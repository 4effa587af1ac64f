"""The parser of `rankwise run`: torchrun's flags in both spellings, its PET_* variables, and few of our own."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, final

from rankwise.base.environ import environ
from rankwise.base.errors import UsageError
from rankwise.base.flags import Parser
from rankwise.launcher.spec import ON_HANG

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: The flags that are ours; all others are torchrun's, with torchrun's meaning.
OWN_FLAGS = (
    "--report", "--hang-timeout", "--hang_timeout", "--on-hang", "--on_hang", "--watch", "--no-watch", "--check", "--no-check", "--strict", "--cold", "--resident", "--no-resident", "--preload", "--role-counts", "--role_counts", "--join-every", "--join_every",
)  # fmt: skip

#: Torchrun's since torch 2.15. Before, they made no abbreviation of another flag ambiguous, and so they make none now.
LATER_FLAGS = (
    "--log-line-prefix-template",
    "--log_line_prefix_template",
    "--print-completion",
    "--print_completion",
)

_NUMA_MODES = ("node", "socket", "exclusive", "core-complex")


#: What other launchers call it.
_ALIASES = {
    **dict.fromkeys(("nprocs", "nproc", "n-proc", "n", "np", "num-processes", "num-procs", "ngpus", "gpus", "num-gpus", "ranks",
                     "gpus-per-node", "ntasks-per-node"), "--nproc-per-node"),
    **dict.fromkeys(("nodes", "num-nodes", "num-machines"), "--nnodes"),
    "machine-rank": "--node-rank", "main-process-port": "--master-port", "main-process-ip": "--master-addr",
}  # fmt: skip


def _comma_list(value: str) -> list[str]:
    """Split at commas; a double comma stands for one."""
    return [item.replace("\0", ",") for item in value.replace(",,", "\0").split(",")]


def _seconds_or_never(value: str) -> float:
    """Read a number of seconds; 0 and ``off`` are for ever."""
    if value.strip().lower() in {"0", "off", "never"}:
        return float("inf")
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{value!r}: expected a number of seconds above 0, or off")
    return seconds


def _seconds(value: str) -> float:
    """Read a number of seconds from 0."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{value!r}: a number of seconds from 0 is meant")
    return seconds


def build_parser(env: Mapping[str, str] | None = None) -> argparse.ArgumentParser:
    """Return the parser; PET_* variables of ``env`` (default: this process's) stand in for absent flags."""
    env = environ() if env is None else env
    parser = Parser(
        prog="rankwise run",
        aliases=_ALIASES,
        unabbreviated=(*OWN_FLAGS, *LATER_FLAGS),
        missing={
            "training_script": (
                "no script given",
                "rankwise run [flags] train.py [the script's own arguments]",
            )
        },
        usage="rankwise run [flags] train.py [the script's own arguments]",
        description="Start a training script on many processes. Takes all flags of torchrun, with the same meaning, spelled with hyphens or underscores.",
        epilog="Environment variables, where you can't change the command: RANKWISE_COLD=1 (as --cold), RANKWISE_RESIDENT=1 (as --resident), "
        "RANKWISE_PRELOAD (as --preload), RANKWISE_WATCH=0 (as --no-watch), RANKWISE_CHECK=0 (as --no-check), RANKWISE_ON_HANG (as --on-hang). "
        "Every flag of torchrun is also read from PET_<FLAG>.",
    )
    add = _Adder(env)
    _add_start(parser, add)
    _add_rendezvous(parser, add)
    _add_faults(parser, add)
    _add_logs(parser, add)
    parser.add_argument("training_script", help="The script, followed by its own arguments.")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_start(parser: argparse.ArgumentParser, add: _Adder) -> None:
    nodes = parser.add_argument_group("what to launch")
    add.value(nodes, "nnodes", "1:1", "Number of nodes, N or MIN:MAX.")
    add.value(nodes, "nproc-per-node", "1", "Ranks on this node: a number, gpu, cpu, xpu or auto.")
    nodes.add_argument("--cold", action="store_true", help="Start a fresh interpreter for every rank.")
    nodes.add_argument(
        "--resident", action=argparse.BooleanOptionalAction,
        help="Keep the warm server for the next run, which then starts in a fraction of a second; it exits after 15 minutes without a run.",
    )  # fmt: skip
    nodes.add_argument(
        "--preload",
        metavar="MODULE,…",
        help="Modules to import, besides torch, before the ranks are forked: transformers,…",
    )
    nodes.add_argument(
        "--role-counts", "--role_counts", metavar="ROLE=N,…",
        help="Number of ranks of each role, as in ps=2,worker=6; on one node --nproc-per-node defaults to their sum.",
    )  # fmt: skip
    add.flag(nodes, "module", "-m", "Run the script as a module, as `python -m` does.")
    add.flag(nodes, "no-python", None, "Run the script as a program, without python in front.")
    add.flag(nodes, "run-path", None, "Run the script, given by its absolute path, with runpy.run_path.")
    add.value(nodes, "role", "default", "Role of the ranks, for jobs of several roles.")
    nodes.add_argument(
        "--numa-binding", "--numa_binding", choices=_NUMA_MODES, help="Bind ranks to the CPUs near their GPU."
    )
    add.flag(nodes, "virtual-local-rank", None, "Each rank sees only its own GPU, as device 0, and LOCAL_RANK=0.")
    add.value(
        nodes,
        "start-method",
        "spawn",
        "Accepted for compatibility; torchrun uses it for function entrypoints only.",
        choices=("spawn", "fork", "forkserver"),
    )


def _add_rendezvous(parser: argparse.ArgumentParser, add: _Adder) -> None:
    rendezvous = parser.add_argument_group("rendezvous of several nodes")
    add.value(rendezvous, "node-rank", 0, "Rank of this node (static rendezvous).", kind=int)
    add.value(rendezvous, "master-addr", "127.0.0.1", "Address of node 0 (static rendezvous).")
    add.value(rendezvous, "master-port", None, "Port on node 0 (static rendezvous); 29500 if several nodes.", kind=int)
    add.value(rendezvous, "local-addr", None, "Address of this node.")
    add.value(rendezvous, "rdzv-backend", "static", "Rendezvous backend: static, c10d or another that torch knows.")
    add.value(rendezvous, "rdzv-endpoint", "", "Endpoint of the backend, host:port.")
    add.value(rendezvous, "rdzv-id", "none", "Id of the job, the same on all nodes.")
    add.value(rendezvous, "rdzv-conf", "", "More settings for the backend: KEY=VALUE,…")
    add.flag(rendezvous, "standalone", None, "A single-node job, on a free port.")


def _add_faults(parser: argparse.ArgumentParser, add: _Adder) -> None:
    faults = parser.add_argument_group("when something goes wrong")
    add.value(faults, "max-restarts", 0, "How many times all ranks are restarted after a failure.", kind=int)
    add.value(faults, "monitor-interval", 0.1, "Seconds between polls for what no event announces.", kind=float)
    add.value(faults, "shutdown-timeout", None, "Seconds between SIGTERM and SIGKILL (30).", kind=int)
    add.value(faults, "signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "Signals that stop the job.")
    faults.add_argument(
        "--join-every", "--join_every", type=_seconds, default=0.0, metavar="SECONDS",
        help="With --nnodes MIN:MAX: let nodes join at most this often, since all ranks restart for each (default: 0). The replacement of a lost node joins at once.",
    )  # fmt: skip
    faults.add_argument("--report", type=Path, metavar="FILE", help="Write the report as JSON to FILE.")
    faults.add_argument(
        "--hang-timeout", "--hang_timeout", type=_seconds_or_never, metavar="SECONDS",
        help="How long ranks may wait for others, with no progress anywhere, before the job counts as hung (default: 1800, and only if the others are idle); off: never.",
    )  # fmt: skip
    faults.add_argument(
        "--on-hang", "--on_hang", choices=ON_HANG,
        help="What to do about a hang: stop the job, only report it, or restart it if a restart is left. By default a proven hang ends the "
        "attempt on Gloo, and is only reported on NCCL.",
    )  # fmt: skip
    faults.add_argument(
        "--watch",
        action=argparse.BooleanOptionalAction,
        help="Say which rank keeps the others waiting (the default).",
    )
    faults.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="Show the errors that `rankwise check` finds in the script while it starts (the default).",
    )
    faults.add_argument(
        "--strict",
        action="store_true",
        help="Fail if mismatched collectives were paired, even if the script finished; do not start a script in which the "
        "check finds errors.",
    )


def _add_logs(parser: argparse.ArgumentParser, add: _Adder) -> None:
    logs = parser.add_argument_group("output")
    add.value(logs, "log-dir", None, "Folder in which this run's folder of logs is created.")
    add.value(
        logs,
        "redirects",
        "0",
        "Streams to write to files: 0 none, 1 stdout, 2 stderr, 3 both, or RANK:N,…",
        short="-r",
    )
    add.value(logs, "tee", "0", "Streams to write to files and to the console, as for -r.", short="-t")
    add.value(
        logs, "log-line-prefix-template", "",
        "Prefix of teed lines, with ${role_name}, ${rank}, ${local_rank} and ${hostname}; default: \"[${role_name}${local_rank}]:\".",
    )  # fmt: skip
    add.value(logs, "local-ranks-filter", "", "Show only these local ranks on the console: 0,1,…")
    add.value(
        logs,
        "duplicate-stdout-filters",
        [],
        "Copy teed stdout lines that contain one of these words.",
        kind=_comma_list,
    )
    add.value(
        logs,
        "duplicate-stderr-filters",
        [],
        "Copy teed stderr lines that contain one of these words.",
        kind=_comma_list,
    )
    add.value(logs, "event-log-handler", "null", "Accepted for compatibility: null, console or a registered name.")
    logs.add_argument(
        "--print-completion", "--print_completion", action=_PrintCompletion, metavar="SHELL",
        help="Print a completion script for bash, zsh or another shell that shtab supports, and exit (pip install shtab).",
    )  # fmt: skip
    logs.add_argument("--logs-specs", "--logs_specs", help="Only `default`: torchrun's plug-ins need its own agent.")


@final
class _PrintCompletion(argparse.Action):
    """Print what completes `rankwise run` in a shell."""

    def __call__(
        self, parser: argparse.ArgumentParser, _namespace: object, shell: object, flag: str | None = None
    ) -> None:
        try:
            shtab = import_module("shtab")
        except ImportError:
            raise UsageError(f"{flag}: shtab is not installed", hint="pip install shtab") from None
        if shell not in shtab.SUPPORTED_SHELLS:
            raise UsageError(f"{flag}: shtab knows no shell {shell!r}", hint=", ".join(shtab.SUPPORTED_SHELLS))
        command = argparse.ArgumentParser(prog="rankwise")
        command.add_subparsers().add_parser("run", help="start a script", parents=[parser], add_help=False)
        sys.stdout.write(shtab.complete(command, shell=str(shell)) + "\n")
        parser.exit()


@final
class _Adder:
    """Adds a flag in both spellings, with its PET_* variable as the default."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def value(
        self,
        group: argparse._ArgumentGroup,
        name: str,
        default: object,
        text: str,
        *,
        kind: Callable[[str], object] = str,
        short: str | None = None,
        choices: tuple[str, ...] | None = None,
    ) -> None:
        variable = f"PET_{name.upper().replace('-', '_')}"
        if variable in self._env:
            raw = self._env[variable]
            try:
                default = kind(raw)
            except ValueError:
                raise UsageError(f"{variable}={raw!r} is not a valid value for --{name}") from None
            if choices and raw not in choices:
                raise UsageError(f"{variable}={raw!r} is not one of {', '.join(choices)}")
        group.add_argument(*_spellings(name, short), default=default, type=kind, choices=choices, help=text)

    def flag(self, group: argparse._ArgumentGroup, name: str, short: str | None, text: str) -> None:
        variable = f"PET_{name.upper().replace('-', '_')}"
        try:
            default = bool(int(self._env.get(variable, "0")))
        except ValueError:
            raise UsageError(f"{variable}={self._env[variable]!r}: expected 0 or 1") from None
        group.add_argument(*_spellings(name, short), action="store_true", default=default, help=text)


def _spellings(name: str, short: str | None) -> list[str]:
    return [*([short] if short else []), *dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))]
