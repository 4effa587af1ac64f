"""Take part in a training: called on every rank, at the same steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankwise.train.events import Ended, Evaluated, Report, Started
    from rankwise.train.trainer import Trainer


class Callback:
    """What a user adds to the loop; derive from it, and override the methods that are needed.

    All methods are called on all ranks, so they may call collectives; to print, check ``trainer.ctx.is_main``,
    and what only records is better a ``Logger``. To end the training, call ``trainer.stop(reason)``, on one rank or on
    all.
    """

    def on_start(self, trainer: Trainer, started: Started) -> None:
        """Called before the first step, after the checkpoint was loaded.

        Args:
            trainer: Whose ``fit()`` is running.
            started: How it begins, or continues.
        """

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        """Called when a step's gradients are complete, averaged over the ranks and unscaled; before they are clipped and the weights moved.

        Args:
            trainer: Whose ``fit()`` is running; ``trainer.step`` steps are done.
        """

    def on_step(self, trainer: Trainer, step: int) -> None:
        """Called after each optimizer step.

        Args:
            trainer: Whose ``fit()`` is running.
            step: Optimizer steps done.
        """

    def on_report(self, trainer: Trainer, report: Report) -> None:
        """Called every ``log_every`` steps, a step later, with numbers that are equal on all ranks.

        Args:
            trainer: Whose ``fit()`` is running.
            report: What happened since the last one.
        """

    def on_evaluation(self, trainer: Trainer, evaluated: Evaluated) -> None:
        """Called after each evaluation.

        Args:
            trainer: Whose ``fit()`` is running.
            evaluated: Its result, equal on all ranks.
        """

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        """Called after the last step of an epoch, before it is evaluated and saved.

        Args:
            trainer: Whose ``fit()`` is running.
            epoch: The epoch that is over, from 0.
        """

    def on_checkpoint(self, trainer: Trainer, step: int) -> None:
        """Called before a checkpoint is written; what ``state_dict`` returns goes into it.

        Args:
            trainer: Whose ``fit()`` is running.
            step: Optimizer steps done.
        """

    def on_end(self, trainer: Trainer, ended: Ended) -> None:
        """Called once after the last step; not after an error.

        Args:
            trainer: Whose ``fit()`` is running.
            ended: How it ended.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what must outlive the process; nothing by default."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state: What ``state_dict`` has returned.
        """
