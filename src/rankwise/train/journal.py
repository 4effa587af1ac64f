"""Reads a run's journal: what a training has told, an event a line, without the steps that a later start has taken back.

A journal is only ever appended to. A training that goes on after step 20 tells so by a new "started" line, and whatever the lines before it
said of later steps did not happen. A kill can cut a line off in the middle: such a line is left out and counted.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rankwise.base.errors import UsageError
from rankwise.train.events import Ended, Evaluated, Report, Started

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The journal's name in a run's folder.
JOURNAL = "journal.jsonl"
_KINDS: dict[str, type[Any]] = {"started": Started, "report": Report, "evaluated": Evaluated, "ended": Ended}
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
#: These hold what the user wrote; a text "NaN" is a text there.
_TEXTS = {"settings", "digests", "reason"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a run that was not taken back by a later one.

    Attributes:
        time: When, in seconds since 1970.
        started: How it began.
    """

    time: float
    started: Started


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """What a run recorded of the steps that happened.

    Attributes:
        path: The file.
        starts: The starts, by the step they begin after; the first is where the run began, the others are resumes.
        reports: By step. Where a resume has taken back a part of a report's steps, the rest is left of it: without
            metrics, and with the share of the samples that these steps have.
        evaluations: By step.
        ended: How the last start ended; None if it was killed, or still runs.
        num_skipped: Lines that could not be read: a kill has cut them off.
    """

    path: Path
    starts: tuple[Start, ...]
    reports: tuple[Report, ...]
    evaluations: tuple[Evaluated, ...]
    ended: Ended | None
    num_skipped: int

    @property
    def folder(self) -> Path:
        """The run's folder: its checkpoints are beside the journal."""
        return self.path.parent

    @property
    def last_step(self) -> int:
        """The last step that is recorded."""
        begun = self.starts[-1].started.step
        return max(
            begun,
            self.reports[-1].step if self.reports else begun,
            self.evaluations[-1].step if self.evaluations else begun,
            self.ended.step if self.ended else begun,
        )

    def started_for(self, step: int) -> Started:
        """Return the start that a step belongs to.

        Args:
            step: A step, from 1.
        """
        return next((one.started for one in reversed(self.starts) if one.started.step < step), self.starts[0].started)

    def losses(self) -> dict[int, float]:
        """Return the loss of each step that is known."""
        return self._by_step("losses")

    def lrs(self) -> dict[int, float]:
        """Return the learning rate of each step that is known."""
        return self._by_step("lrs")

    def grad_norms(self) -> dict[int, float]:
        """Return the gradient's norm of each step that is known."""
        return self._by_step("grad_norms")

    def norms(self) -> dict[int, dict[str, float]]:
        """Return each parameter's norm, at the steps where they were taken."""
        return {step: dict(norms) for report in self.reports for step, norms in report.norms.items()}

    def _by_step(self, name: str) -> dict[int, float]:
        found: dict[int, float] = {}
        for report in self.reports:
            values = getattr(report, name)
            found.update(zip(range(report.step - len(values) + 1, report.step + 1), values, strict=True))
        return found


def read_journal(run: str | Path) -> Journal:
    """Read the journal of a run.

    Args:
        run: The run's folder, or the journal itself.

    Returns:
        What has happened; what was taken back is not in it.

    Raises:
        UsageError: There is no journal, nothing is in it, or a line lacks what this version needs.
    """
    path = _find(Path(run))
    starts: list[Start] = []
    reports: list[Report] = []
    evaluations: list[Evaluated] = []
    ended: Ended | None = None
    num_skipped = 0
    for time, event in _read_events(path):
        match event:
            case Started():
                starts = [one for one in starts if one.started.step < event.step]
                reports = list(_take_back(reports, event.step))
                evaluations = [one for one in evaluations if one.step <= event.step]
                starts.append(Start(time=time, started=event))
                ended = None
            case Report():
                reports.append(event)
            case Evaluated():
                evaluations.append(event)
            case Ended():
                ended = event
            case _:
                num_skipped += 1
    if not starts:
        what = "is empty" if not num_skipped and not reports else "does not record how the run began"
        raise UsageError(
            f"{path} {what}", hint="a run writes the first line when it starts to train; was it killed before?"
        )
    return Journal(
        path=path,
        starts=tuple(starts),
        reports=tuple(reports),
        evaluations=tuple(evaluations),
        ended=ended,
        num_skipped=num_skipped,
    )


def _find(run: Path) -> Path:
    if run.is_file():
        return run
    path = run / JOURNAL
    if path.is_file():
        return path
    if not run.exists():
        raise UsageError(f"there is no file or folder {run}", hint=f"pass a run's folder, or its {JOURNAL}")
    below = sorted(one.parent for one in run.glob(f"*/{JOURNAL}"))
    found = f"; there is one in {', '.join(map(str, below[:3]))}" if below else ""
    raise UsageError(f"{run} has no {JOURNAL}{found}", hint="pass the folder that the Trainer or Track was given")


def _read_events(path: Path) -> Iterator[tuple[float, Any]]:
    """Give each line's time and event; None for one that can't be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror or error}") from error
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            answer = json.loads(line)
        except ValueError:  # also what is no UTF-8
            answer = None
        if not isinstance(answer, dict) or "kind" not in answer:
            yield 0.0, None
        elif answer["kind"] in _KINDS:
            yield _to_number(answer.get("time", 0.0)), _to_event(answer, f"{path}:{number}")


def _to_event(body: dict[str, Any], place: str) -> Any:
    kind = _KINDS[body["kind"]]
    needed = {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}
    missing = sorted(needed - body.keys())
    if missing:
        raise UsageError(
            f"{place}: {body['kind']!r} without {', '.join(missing)}",
            hint="another version of rankwise wrote this journal: compare it with that one",
        )
    # What a newer version tells besides is left out.
    known = {one.name for one in fields(kind)} & body.keys()
    values = {name: body[name] if name in _TEXTS else _to_number(body[name]) for name in known}
    if kind is Report and "norms" in values:
        values["norms"] = _read_steps(values["norms"])
    event = kind(**values)
    if type(event.step) is not int or (kind is Report and (event.norms is None or not isinstance(event.losses, tuple))):
        raise UsageError(
            f"{place}: a {body['kind']!r} of another form", hint="pass a journal that a Trainer or Track has written"
        )
    return event


def _read_steps(norms: Any) -> dict[int, dict[str, float]] | None:
    """Return norms by step: the keys of JSON are texts; None for what has another form."""
    if not isinstance(norms, dict) or not all(
        isinstance(one, dict) and step.isdecimal() for step, one in norms.items()
    ):
        return None
    return {int(step): one for step, one in norms.items()}


def _to_number(value: Any) -> Any:
    """Return a value of JSON with the floats that JSON has no words for."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, list):
        return tuple(map(_to_number, value))
    if isinstance(value, dict):
        return {name: _to_number(one) for name, one in value.items()}
    return value


def _take_back(reports: list[Report], step: int) -> Iterator[Report]:
    """Give what is left of the reports when the run goes on after a step."""
    for report in reports:
        begin = report.step - len(report.losses)
        if report.step <= step:
            yield report
        elif begin < step:
            gone = report.step - step
            losses, epochs = report.losses[:-gone], report.epochs[:-gone]
            yield replace(
                report, step=step, losses=losses, lrs=report.lrs[:-gone], grad_norms=report.grad_norms[:-gone],
                epochs=epochs, epoch=epochs[-1] if epochs else report.epoch, loss=math.fsum(losses) / len(losses),
                samples=round(report.samples * step / report.step), metrics={},
                norms={at: norms for at, norms in report.norms.items() if at <= step},
            )  # fmt: skip
