"""What a watch must not say of a sound job: `benchmarks/soak.py` counts it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: What is said of ranks that are slow, and of a slow start: facts, and no alarms.
_NOTES = ("it may just be slow", "rankwise: hint: ", "rankwise: no rank has started")


def find_alarms(
    events: Sequence[Mapping[str, Any]], report: Mapping[str, Any], code: int | None, errors: str
) -> list[str]:
    """Return what must not be said of a sound job.

    Args:
        events: What the watch has seen.
        report: The report; empty if none was written.
        code: How the job ended; None if it did not.
        errors: All that stood on standard error.
    """
    alarms = [f"proof of {event['rule']}" for event in events if event["certainty"] == "proof"]
    alarms += [
        line
        for line in errors.splitlines()
        if line.startswith("rankwise: ") and not any(note in line for note in _NOTES)
    ]
    if report.get("kind") != "ok":
        alarms.append(f"the report says {report.get('kind')}: {report.get('message')}")
    if code != 0:
        alarms.append("the job did not end" if code is None else f"the job ended with {code}")
    return alarms
