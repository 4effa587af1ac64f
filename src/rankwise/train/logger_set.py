"""Those that a training tells of itself, on rank 0: one that fails is left out, and the training goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from rankwise.base.log import get_logger
from rankwise.train.events import Logger
from rankwise.train.loggers.choice import choose_loggers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rankwise.train.events import Ended, Evaluated, Report, Started

_LOGGER = get_logger(__name__)


@final
class LoggerSet:
    """The loggers of a run; on other ranks than 0 there are none.

    Args:
        folder: Where files go; None: none are written.
        loggers: Those of the user.
        progress: Whether to show how it goes.
        is_main: Whether this is rank 0.
    """

    def __init__(self, folder: Path | None, loggers: Iterable[Logger], *, progress: bool, is_main: bool) -> None:
        self._wanted = (folder, tuple(loggers), progress)
        self._is_main = is_main
        self._loggers: list[Logger] = []
        self._at_step: list[Logger] = []

    def on_start(self, started: Started) -> None:
        """Tell how it begins; now the loggers are made."""
        if self._is_main:
            folder, loggers, progress = self._wanted
            self._loggers = choose_loggers(folder, loggers, progress=progress)
            self._tell("on_start", started)
            self._at_step = [one for one in self._loggers if _hears_steps(one)]

    def on_step(self, step: int) -> None:
        """Tell that a step is done."""
        for logger in self._at_step:
            self._call(logger, "on_step", step)

    def on_report(self, report: Report) -> None:
        """Tell of some steps."""
        self._tell("on_report", report)

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Tell of an evaluation."""
        self._tell("on_evaluation", evaluated)

    def on_end(self, ended: Ended) -> None:
        """Tell how it ends, once."""
        self._tell("on_end", ended)
        self._loggers, self._at_step = [], []

    def _tell(self, method: str, event: object) -> None:
        for logger in list(self._loggers):
            self._call(logger, method, event)

    def _call(self, logger: Logger, method: str, event: object) -> None:
        try:
            getattr(logger, method)(event)
        except Exception as error:  # noqa: BLE001 - a dashboard that is away must not end a training of days
            self._loggers = [one for one in self._loggers if one is not logger]
            self._at_step = [one for one in self._at_step if one is not logger]
            _LOGGER.warning(
                f"the logger {type(logger).__name__} failed, and is not called any more: {type(error).__name__}: {error}"
            )


def _hears_steps(logger: Logger) -> bool:
    """Whether a logger does something at each step: the protocol's own method does nothing."""
    method = getattr(type(logger), "on_step", None)
    return method is not None and method is not Logger.on_step
