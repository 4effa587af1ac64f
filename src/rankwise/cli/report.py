"""`rankwise report`: the verdict on a job again, from its evidence folder or from others' dumps alone, on any day and any machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import UsageError
from rankwise.base.flags import Parser
from rankwise.evidence.reader import external_dumps, offline
from rankwise.launcher.console import Console
from rankwise.verdict import evidence_folder
from rankwise.verdict.first_failure import judge
from rankwise.verdict.judge_offline import judge_offline_run
from rankwise.verdict.judge_scene import judge_scene, say
from rankwise.verdict.report import render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.verdict.case import Verdict


def main(argv: Sequence[str]) -> int:
    """Read the folder, judge, show; return the exit code."""
    parser = Parser(
        prog="rankwise report",
        description="Judge a job again from its evidence folder, or from dumps of its ranks.",
    )
    parser.add_argument(
        "paths", metavar="PATH", type=Path, nargs="+",
        help="The folder that the report named, or the folder of logs above it; or dumps of torch's flight recorder or of py-spy, "
        "one file for each rank, or a folder of them; or the folder that `python -m rankwise.watch` has named, each host's if each has its own.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="Print what --report writes.")
    args = parser.parse_args(list(argv))
    for path in args.paths:
        if path.suffix == ".py" and path.is_file():
            raise UsageError(
                f"{path} is a script, and no evidence of a run",
                hint=f"rankwise run {path}, or rankwise check {path}",
            )
    evidence, text, verdict = _judge(args.paths)
    if args.json:
        print(json.dumps({**verdict.to_json(), "evidence": str(evidence)}, indent=1))
    else:
        print(text)
    return 0


def _judge(paths: Sequence[Path]) -> tuple[Path, str, Verdict]:
    """Return where the evidence is, the verdict as text, and the verdict."""
    width = Console.width(1)
    if offline.has_any(paths):
        found = offline.read(paths, SYSTEM_CLOCK)
        verdict = judge_offline_run(found)
        is_now = any(one.how == "lives" for one in found.ranks)
        return found.folder, say(verdict, is_now=is_now, width=width), verdict
    ours = _find_ours(paths)
    if ours is not None:
        case = evidence_folder.load(ours)
        verdict = judge(case)
        return ours, render(verdict, attempt=case.attempt, width=width), verdict
    dumps = external_dumps.read(paths)
    verdict = judge_scene(dumps.scene, dumps.notes, has_hung=True)
    return paths[0], say(verdict, width=width), verdict


def _find_ours(paths: Sequence[Path]) -> Path | None:
    """Return the evidence folder that is meant; None if dumps are."""
    if len(paths) > 1 or paths[0].is_file():
        return None
    try:
        return evidence_folder.find(paths[0])
    except UsageError:
        if not paths[0].is_dir() or not external_dumps.has_dumps(paths[0]):
            raise
        return None
