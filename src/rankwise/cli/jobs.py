"""`rankwise jobs`, `logs` and `cancel`: the jobs that were submitted from here."""

from __future__ import annotations

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from rankwise.base import terminal
from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import RankwiseError
from rankwise.base.flags import Parser
from rankwise.cli.printing import put
from rankwise.cli.submit import say_state
from rankwise.cluster import handles
from rankwise.cluster.cluster import JobState
from rankwise.cluster.submission import JobHandle
from rankwise.doctor.units import align, format_age, format_count

_AT_ONCE = 8

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.cluster.handles import JobRecord


def main(argv: Sequence[str]) -> int:
    """List jobs; return the exit code."""
    parser = Parser(
        prog="rankwise jobs",
        description="The jobs that you have submitted from this machine, and what has become of them, as their schedulers say now.",
    )
    parser.add_argument(
        "job", nargs="*", metavar="JOB", help="Only these: an id, its beginning, the scheduler's id, or a name."
    )
    parser.add_argument(
        "--forget", action="store_true", help="Remove the records, and the logs, of those that are over."
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="How to print them.")
    args = parser.parse_args(argv)
    records = [handles.find_record(text) for text in args.job] or handles.list_records()
    with ThreadPoolExecutor(_AT_ONCE) as pool:  # a scheduler that does not answer holds up no other
        found = list(zip(records, pool.map(_ask, records), strict=True))
    if args.forget:
        # Nobody knows that a job is over which nobody knows now; who names it knows better.
        over = [record for record, state in found if state.is_over and (state.phase != "unknown" or args.job)]
        for record in over:
            shutil.rmtree(record.folder, ignore_errors=True)
        kept = [f"{record.id} is kept: it {say_state(state)}\n" for record, state in found if record not in over]
        put("".join([*kept, f"{format_count(len(over), 'job')} forgotten\n"]))
        return 0
    if args.format == "json":
        put(json.dumps([_describe(*one) for one in found], indent=1) + "\n")
        return 0
    if not found:
        put("no job has been submitted from here: `rankwise submit --help` says how\n")
        return 0
    rows = [("job", "on", "scheduler's id", "age", "state")]
    rows += [
        (one.id, one.on, one.native_id or "-", format_age(SYSTEM_CLOCK.time() - one.submitted_s), say_state(state))
        for one, state in found
    ]
    put(terminal.wrap("\n".join([*align(rows), ""]), terminal.width(1)))
    return 0


def main_logs(argv: Sequence[str]) -> int:
    """Print the log of a job; return the exit code."""
    parser = Parser(
        prog="rankwise logs",
        description="What the ranks of a job have printed, on all nodes, and their launchers' reports.",
    )
    parser.add_argument("job", metavar="JOB", help="An id, its beginning, the scheduler's id, or a name.")
    parser.add_argument("--rank", type=int, metavar="N", help="Only the lines of this rank.")
    parser.add_argument("--follow", "-f", action="store_true", help="Wait for more until the job is over.")
    args = parser.parse_args(argv)
    if args.rank is not None and args.rank < 0:
        parser.error(f"--rank {args.rank}: ranks are counted from 0")
    handle, has_lines = JobHandle(handles.find_record(args.job)), False
    for line in handle.logs(rank=args.rank, follow=args.follow):
        has_lines = True
        if not put(line + "\n"):
            break  # whoever has read it has ended, as head does
    if not has_lines:
        whose = "" if args.rank is None else f"rank {args.rank} of "
        print(
            f"rankwise: {whose}job {handle.id} has printed nothing; it {say_state(_ask(handle.record))}",
            file=sys.stderr,
        )
    return 0


def main_cancel(argv: Sequence[str]) -> int:
    """End jobs; return the exit code."""
    parser = Parser(
        prog="rankwise cancel",
        description="End jobs. Their ranks get SIGTERM first, and time to save: those that call `should_stop()` can be resumed later.",
    )
    parser.add_argument("job", nargs="+", metavar="JOB", help="An id, its beginning, the scheduler's id, or a name.")
    for record in [handles.find_record(text) for text in parser.parse_args(argv).job]:
        handle, state = JobHandle(record), _ask(record)
        if state.is_over and state.phase != "unknown":
            put(f"{record.id} is over already: it {say_state(state)}\n")
            continue
        handle.cancel()
        put(f"{record.id} is told to stop\n")
    return 0


def _ask(record: JobRecord) -> JobState:
    try:
        return JobHandle(record).state()
    except RankwiseError as error:  # a scheduler that does not answer hides no other job
        return JobState(phase="unknown", reason=f"not known now: {error.message}")


def _describe(record: JobRecord, state: JobState) -> dict[str, object]:
    return {
        "id": record.id, "name": record.name, "on": record.on, "native_id": record.native_id, "submitted_s": record.submitted_s,
        "phase": state.phase, "exit_code": state.exit_code, "reason": state.reason, "starts": state.starts, "folder": str(record.folder),
    }  # fmt: skip
