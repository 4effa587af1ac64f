"""Numbers and events of a training as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise.train.events import Ended, Evaluated, Report, Started


def format_number(value: float) -> str:
    """Return four significant digits: ``0.4312``, ``2.303``, ``1.234e-05``."""
    return f"{value:.4g}"


def format_amount(value: float) -> str:
    """Return a large number with a letter: ``950``, ``12.3k``, ``1.24M``; three significant digits, and all of a small count."""
    if isinstance(value, int) and abs(value) < 1000:
        return str(value)
    for limit, divisor, letter in (
        (999.5, 1, ""),
        (999.5e3, 1e3, "k"),
        (999.5e6, 1e6, "M"),
        (999.5e9, 1e9, "G"),
    ):
        if abs(value) < limit:
            return _three_digits(value / divisor) + letter
    return f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """Return ``0:07``, ``1:02:03`` or ``2d 01:02:03``."""
    minutes, rest_s = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{rest_s:02}"
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"


def describe_start(started: Started) -> str:
    """Return what is about to be trained, as one line."""
    settings = started.settings
    ranks = f"training on {started.world_size} rank" + ("" if started.world_size == 1 else "s")
    parts = [ranks + (f" ({settings['device']})" if settings.get("device") else "")]
    parts += [_describe_batch(started), _describe_length(started)]
    if count := settings.get("parameters"):
        parts.append(f"{format_amount(count)} parameter" + ("" if count == 1 else "s"))
    if settings.get("optimizer"):
        parts.append(str(settings["optimizer"]))
    if settings.get("lr") is not None:
        parts.append(f"lr {_describe_value(settings['lr'])}")
    if settings.get("precision"):
        parts.append(str(settings["precision"]))
    line = ", ".join(parts)
    folder = settings.get("folder")
    if started.step:
        return f"{line}; continues after step {started.step}" + (f" of {folder}" if folder else "")
    return line + (f"; writes to {folder}" if folder else "")


def describe_report(report: Report, started: Started | None, loss: float) -> str:
    """Return a report as one line.

    Args:
        report: What has happened.
        started: How it began; None: nobody said.
        loss: What is shown as the loss.
    """
    parts = [_describe_step(report.step, report.epoch, started), f"loss {format_number(loss)}"]
    parts += [f"{name} {format_number(value)}" for name, value in report.metrics.items()]
    if report.lrs:
        parts.append(f"lr {format_number(report.lrs[-1])}")
    if report.grad_norms:
        parts.append(f"grad norm {format_number(report.grad_norms[-1])}")
    parts.append(describe_speed(report))
    if report.eta_s is not None:
        parts.append(f"{format_seconds(report.eta_s)} left")
    return "  ".join(parts)


def describe_speed(report: Report) -> str:
    """Return how fast it goes: by tokens, or whatever else the loss counts, and by samples elsewhere."""
    if report.tokens_per_s is not None:
        return f"{format_amount(report.tokens_per_s)} tokens/s"
    return f"{format_amount(report.samples_per_s)} samples/s"


def describe_evaluation(evaluated: Evaluated, started: Started | None) -> str:
    """Return the result of an evaluation as one line."""
    found = ", ".join(f"{name} {format_number(value)}" for name, value in evaluated.metrics.items())
    marks = ["best"] if evaluated.is_best else []
    if evaluated.seconds >= 1:
        marks.append(f"took {format_seconds(evaluated.seconds)}")
    where = _describe_step(evaluated.step, evaluated.epoch, started)
    return f"{where}  evaluation: {found or 'no metrics'}" + (f" ({', '.join(marks)})" if marks else "")


def describe_end(ended: Ended, started: Started | None, loss: float | None) -> str:
    """Return how a training ended, as one line.

    Args:
        ended: How.
        started: How it began; None: nobody said.
        loss: What is shown as the loss; None: there was none.
    """
    # An error's message may have many lines; the first one says what.
    reason = (ended.reason.splitlines() or [""])[0]
    total = started.num_steps if started is not None else None
    head = "done" if ended.reason == "done" else f"stopped ({reason})"
    of = f" of {total}" if total is not None and ended.step != total else ""
    parts = [f"{head} after step {ended.step}{of}"]
    if loss is not None:
        parts.append(f"loss {format_number(loss)}")
    done = ended.step - (started.step if started is not None else 0)
    if done > 0 and ended.elapsed_s > 0:
        speed = f"{format_amount(done / ended.elapsed_s)} steps/s"
        parts.append(f"{done} step{'' if done == 1 else 's'} in {format_seconds(ended.elapsed_s)}, {speed}")
    elif done <= 0:
        parts.append("no step was left to do" if ended.is_over else "no step was done")
    if not ended.is_over:
        parts.append("not finished")
    return "; ".join(parts)


def _describe_step(step: int, epoch: int, started: Started | None) -> str:
    total = started.num_steps if started is not None else None
    text = f"step {str(step).rjust(len(str(total)))}/{total}" if total is not None else f"step {step}"
    return f"{text}  {describe_epoch(epoch, started)}"


def describe_epoch(epoch: int, started: Started | None) -> str:
    """Return which epoch it is, counted from 1."""
    total = started.num_epochs if started is not None else None
    return f"epoch {str(epoch + 1).rjust(len(str(total)))}/{total}" if total is not None else f"epoch {epoch + 1}"


def _describe_batch(started: Started) -> str:
    """Return the global batch, and what it is made of: ranks, passes of each in a step, samples of a pass."""
    batch, ranks = f"global batch {started.global_batch}", started.world_size
    micro = started.settings.get("micro_batch")
    if not micro:
        return batch
    passes = -(-started.global_batch // (ranks * micro))
    if ranks * passes * micro != started.global_batch:
        return f"{batch} in micro-batches of up to {micro}" if passes > 1 else batch
    if passes == ranks == 1:
        return batch
    return f"{batch} = {ranks} rank{'' if ranks == 1 else 's'} x {passes} x {micro}"


def _describe_length(started: Started) -> str:
    steps = None if started.num_steps is None else f"{started.num_steps} step" + ("" if started.num_steps == 1 else "s")
    epochs = (
        None if started.num_epochs is None else f"{started.num_epochs} epoch" + ("" if started.num_epochs == 1 else "s")
    )
    if steps and epochs:
        return f"{steps} in {epochs}"
    return steps or epochs or "until it is stopped"


def _describe_value(value: object) -> str:
    return format_number(value) if isinstance(value, float) else str(value)


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
