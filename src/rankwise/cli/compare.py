"""`rankwise compare`: where two runs diverge, how, and why that may be."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import CheckpointError, UsageError
from rankwise.base.flags import Parser
from rankwise.cli.compare_text import Pair, render, tell_verdict
from rankwise.cli.printing import put
from rankwise.train.comparison.parameters import choose_checkpoints
from rankwise.train.comparison.reasons import explain
from rankwise.train.comparison.runs import compare
from rankwise.train.journal import Journal, read_journal

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_EXIT_CODES = "exit codes: 0 they agree within the tolerance; 1 they diverge; 2 the command is wrong, or there is nothing to compare"


def main(argv: Sequence[str]) -> int:
    """Compare runs; return the exit code."""
    arguments = _build_parser().parse_args(argv)
    if len(arguments.runs) < 2:
        raise UsageError(f"there is one run only: {arguments.runs[0]}", hint="rankwise compare RUN RUN")
    first, *others = [read_journal(run) for run in arguments.runs]
    pairs = [_make_pair(first, other, arguments.tolerance) for other in others]
    if arguments.plot is not None:
        import_module("rankwise.train.comparison.plot").draw(
            first, [(one.b, one.comparison) for one in pairs], arguments.plot
        )
    text = (
        json.dumps([_as_json(one) for one in pairs], indent=1)
        if arguments.format == "json"
        else "\n\n\n".join(map(render, pairs))
    )
    put(f"{text}\n")  # whether or not anybody reads it to the end: the verdict stands
    return 0 if all(one.comparison.agree for one in pairs) else 1


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "rankwise compare",
        description="Show where runs diverge: each against the first. Needs no torch, except for their checkpoints.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument(
        "runs", metavar="RUN", type=Path, nargs="+", help="a run's folder, or its journal.jsonl; two or more"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest relative difference that counts as agreement (default: 1e-9 for float64, 1e-4 for fp32, 1e-2 for bf16 and fp16)",
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw losses and differences; .svg, .png or .pdf")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    return parser


def _make_pair(a: Journal, b: Journal, tolerance: float | None) -> Pair:
    comparison, notes = compare(a, b, tolerance=tolerance), list[str]()
    checkpoints: list[Any] = []
    try:
        divergence = comparison.losses.divergence
        chosen = choose_checkpoints(a, b, divergence.step if divergence else None)
        # By its name: what needs torch is imported only where there is something to read.
        weights = import_module("rankwise.train.comparison.checkpoints") if chosen else None
        checkpoints = [weights.compare_checkpoints(*one) for one in chosen] if weights else []
    except ModuleNotFoundError as error:
        notes.append(f"their checkpoints were not compared: this Python can't import torch ({error})")
    except CheckpointError as error:
        notes.append(f"their checkpoints were not compared: {error.message}")
    return Pair(
        a=a, b=b, comparison=comparison, checkpoints=checkpoints, reasons=explain(comparison, a, b), notes=notes
    )


def _as_json(pair: Pair) -> Any:
    return _plain({
        "a": _describe(pair.a), "b": _describe(pair.b), "agree": pair.comparison.agree, "verdict": tell_verdict(pair.comparison, pair.reasons),
        "comparison": asdict(pair.comparison), "checkpoints": [asdict(one) for one in pair.checkpoints],
        "reasons": [asdict(one) for one in pair.reasons], "notes": list(pair.notes),
    })  # fmt: skip


def _describe(run: Journal) -> dict[str, Any]:
    starts = [
        {
            "time": one.time,
            "step": one.started.step,
            "ranks": one.started.world_size,
            "global_batch": one.started.global_batch,
            "settings": dict(one.started.settings),
        }
        for one in run.starts
    ]
    return {
        "path": str(run.path),
        "last_step": run.last_step,
        "starts": starts,
        "ended": run.ended.reason if run.ended else None,
    }


def _plain(value: Any) -> Any:
    """Return a value that is valid JSON: what is not finite as a text, as journals have it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        # A point of a series has names for its places.
        return _plain(value._asdict()) if hasattr(value, "_asdict") else [_plain(one) for one in value]
    return value
