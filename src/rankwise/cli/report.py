"""`rankwise report`: the verdict on a job again, from its evidence folder or from others' dumps alone, on any day and any machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.errors import UsageError
from rankwise.evidence import foreign
from rankwise.verdict import evidence_folder
from rankwise.verdict.bystander import judge_scene, say
from rankwise.verdict.judge import judge
from rankwise.verdict.report import render

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Read the folder, judge, show; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="rankwise report",
        description="Judge a job again from its evidence folder, or from dumps of its ranks.",
    )
    parser.add_argument(
        "paths", metavar="PATH", type=Path, nargs="+",
        help="The folder that the report named, or the folder of logs above it; or dumps of torch's flight recorder or of py-spy, "
        "one file for each rank, or a folder of them.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="Print what --report writes.")
    args = parser.parse_args(list(argv))
    ours = _find_ours(args.paths)
    if ours is not None:
        case = evidence_folder.load(ours)
        verdict, attempt = judge(case), case.attempt
    else:
        found = foreign.read(args.paths)
        verdict, attempt = judge_scene(found.scene, found.notes, has_hung=True), 0
    if args.json:
        print(json.dumps({**verdict.to_json(), "evidence": str(ours or args.paths[0])}, indent=1))
    else:
        print(say(verdict) if ours is None else render(verdict, attempt=attempt))
    return 0


def _find_ours(paths: Sequence[Path]) -> Path | None:
    """Return the evidence folder that is meant; None if dumps are."""
    if len(paths) > 1 or paths[0].is_file():
        return None
    try:
        return evidence_folder.find(paths[0])
    except UsageError:
        if not paths[0].is_dir() or not foreign.has_dumps(paths[0]):
            raise
        return None
