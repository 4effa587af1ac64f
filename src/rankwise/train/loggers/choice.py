"""Which loggers a run has by default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base import environ

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rankwise.train.events import Logger


def choose_loggers(folder: Path | None, others: Iterable[Logger], *, progress: bool) -> list[Logger]:
    """Return the loggers of rank 0; only there are they imported.

    Args:
        folder: Where files go; None: none are written.
        others: Those that the user has given.
        progress: Whether to show how it goes.
    """
    chosen: list[Logger] = []
    if progress:
        from rankwise.train.loggers.progress import Progress  # noqa: PLC0415 - the other ranks do without

        chosen.append(Progress())
    if environ.get("KUBEFLOW_TRAINER_SERVER_URL"):
        from rankwise.train.loggers.kubeflow import KubeflowStatus  # noqa: PLC0415 - as above

        chosen.append(KubeflowStatus())
    if folder is not None:
        from rankwise.train.loggers.csv_lines import CsvLines  # noqa: PLC0415 - as above
        from rankwise.train.loggers.curves import Curves  # noqa: PLC0415 - as above
        from rankwise.train.loggers.json_lines import JsonLines  # noqa: PLC0415 - as above

        folder.mkdir(parents=True, exist_ok=True)
        # The journal first: the curves are drawn from it.
        chosen += [
            JsonLines(folder / "journal.jsonl"),
            CsvLines(folder / "steps.csv"),
            Curves(folder / "curves.svg"),
        ]
    return [*chosen, *others]
