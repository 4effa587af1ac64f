"""Tells how a training goes: losses over all ranks, speed, learning rate; on rank 0, to files, terminals and dashboards.

    with rankwise.train.Track(loader, optimizer, epochs=4, folder="run") as track:
        for epoch in loader.epochs(4):
            for step in loader.steps():
                for x, y in rankwise.accumulate(model, step):
                    loss = cross_entropy(model(x), y, reduction="sum") * step.scale
                    loss.backward()
                    track.add(loss)
                optimizer.step()
                optimizer.zero_grad()
                track.step(step)

Losses stay on the device until the next report; then one small all-reduce carries those of all steps, and is read a step
later, so that neither the ranks nor the GPU wait for it.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

import torch

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import NumericsError, UsageError
from rankwise.base.requeue import REQUEUE
from rankwise.data.evaluation import unwrap
from rankwise.parallel.model_check import hash_tensor
from rankwise.runtime.context import current
from rankwise.train.events import Ended, Evaluated, Report, Started
from rankwise.train.logger_set import LoggerSet
from rankwise.train.loss_accumulator import Exchange, LossAccumulator, Totals
from rankwise.train.pace import Pace
from rankwise.train.settings import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

    from torch import Tensor, nn

    from rankwise.base.clock import Clock
    from rankwise.data.loader import DataLoader
    from rankwise.data.steps import Step
    from rankwise.runtime.context import RankContext
    from rankwise.train.events import Logger


#: The first line of an error of Gloo fills a screen.
_LONGEST_REASON = 120


@final
class Track:
    """Counts steps, adds up losses over the ranks, and notifies the loggers.

    Entered after ``checkpoint.load``, so that the loggers know where the training continues. It has ``state_dict()``
    and ``load_state_dict()``: put it among the parts of a checkpoint, and call ``flush()`` before you save.

    Args:
        loader: What the training reads.
        optimizer: Whose learning rate is shown.
        epochs: Epochs of the whole training, as far as known.
        steps: Steps of the whole training; with ``epochs`` too, what comes first.
        model: For the digests and norms of the parameters, which ``rankwise compare`` shows; wrapped or not.
        folder: Where journal.jsonl, the tables (steps.csv, reports.csv, evaluations.csv) and curves.svg go; None:
            nowhere.
        loggers: More that listen, on rank 0.
        progress: Show a progress bar on a terminal, and lines elsewhere.
        log_every: Steps between two reports; "auto": as many as a quarter of a second has.
        norms_every: Steps between two records of the parameters' norms (and one at steps 1, 2, 4, 8 …); None: never.
        non_finite: Whether a loss that is NaN or infinite is an error ("stop") or not ("keep").
        settings: More facts for the journal, by name; plain values.
        ctx: The job; None: the one that ``init()`` joined.

    Raises:
        UsageError: Invalid arguments.
    """

    def __init__(  # noqa: PLR0913 - most calls give four
        self,
        loader: DataLoader,
        optimizer: torch.optim.Optimizer,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        model: nn.Module | None = None,
        folder: str | Path | None = None,
        loggers: Iterable[Logger] = (),
        progress: bool = True,
        log_every: int | Literal["auto"] = "auto",
        norms_every: int | None = 100,
        non_finite: Literal["stop", "keep"] = "stop",
        settings: Mapping[str, Any] | None = None,
        ctx: RankContext | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._pace = Pace(log_every)
        self.ctx = ctx or current()
        self._loader, self._optimizer, self._model = (
            loader,
            optimizer,
            None if model is None else unwrap(model),
        )
        self.num_epochs, self.num_steps = epochs, _count_steps(loader, epochs, steps)
        self._folder, self._clock = None if folder is None else Path(folder), clock
        self._norms_every, self._non_finite = norms_every, non_finite
        self._settings = dict(settings or {})
        self._accumulator = LossAccumulator(self.ctx)
        #: Optimizer steps done, and samples seen, since the beginning of the training.
        self.steps_done, self.samples = 0, 0
        #: What on_report of a Trainer's callbacks hears, on all ranks.
        self.on_report: Callable[[Report], None] | None = None
        self._logger_set = LoggerSet(self._folder, loggers, progress=progress, is_main=self.ctx.is_main)
        self._pending: _Pending | None = None
        self._is_on = False
        self._norms: dict[int, list[Tensor]] = {}
        self._norm_names: list[str] = []
        self._begun_s = self._marked_s = clock.monotonic()
        self._begun_step = 0
        #: Of each step since the last report: learning rate, epoch, samples.
        self._noted: list[tuple[float, int, int]] = []
        self._epoch = loader.epoch
        self._last_loss: float | None = None

    # ------------------------------------------------------------- beginning and end

    def __enter__(self) -> Track:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if error is None:
            self.end("done")
        else:
            self.abandon(error)

    def start(self) -> Started:
        """Notify the loggers that it begins, or continues.

        Returns:
            How it begins.
        """
        hashes = self._model is not None and self.ctx.is_main and self._norms_every
        named = self._model.named_parameters() if hashes and self._model is not None else ()
        digests = {name: hash_tensor(one) for name, one in named if not hasattr(one, "full_tensor")}
        started = Started(
            step=self.steps_done,
            num_steps=self.num_steps,
            epoch=self._loader.epoch,
            num_epochs=self.num_epochs,
            world_size=self.ctx.world_size,
            global_batch=self._loader.global_batch,
            settings={
                **describe(self._loader, self._optimizer, self._model, self.ctx, self._folder),
                **self._settings,
            },
            digests=digests,
        )
        self.forget()
        self._is_on = True
        self._logger_set.on_start(started)
        self._begun_s = self._marked_s = self._clock.monotonic()
        self._begun_step = self.steps_done
        return started

    def end(self, reason: str, *, is_over: bool = True, before: Callable[[Ended], None] | None = None) -> Ended:
        """Report what is left, and notify the loggers that it is over.

        Args:
            reason: "done", or why it ended early.
            is_over: Whether nothing is left to do.
            before: Called with what the loggers are going to receive.

        Returns:
            How it ended.

        Collective: every rank.
        """
        self.flush()
        ended = self._make_end(reason, is_over=is_over)
        if before is not None:
            before(ended)
        self._logger_set.on_end(ended)
        self._is_on = False
        return ended

    def abandon(self, error: BaseException) -> None:
        """Notify the loggers that it ends by an error: nothing is sent to the other ranks, which may be elsewhere.

        Args:
            error: What was raised.
        """
        text = str(error).strip().splitlines()
        reason = type(error).__name__
        if text:
            reason += f": {textwrap.shorten(text[0], _LONGEST_REASON, placeholder=' …')}"
        if isinstance(error, SystemExit) and error.code == REQUEUE:
            reason = self.ctx.stop_reason or "left to be started again"
        self._logger_set.on_end(self._make_end(reason, is_over=False))
        self._is_on = False

    def _make_end(self, reason: str, *, is_over: bool) -> Ended:
        elapsed_s = self._clock.monotonic() - self._begun_s
        return Ended(step=self.steps_done, epoch=self._epoch, reason=reason, is_over=is_over, elapsed_s=elapsed_s)

    # ------------------------------------------------------------------------- steps

    def add(self, loss: Tensor, count: Any = None) -> None:
        """Note the loss of a micro-batch; it stays on the device.

        Args:
            loss: The scalar that backward was called on: a sum times ``step.scale``. With ``count``: the sum itself.
            count: How many samples or tokens were summed.
        """
        self._accumulator.add(loss, count)

    def add_metric(self, name: str, total: Any, count: Any = 1) -> None:
        """Note another number of a micro-batch; reports show the mean over all ranks and steps since the last one.

        Args:
            name: Of the number.
            total: A sum; a tensor stays on the device.
            count: Of how many.
        """
        self._accumulator.add_metric(name, total, count)

    def step(self, step: Step, *, grad_norm: Tensor | None = None) -> None:
        """Note that an optimizer step is over, before the schedule moves; now and then a report is made.

        Args:
            step: What was computed.
            grad_norm: The norm of the averaged gradients, if it is known.

        Raises:
            NumericsError: A loss was NaN or infinite, at some step up to two reports ago; on all ranks.

        Collective: every rank, after each step.
        """
        if not self._is_on:
            raise UsageError(
                "track.step() before the track was entered",
                rank=self.ctx.rank,
                hint="the loop belongs in `with track:`, after checkpoint.load",
            )
        self._accumulator.end_step(grad_norm)
        self._epoch, size = self._loader.epoch, step.global_samples
        self._noted.append((_read_lr(self._optimizer), self._epoch, size))
        self.samples += size
        self.steps_done += 1
        self._logger_set.on_step(self.steps_done)
        if self._pending is not None:
            self._publish()
        if self._model is not None and self.ctx.is_main and self._is_norm_due():
            self._measure_norms()
        if self._pace.is_due(self.steps_done):
            self._send()

    def flush(self) -> None:
        """Report what has not been reported, now.

        Collective: every rank.
        """
        if self._pending is not None:
            self._publish()
        if self._accumulator.num_steps:
            self._send()
            self._publish()

    def evaluated(self, metrics: Mapping[str, float], *, seconds: float, is_best: bool = False) -> Evaluated:
        """Log the result of an evaluation.

        Args:
            metrics: What ``rankwise.evaluate`` has returned.
            seconds: How long it took; it does not count for the speed of the training.
            is_best: Whether it is the best so far.

        Returns:
            What the loggers have received.

        Collective: every rank.
        """
        self.flush()
        evaluated = Evaluated(
            step=self.steps_done, epoch=self._epoch, metrics=dict(metrics), seconds=seconds, is_best=is_best
        )
        self._logger_set.on_evaluation(evaluated)
        return evaluated

    def skip_time(self) -> None:
        """Restart measuring the speed: what was done since the last report was not training."""
        self._marked_s = self._clock.monotonic()

    # ----------------------------------------------------------------------- reports

    def _send(self) -> None:
        now_s = self._clock.monotonic()
        lrs, epochs, sizes = zip(*self._noted, strict=True) if self._noted else ((), (), ())
        proposal = self._pace.propose(self._accumulator.num_steps, now_s - self._marked_s)
        self._pending = _Pending(
            exchange=self._accumulator.send(
                [norm for norms in self._norms.values() for norm in norms], proposal=proposal
            ),
            norm_steps=tuple(self._norms),
            step=self.steps_done,
            epoch=self._epoch,
            lrs=lrs,
            epochs=epochs,
            sizes=sizes,
            samples=self.samples,
            seconds=now_s - self._marked_s,
            elapsed_s=now_s - self._begun_s,
        )
        self._marked_s = now_s
        self._norms.clear()
        self._noted.clear()

    def _is_norm_due(self) -> bool:
        """At steps that do not depend on the reports', so that two runs have them at the same steps; dense where runs part."""
        every, step = self._norms_every, self.steps_done
        return every is not None and (step % every == 0 or (step < every and step & (step - 1) == 0))

    def _measure_norms(self) -> None:
        # In float64: a difference of one bit in one weight of a million shall be seen.
        dtype = None if self.ctx.device.type == "mps" else torch.float64
        found = {
            name: torch.linalg.vector_norm(parameter.detach(), dtype=dtype)
            for name, parameter in (self._model.named_parameters() if self._model is not None else ())
            if not hasattr(parameter, "full_tensor")  # sharded: a norm would be a collective
        }
        self._norm_names = list(found)
        self._norms[self.steps_done] = list(found.values())

    def forget(self) -> None:
        """Forget the steps that were not reported: a checkpoint before them was loaded, or the last loop was left by an error."""
        self._pending = None
        self._accumulator.forget()
        self._pace.follow(self.steps_done, 1)
        self._noted.clear()
        self._norms.clear()

    def _publish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        totals = pending.exchange.read()
        self._pace.follow(self.steps_done, totals.proposal)
        weights = totals.weights or pending.sizes
        finite = [(loss, weight) for loss, weight in zip(totals.losses, weights, strict=True) if math.isfinite(loss)]
        total = sum(weight for _, weight in finite)
        loss = sum(loss * weight for loss, weight in finite) / total if total else math.nan
        width = len(self._norm_names)
        norms = {
            step: dict(zip(self._norm_names, totals.extras[at * width : (at + 1) * width], strict=True))
            for at, step in enumerate(pending.norm_steps)
        }
        report = Report(
            step=pending.step,
            epoch=pending.epoch,
            loss=loss,
            losses=tuple(totals.losses),
            lrs=pending.lrs,
            epochs=pending.epochs,
            grad_norms=tuple(totals.grad_norms),
            metrics=totals.metrics,
            samples=pending.samples,
            samples_per_s=sum(pending.sizes) / max(pending.seconds, 1e-9),
            elapsed_s=pending.elapsed_s,
            eta_s=self._guess_rest(pending),
            tokens_per_s=sum(totals.weights) / max(pending.seconds, 1e-9) if totals.weights else None,
            norms=norms,
        )
        self._logger_set.on_report(report)
        if len(finite) < len(totals.losses) and self._non_finite == "stop":
            self._stop_non_finite(pending, totals)
        self._last_loss = totals.losses[-1]
        if self.on_report is not None:
            self.on_report(report)

    def _guess_rest(self, pending: _Pending) -> float | None:
        done = pending.step - self._begun_step
        if self.num_steps is None or not done:
            return None
        return max(0, self.num_steps - pending.step) * pending.elapsed_s / done

    def _stop_non_finite(self, pending: _Pending, totals: Totals) -> None:
        first = next(number for number, loss in enumerate(totals.losses) if not math.isfinite(loss))
        step = pending.step - len(totals.losses) + first + 1
        own = totals.own_losses[first]
        answers = self.ctx.control.exchange(repr(own), what="naming the rank whose loss is not finite")
        guilty = [rank for rank, text in enumerate(answers) if not math.isfinite(float(text))]
        where = f"on ranks {guilty}" if len(guilty) > 1 else f"on rank {guilty[0]}" if guilty else "in the sum"
        before = totals.losses[first - 1] if first else self._last_loss
        raise NumericsError(
            f"the loss of step {step} is {totals.losses[first]} ({where})"
            + (f"; the step before it had {before:.6g}" if before is not None else ""),
            rank=self.ctx.rank,
            hint="nothing was saved since; look at that step's samples, a smaller learning rate, clipping; or non_finite='skip' of a Trainer",
        )

    # ------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, int]:
        """Return how far the training has come."""
        return {"steps": self.steps_done, "samples": self.samples, "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from there; before the track is entered, as the loggers are told then where it continues.

        Args:
            state: What ``state_dict`` has returned.

        Raises:
            UsageError: The track is entered.
        """
        if self._is_on:
            raise UsageError(
                "a checkpoint was loaded into a track that is entered: its loggers have begun at another step",
                rank=self.ctx.rank,
                hint="track = Track(...); checkpoint.load(...); then `with track:`",
            )
        self.steps_done, self.samples, self._epoch = state["steps"], state["samples"], state["epoch"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A report on its way."""

    exchange: Exchange
    norm_steps: tuple[int, ...]
    step: int
    epoch: int
    lrs: tuple[float, ...]
    epochs: tuple[int, ...]
    sizes: tuple[int, ...]
    samples: int
    seconds: float
    elapsed_s: float


def _read_lr(optimizer: torch.optim.Optimizer) -> float:
    # A tensor where the step is captured or compiled: read it there, and not at each step.
    lr = optimizer.param_groups[0]["lr"]
    return float(lr)


def _count_steps(loader: DataLoader, epochs: int | None, steps: int | None) -> int | None:
    of_epochs = None
    if epochs is not None and loader.sampler is not None:
        of_epochs = epochs * loader.sampler.num_steps
    known = [number for number in (of_epochs, steps) if number is not None]
    return min(known) if known else None
