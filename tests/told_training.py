"""A made-up training for the tests of loggers: events with little to write, and a clock that stands still."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwise.train.events import Ended, Evaluated, Report, Started

if TYPE_CHECKING:
    from rankwise.train.events import Logger


class FakeClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1767225600.0 + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def started(step: int = 0, epoch: int = 0, **more: Any) -> Started:
    return Started(step=step, num_steps=20, epoch=epoch, num_epochs=2, world_size=2, global_batch=4, settings=more)


def report(step: int, *losses: float, epoch: int = 0, **more: Any) -> Report:
    values: dict[str, Any] = {
        "loss": sum(losses) / len(losses),
        "losses": losses,
        "epochs": (epoch,) * len(losses),
        "lrs": tuple(0.5 / (step + at) for at in range(len(losses))),
        "samples": step * 4,
        "samples_per_s": 40.0,
        "elapsed_s": 1.5,
        "eta_s": None,
    }
    return Report(step=step, epoch=epoch, **{**values, **more})


def ended(step: int, reason: str = "done") -> Ended:
    return Ended(step=step, epoch=0, reason=reason, is_over=reason == "done", elapsed_s=2.0)


def play(logger: Logger, *events: Any) -> None:
    for event in events:
        match event:
            case Started():
                logger.on_start(event)
            case Report():
                for step in range(event.step - len(event.losses) + 1, event.step + 1):
                    logger.on_step(step)
                logger.on_report(event)
            case Evaluated():
                logger.on_evaluation(event)
            case Ended():
                logger.on_end(event)
