"""Runs that never trained: their journals, as the logger of a training writes them."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

from rankwise.train.events import Ended, Evaluated, Report, Started
from rankwise.train.loggers.json_lines import JsonLines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SETTINGS = {"precision": "fp32", "dtype": "float32", "device": "cpu", "seed": 0, "sync_batchnorm": False}


def make_losses(num: int, *, seed: int = 0) -> list[float]:
    """Return losses that fall, with some noise, as those of a training do."""
    noise = random.Random(seed)
    return [2.3 * math.exp(-step / 80) + 0.05 * noise.random() for step in range(1, num + 1)]


def write_run(
    folder: Path,
    losses: Sequence[float],
    *,
    start: int = 0,
    ranks: int = 1,
    global_batch: int = 48,
    lr: float = 0.1,
    settings: Mapping[str, Any] | None = None,
    digests: Mapping[str, str] | None = None,
    norms: Mapping[int, Mapping[str, float]] | None = None,
    metrics: Mapping[int, Mapping[str, float]] | None = None,
    grad_norms: Sequence[float] = (),
    every: int = 10,
    reason: str | None = "done",
) -> Path:
    """Write, or go on with, the journal of a run; return its folder.

    Args:
        folder: Of the run.
        losses: Of the steps after ``start``.
        start: The step that it goes on from.
        ranks: How many.
        global_batch: Samples of a step.
        lr: The learning rate of all steps.
        settings: Beside the usual ones.
        digests: Of the parameters at this start.
        norms: Of the parameters, by step; told in the report that holds the step.
        metrics: Of the evaluations, by step.
        grad_norms: Of these steps.
        every: Steps between two reports.
        reason: How it ended; None: it was killed.
    """
    log = JsonLines(folder / "journal.jsonl")
    log.on_start(
        Started(step=start, num_steps=start + len(losses), epoch=0, num_epochs=None, world_size=ranks, global_batch=global_batch,
                settings={**SETTINGS, "folder": str(folder), **(settings or {})}, digests=digests or {})
    )  # fmt: skip
    for begin in range(0, len(losses), every):
        part = tuple(losses[begin : begin + every])
        step = start + begin + len(part)
        log.on_report(
            Report(step=step, epoch=0, loss=sum(part) / len(part), losses=part, lrs=(lr,) * len(part), grad_norms=tuple(grad_norms[begin : begin + every]),
                   metrics={"accuracy": 0.5}, samples=step * global_batch, samples_per_s=1e3, elapsed_s=1.0, eta_s=None,
                   norms={at: one for at, one in (norms or {}).items() if step - len(part) < at <= step})
        )  # fmt: skip
        if metrics and step in metrics:
            log.on_evaluation(Evaluated(step=step, epoch=0, metrics=metrics[step], seconds=0.1))
    if reason is not None:
        log.on_end(Ended(step=start + len(losses), epoch=0, reason=reason, is_over=True, elapsed_s=2.0))
    return folder
