"""The loop that everyone writes, written once: the Trainer, its parts for loops of one's own, and what listens to them.

Names are loaded on first use: reading a run's journal needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.lazy import find_homes, make_getattr

if TYPE_CHECKING:
    from rankwise.data.sample_position import placed as placed
    from rankwise.train.dropout import (
        GlobalDropout as GlobalDropout,
        replace_dropout as replace_dropout,
        same_masks as same_masks,
    )
    from rankwise.train.evaluating import Evaluation as Evaluation
    from rankwise.train.events import (
        Ended as Ended,
        Evaluated as Evaluated,
        Logger as Logger,
        Report as Report,
        Started as Started,
    )
    from rankwise.train.journal import Journal as Journal, read_journal as read_journal
    from rankwise.train.loggers.csv_lines import CsvLines as CsvLines
    from rankwise.train.loggers.curves import Curves as Curves
    from rankwise.train.loggers.json_lines import JsonLines as JsonLines
    from rankwise.train.loggers.progress import Progress as Progress
    from rankwise.train.loggers.tensorboard import TensorBoard as TensorBoard
    from rankwise.train.loggers.wandb import WandB as WandB
    from rankwise.train.optimizers import choose_fused as choose_fused
    from rankwise.train.tracking import Track as Track
    from rankwise.train.trainer import Callback as Callback

_NAMES = {
    "rankwise.data.sample_position": "placed",
    "rankwise.train.trainer": "Callback",
    "rankwise.train.dropout": "GlobalDropout replace_dropout same_masks",
    "rankwise.train.evaluating": "Evaluation",
    "rankwise.train.events": "Ended Evaluated Logger Report Started",
    "rankwise.train.journal": "Journal read_journal",
    "rankwise.train.loggers.csv_lines": "CsvLines",
    "rankwise.train.loggers.curves": "Curves",
    "rankwise.train.loggers.json_lines": "JsonLines",
    "rankwise.train.loggers.progress": "Progress",
    "rankwise.train.loggers.tensorboard": "TensorBoard",
    "rankwise.train.loggers.wandb": "WandB",
    "rankwise.train.optimizers": "choose_fused",
    "rankwise.train.tracking": "Track",
}
_HOME = find_homes(_NAMES)

__all__ = [*_HOME]  # noqa: PLE0604 - strings all


__getattr__ = make_getattr(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
