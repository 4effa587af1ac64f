"""Facts as JSON lines: what happened when, for tools and for yesterday's folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, final

from rankwise.base.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from pathlib import Path


@final
class EventLog:
    """An append-only file of ``{"time": …, "event": "ranks.started", …}`` lines; without a path it keeps nothing."""

    def __init__(self, path: Path | None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path, self._clock = path, clock

    def write(self, event: str, **facts: object) -> None:
        """Append one line. A full disk must not end a training run: then the line is lost."""
        if self._path is None:
            return
        line = json.dumps({"time": round(self._clock.time(), 3), "event": event, **facts}, default=str)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError:
            self._path = None
