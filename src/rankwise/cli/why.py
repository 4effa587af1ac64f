"""`rankwise why PID`: which rank of a job that runs right now keeps the others waiting, whoever has started it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.flags import Parser
from rankwise.evidence.reader.live_ranks import find_ranks, take_scene
from rankwise.launcher.console import Console
from rankwise.verdict.judge_scene import can_tell, judge_scene, say, say_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXIT_CODES = "exit codes: 0 nothing is stuck; 1 something is; 2 it can't be seen"


def main(argv: Sequence[str]) -> int:
    """Look at the ranks for a second, judge, show; return the exit code."""
    parser = Parser(
        prog="rankwise why", description="Show which rank of a running job keeps the others waiting. The ranks run on, undisturbed.",
        epilog=_EXIT_CODES,
    )  # fmt: skip
    parser.add_argument(
        "pid", type=int, metavar="PID", help="Of torchrun, srun's step or another launcher, or of one rank."
    )
    parser.add_argument("--json", action="store_true", help="Print the verdict as JSON, as `rankwise report --json`.")
    args = parser.parse_args(list(argv))
    ranks = find_ranks(args.pid)
    scene, unseen = take_scene(ranks, SYSTEM_CLOCK)
    ours = ("these ranks run under `rankwise run` or `rankwise.watch`: what they have recorded counts, too",)
    notes = (say_ranks(scene), *(ours if any(one.is_ours for one in ranks) else ()), *unseen)
    verdict = judge_scene(scene, notes)
    code = 1 if verdict.kind != "ok" else 0 if can_tell(scene) else 2
    print(
        json.dumps({**verdict.to_json(), "exit_code": code}, indent=1)
        if args.json
        else say(verdict, is_now=True, width=Console.width(1))
    )
    return code
