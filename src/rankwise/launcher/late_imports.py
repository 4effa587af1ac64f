"""Import while the ranks train what the launcher needs only at their end.

A job lasts for days, and meanwhile somebody upgrades or removes the package: what is not imported by then is gone, or of another version.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.clock import Clock

#: Which parts of the package a launcher may still need.
ROOMS = ("base", "launcher", "verdict", "evidence.reader", "doctor")
#: The ranks' start has the cores first; then a hundredth of one, for some ten seconds.
_AFTER_S, _AT_ONCE_S = 5.0, 0.01


@final
class LateImports:
    """Imports some modules at each look."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._begin_s = clock, clock.monotonic() + _AFTER_S
        self._names = _list_modules()

    def poll(self) -> None:
        """Import what takes a moment, if it is time to."""
        end_s = max(self._begin_s, self._clock.monotonic()) + _AT_ONCE_S
        while self._begin_s <= self._clock.monotonic() < end_s:
            # Of another system, removed, half written by an upgrade that goes on just now: whoever needs it tries again.
            with contextlib.suppress(Exception):
                if (name := next(self._names, None)) is None:
                    return
                importlib.import_module(name)


def _list_modules() -> Iterator[str]:
    for room in ROOMS:
        package = importlib.import_module(f"rankwise.{room}")
        for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if one.name not in sys.modules:
                yield one.name
