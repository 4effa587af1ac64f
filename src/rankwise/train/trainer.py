"""The loop that everyone writes, written once: fit, report, evaluate, save, go on, on any number of ranks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from torch.optim.lr_scheduler import ReduceLROnPlateau

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import DataError, UsageError
from rankwise.base.log import get_logger
from rankwise.parallel.model_check import check_replicas
from rankwise.runtime.context import current
from rankwise.train.arguments import check_arguments
from rankwise.train.batch_dependent_layers import warn_of_batch_dependent_layers
from rankwise.train.config import list_choices
from rankwise.train.evaluating import Best
from rankwise.train.saving import Checkpoints
from rankwise.train.settings import read_options, tell_unused
from rankwise.train.stepping import Stepping, check_finite
from rankwise.train.tracking import Track

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from rankwise.data.loader import DataLoader
    from rankwise.data.steps import Step
    from rankwise.runtime.context import RankContext
    from rankwise.train.config import Every, TrainerConfig
    from rankwise.train.evaluating import Evaluation
    from rankwise.train.events import Ended, Evaluated, Logger, Report, Started

_LOGGER = get_logger(__name__)


#: As a shell shows a process that SIGTERM has ended.
_TERMINATED = 128 + 15


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


@final
class Trainer:
    """Trains a model on all ranks as one process would train it, and continues where it was stopped.

    With a folder: it loads the latest checkpoint there, whatever the number of ranks was, saves in the background, and
        stops in time on a
    scheduler's notice (see ``ctx.should_stop``). Rank 0 writes journal.jsonl, the tables steps.csv, reports.csv and
    evaluations.csv, and curves.svg there.

    Args:
        model: On any device, or wrapped by ``apply_ddp`` with options of your own.
        optimizer: Over the model's parameters.
        loader: The training data, split by global batches.
        loss: Takes the model and a batch, and returns the mean loss over the batch's samples; or ``(sum, count)``, for
            a mean over tokens that are not masked; or a dict of these, where "loss" is trained and the others are
            shown.
        config: How long, how precisely, and what besides.
        folder: Where checkpoints and logs go; None: nothing is saved.
        scheduler: Of the learning rate; stepped once a global step, or as ``config.scheduler_every`` says. One that
            waits for a plateau is stepped with ``config.monitor`` after each evaluation.
        evaluation: What to evaluate, exactly, over all ranks.
        callbacks: Called on every rank.
        loggers: Called on rank 0.
        ctx: The job; None: the one that ``init()`` joined.

    Attributes:
        ctx: The job.
        ddp: The model as it is called: wrapped, where it is spread by DDP.
        model: The model itself.
        optimizer: As given.
        scheduler: As given.
        loader: As given.
        config: As given.
        track: Counts steps and notifies the loggers.
        best: The best value of the monitor so far.

    Raises:
        UsageError: Arguments that don't fit together.
        ModelError: The model differs between ranks or can't be trained; see ``apply_ddp``.

    Collective: every rank, with the same arguments.
    """

    def __init__(  # noqa: PLR0913 - most calls give six
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: DataLoader,
        loss: Callable[[nn.Module, Any], Any],
        *,
        config: TrainerConfig,
        folder: str | Path | None = None,
        scheduler: Any = None,
        evaluation: Evaluation | None = None,
        callbacks: Iterable[Callback] = (),
        loggers: Iterable[Logger] = (),
        ctx: RankContext | None = None,
    ) -> None:
        self.ctx, callbacks, loggers = ctx or current(), tuple(callbacks), tuple(loggers)
        check_arguments(
            loader, loss, config, optimizer=optimizer, scheduler=scheduler, evaluation=evaluation,
            callback_type=Callback, callbacks=callbacks, loggers=loggers, ctx=self.ctx,
        )  # fmt: skip
        self.config, self.loader, self.scheduler, self.evaluation = config, loader, scheduler, evaluation
        self.callbacks, self._checkpoints = callbacks, Checkpoints(folder, config)
        self._stepping = Stepping(model, optimizer, loss, config, self.ctx)
        self._strategy = self._stepping.strategy
        self.ddp, self.model, self.optimizer = self._strategy.model, self._strategy.module, optimizer
        self.track = Track(
            loader, optimizer, model=self.model, folder=folder, loggers=loggers, progress=config.progress,
            epochs=config.epochs, steps=config.steps, log_every=config.log_every, norms_every=config.norms_every,
            non_finite="stop" if config.non_finite == "stop" else "keep", settings=config.settings(), ctx=self.ctx,
        )  # fmt: skip
        self.track.on_report = self._hear_report
        self.best = Best(config)
        self._options = read_options(optimizer)
        self._metrics: dict[str, float] = {}
        self._evaluated_step, self._closed_epochs = -1, 0
        # Asked before each step, and hardly ever wanted.
        own = Callback.on_before_optimizer_step
        self._watching = [one for one in callbacks if type(one).on_before_optimizer_step is not own]
        self._reason: str | None = None

    @property
    def step(self) -> int:
        """Optimizer steps done since the beginning of the training."""
        return self.track.steps_done

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self.loader.epoch

    # ---------------------------------------------------------------------- the loop

    def fit(self) -> Ended:
        """Train until ``config`` says that it is over; in a folder, what is left of it.

        Returns:
            How it ended; ``metrics`` and ``best`` hold the results.

        Raises:
            NumericsError: A loss was NaN or infinite; nothing was saved after it.
            CollectiveError: Ranks have different configurations; says which.
            CheckpointError: Another job trains in the folder; raised before anything is written there.
            SystemExit: With ``rankwise.REQUEUE``, after a scheduler's notice: the state is saved, and the job is to be
                started again.

        Collective: every rank.
        """
        with self._running():
            for epoch in self._epochs():
                for step in self._steps():
                    self._stepping.run(step, self.track)
                    self._stepping.move_weights(step, self.track, self._tell_gradients if self._watching else None)
                    self._schedule("step")
                    self._do_what_is_due()
                if self._reason is None:
                    self._close_epoch(epoch)
            self._finish()
            return self.track.end(self._reason or "done", before=self._tell_end)

    def stop(self, reason: str) -> None:
        """Have all ranks end the training after the same step, soon; a call on one rank is enough.

        Args:
            reason: Why; ``fit`` returns it.
        """
        self.ctx.request_stop(reason)

    def evaluate(self) -> dict[str, float]:
        """Evaluate now, and notify callbacks and loggers.

        Returns:
            The metrics, equal on all ranks.

        Collective: every rank.
        """
        if self.evaluation is None:
            raise UsageError(
                "this Trainer has nothing to evaluate",
                hint="Trainer(..., evaluation=rankwise.train.Evaluation(dataset, metrics, batch_size))",
            )
        self._checkpoints.load_once(self._state())
        self.track.flush()
        start_s = SYSTEM_CLOCK.monotonic()
        self._stepping.share_buffers()
        self._metrics = self.evaluation.run(self.model, self._stepping.precision, self.ctx)
        seconds = SYSTEM_CLOCK.monotonic() - start_s
        self._evaluated_step = self.step
        is_best = self.best.judge(self._metrics, self.step)
        # What was saved at this step knows nothing of it.
        self._checkpoints.note(-1)
        self._checkpoints.is_due |= is_best
        evaluated = self.track.evaluated(self._metrics, seconds=seconds, is_best=is_best)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(self._metrics[str(self.config.monitor)])
        for callback in self.callbacks:
            callback.on_evaluation(self, evaluated)
        self._reason = self._reason or self.best.reason_to_stop
        self.track.skip_time()
        return self._metrics

    @property
    def metrics(self) -> dict[str, float]:
        """The result of the last evaluation."""
        return dict(self._metrics)

    # ------------------------------------------------------------- beginning and end

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Load, tell that it begins; and, if it ends by an error, why."""
        if not self.ctx.listens_for_stop:
            self.ctx.listen_for_stop()  # now: the first step may take minutes, if it compiles
        self.ctx.forget_request()
        self._stepping.forget()
        self.ctx.agree(list_choices(self.config), "the TrainerConfig")
        self._checkpoints.begin(self.ctx)
        self._checkpoints.load_once(self._state())
        if not self.model.training:
            self.ddp.train()
        warn_of_batch_dependent_layers(self.model, self.ctx)
        if self.step == 0 and self.config.seed is not None:
            self.ctx.seed(self.config.seed)
        self._checkpoints.note(self.step)
        self._reason = self.best.reason_to_stop
        try:
            started = self.track.start()
            for callback in self.callbacks:
                callback.on_start(self, started)
            yield
        except BaseException as error:
            self.track.abandon(error)
            raise

    def _finish(self) -> None:
        if self.evaluation is not None and self._evaluated_step != self.step:
            self.evaluate()
        self._save()
        self._checkpoints.wait()
        self._check_weights()

    def _tell_end(self, ended: Ended) -> None:
        for callback in self.callbacks:
            callback.on_end(self, ended)

    def _leave(self) -> None:
        """Stop as ``should_stop`` has asked: for good if a rank has wished it, else until the job is started again."""
        if self.ctx.stop_was_requested:
            self._reason = self.ctx.stop_reason
            return
        self._save()
        self.track.end(str(self.ctx.stop_reason), is_over=False)
        if self._checkpoints.folder is not None:
            self.ctx.leave_for_requeue()
        if self.ctx.is_main:
            _LOGGER.info(
                f"stopped after step {self.step} by {self.ctx.stop_reason}; nothing is saved, as the Trainer has no folder"
            )
        raise SystemExit(_TERMINATED)

    # ------------------------------------------------------------------ epochs, steps

    def _epochs(self) -> Iterator[int]:
        num_empty = 0
        # Without epochs, until the steps are done.
        for epoch in self.loader.epochs(self.config.epochs or 1 << 62):
            if self._is_over():
                return
            before = self.step
            yield epoch
            if self._reason is not None:
                return
            # The first may be the empty rest of an epoch that was over when the checkpoint was written.
            num_empty = num_empty + 1 if self.step == before else 0
            if num_empty > 1:
                raise DataError(
                    f"epochs {epoch - 1} and {epoch} had no samples",
                    rank=self.ctx.rank,
                    hint="a data set whose __iter__ gives the same generator again is empty the second time: make a new one there",
                )

    def _steps(self) -> Iterator[Step]:
        for step in self.loader.steps():
            # Asked with the next step in hand, so that an epoch that ends with the last step is closed as well.
            if self._is_over():
                self._reason = self._reason or "done"
                return
            self._save_if_due()
            yield step

    def _is_over(self) -> bool:
        limit = self.config.steps
        return self._reason is not None or (limit is not None and self.step >= limit)

    def _close_epoch(self, epoch: int) -> None:
        # A checkpoint may be of the time after the epoch's end: then its pass is empty, and all this is done.
        if self._closed_epochs <= epoch:
            self._closed_epochs = epoch + 1
            self.track.flush()
            for callback in self.callbacks:
                callback.on_epoch_end(self, epoch)
            self._schedule("epoch")
            if self.config.evaluate_every == "epoch" and self._evaluated_step != self.step:
                self._evaluate_if_any()
            self._checkpoints.is_due |= self.config.save_every == "epoch"
        self._save_if_due()

    def _do_what_is_due(self) -> None:
        for callback in self.callbacks:
            callback.on_step(self, self.step)
        if self._is_due(self.config.evaluate_every):
            self._evaluate_if_any()
        if self._is_due(self.config.check_replicas_every):
            check_replicas(self.ddp, ctx=self.ctx)
        # Not now: after the last step of an epoch the evaluation comes first, so that its result is in the checkpoint.
        self._checkpoints.is_due |= self._is_due(self.config.save_every)
        if self.ctx.should_stop():
            self._leave()

    def _is_due(self, every: Every) -> bool:
        return isinstance(every, int) and self.step % every == 0

    def _evaluate_if_any(self) -> None:
        if self.evaluation is not None:
            self.evaluate()

    def _schedule(self, after: str) -> None:
        is_moved = self.scheduler is not None and self.config.scheduler_every == after
        if is_moved and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()

    def _tell_gradients(self) -> None:
        for callback in self._watching:
            callback.on_before_optimizer_step(self)

    def _hear_report(self, report: Report) -> None:
        for callback in self.callbacks:
            callback.on_report(self, report)

    # ------------------------------------------------------------------- checkpoints

    def _save_if_due(self) -> None:
        if self._checkpoints.is_due:
            self._save(background=True)

    def _save(self, *, background: bool = False) -> None:
        """Save, unless this step is saved; never a state whose losses have not been looked at."""
        self._checkpoints.is_due = False
        self.track.flush()
        if not self._checkpoints.needs(self.step):
            return
        for callback in self.callbacks:
            callback.on_checkpoint(self, self.step)
        self._check_weights()
        metrics = self._metrics if self._evaluated_step == self.step else {}
        self._checkpoints.write(self._state(), step=self.step, metrics=metrics, background=background)

    def _check_weights(self) -> None:
        """Refuse to save weights that a gradient has spoilt whose loss was finite; the same on all ranks."""
        if self.config.non_finite == "stop":
            check_finite(self.model, self.step, self.ctx)

    def _state(self) -> dict[str, Any]:
        parts = {
            "model": self._strategy.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self._stepping.precision.scaler,
            "loader": self.loader,
            "trainer": self,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the loop itself: counters, the best value, the callbacks' states."""
        return {
            "track": self.track.state_dict(),
            "best": self.best.state_dict(),
            "metrics": dict(self._metrics),
            "evaluated_step": self._evaluated_step,
            "closed_epochs": self._closed_epochs,
            "options": self._options,
            "callbacks": [callback.state_dict() for callback in self.callbacks],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state: What ``state_dict`` has returned, with the same callbacks in the same order.
        """
        self.track.load_state_dict(state["track"])
        self.best.load_state_dict(state["best"])
        self._metrics = dict(state["metrics"])
        self._evaluated_step, self._closed_epochs = state["evaluated_step"], state["closed_epochs"]
        given, self._options = self._options, state.get("options", self._options)
        if self.ctx.is_main:
            tell_unused(self.optimizer, given, self._options)
        saved = state["callbacks"]
        if len(saved) != len(self.callbacks):
            raise UsageError(
                f"the checkpoint has the states of {len(saved)} callbacks, and this Trainer has {len(self.callbacks)}",
                hint="pass the same callbacks in the same order, or start in another folder",
            )
        for callback, its_state in zip(self.callbacks, saved, strict=True):
            callback.load_state_dict(its_state)
