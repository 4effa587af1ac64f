"""`rankwise submit`: the same job on a scheduler, over ssh, or here."""

from __future__ import annotations

import itertools
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rankwise.base import terminal
from rankwise.base.errors import UsageError
from rankwise.base.flags import Parser
from rankwise.base.requeue import REQUEUE
from rankwise.cli.printing import put
from rankwise.cluster import job, submission
from rankwise.launcher.submit import check_launch

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from rankwise.cluster.cluster import JobState
    from rankwise.cluster.job_fields import Word
    from rankwise.cluster.submission import JobHandle

_DEFAULT = Path("job.toml")
#: What `rankwise run` and schedulers call it.
_ALIASES = {
    **dict.fromkeys(("nnodes", "num-nodes", "num-machines"), "--nodes"),
    **dict.fromkeys(("nproc-per-node", "nproc", "ntasks-per-node", "num-processes"), "--ranks-per-node"),
    **dict.fromkeys(("gpus", "num-gpus", "gres"), "--gpus-per-node"),
    **dict.fromkeys(("cpus-per-task", "cpus"), "--cpus-per-node"),
    "mem": "--memory", "time-limit": "--time", "job-name": "--name", "chdir": "--workdir", "container-image": "--image",
}  # fmt: skip
_WITH = "Its words, where they stand below [{0}] in the file, or as flags with --on {0}."


def main(argv: Sequence[str]) -> int:
    """Submit a job, or show what would be submitted; return the exit code."""
    before, after = split_command(argv)
    first = build_parser(None).parse_known_args(before)[0]
    path = first.file or (_DEFAULT if _DEFAULT.is_file() else None)
    on = first.on or (job.load_file(path).get("on") if path else None)
    args = _parse(build_parser(on if on in job.CLUSTERS else None), before)
    flags = {name: value for name, value in vars(args).items() if name not in {"file", "attach", "dry_run"}}
    flags["command"] = [*args.command, *after]
    spec = submission.read_job(path, flags)
    check_launch(spec)
    if args.dry_run:
        for document in submission.render(spec):
            # A script's first line must stay the first, for sbatch.
            title = "" if document.text.startswith("#!") else f"# {document.name}\n"
            put(title + document.text)
        return 0
    stays = submission.find_cluster(spec.on).stays(spec) if args.attach is None else args.attach
    handle = submission.submit_spec(spec, attach=stays)
    _say(f"job {handle.id} is submitted" + (f" as {handle.record.native_id}" if handle.record.native_id else ""))
    if stays:
        return follow(handle)
    put(f"{handle.id}\n")
    return 0


def _parse(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    try:
        return parser.parse_args(words)
    except UsageError as error:
        name = (
            error.message.partition("unrecognized arguments: --")[2].split(" ")[0].partition("=")[0].replace("-", "_")
        )
        if others := [one for one in job.CLUSTERS if name in _find_words(one)]:
            error.hint = f"it is a word of {' and '.join(others)}: --on {others[0]}, or leave it out"
        elif name and "did you mean" not in str(error.hint):
            error.hint = "flags of the script, and of `rankwise run`, stand behind --"
        raise


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what stands before the first ``--``, and what stands behind it."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def build_parser(on: str | None) -> Parser:
    """Return the parser; with the words of one kind of cluster as flags, or with those of all in its help."""
    parser = Parser(
        prog="rankwise submit",
        usage="rankwise submit --on local|ssh|slurm|kubernetes|ray [flags] -- train.py [the script's own arguments]",
        allow_abbrev=False,
        aliases=_ALIASES,
        description="Submit a training script to a cluster. What is said here can stand in job.toml, too, with the same words; flags win.",
        epilog="What stands behind -- is what `rankwise run` gets on each node, its flags included: -- --max-restarts 3 train.py",
    )
    parser.add_argument("--file", type=Path, metavar="FILE", help="The job file (default: job.toml, if it is there).")
    parser.add_argument(
        "--dry-run", action="store_true", help="Print exactly what would be submitted, and submit nothing."
    )
    parser.add_argument(
        "--attach",
        dest="attach",
        action="store_true",
        default=None,
        help="Stay, show the log, and end the job with Ctrl-C; the default on local, over ssh, and inside an allocation of Slurm.",
    )
    parser.add_argument(
        "--detach", dest="attach", action="store_false", help="Leave the job alone once it is submitted."
    )
    common = parser.add_argument_group("the job")
    for name, word in job.WORDS.items():
        if name != "command":
            _add(common, name, word)
    for cluster in [on] if on else job.CLUSTERS:
        words = _find_words(cluster)
        if not words:
            continue
        group = parser.add_argument_group(cluster, None if on else _WITH.format(cluster))
        for name, word in words.items():
            if on or not any(f"--{name}" in action.option_strings for action in parser._actions):
                _add(group, name, word)
    parser.add_argument("command", nargs="*", metavar="train.py …", help="The script and its arguments.")
    return parser


def _find_words(cluster: str) -> Mapping[str, Word]:
    try:
        return submission.find_cluster(cluster).WORDS
    except UsageError:
        return {}


def _add(group: argparse._ArgumentGroup, name: str, word: Word) -> None:
    flags = list(dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")))
    text = word.help.replace("%", "%%")
    if word.kind == "switch":
        group.add_argument(*flags, action="store_true", default=None, help=text)
        return
    several = word.kind in {"list", "table"}
    metavar = word.metavar or ("|".join(word.choices) if word.choices else "VALUE")
    group.add_argument(
        *flags,
        action="append" if several else "store",
        metavar=metavar,
        help=text + (" May be repeated." if several else ""),
    )


def follow(handle: JobHandle) -> int:
    """Show a job's log until it is over, and return its exit code; Ctrl-C tells it to stop, and the second one kills it."""
    signal.signal(signal.SIGTERM, _interrupt)
    num_shown, state = 0, None
    while state is None:
        try:
            for line in itertools.islice(handle.logs(follow=True), num_shown, None):
                num_shown += 1
                put(line + "\n")
            state = handle.wait()
        except KeyboardInterrupt:
            _say(f"job {handle.id} is told to stop")
            handle.cancel()
    if state.phase != "succeeded":
        _say(f"job {handle.id} {say_state(state)}")
    return find_exit_code(state)


def say_state(state: JobState) -> str:
    """Return a state as what follows a job's name."""
    verbs = {
        "waiting": "waits",
        "running": "runs",
        "unknown": "is unknown",
        "stopped": "has stopped, and can be resumed",
        "cancelled": "is cancelled",
    }
    return verbs.get(state.phase, f"has {state.phase}") + (f": {state.reason}" if state.reason else "")


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def find_exit_code(state: JobState) -> int:
    """Return what the command exits with for a job that is over."""
    if state.exit_code is not None:
        return state.exit_code
    return {"succeeded": 0, "stopped": REQUEUE, "cancelled": 130}.get(state.phase, 1)


def _say(text: str) -> None:
    print(terminal.wrap(f"rankwise: {text}", terminal.width(2)), file=sys.stderr, flush=True)
