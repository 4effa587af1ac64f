"""The progress bar on a terminal, drawn by rich in a thread of its own a few times a second."""

# The training only sets numbers, and the thread reads them: a step costs nothing, and a terminal that is stopped
# (Ctrl-S) stops nobody but the thread.

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO, final

from rankwise.base.environ import get

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.train.loggers.outlet import Outlet

_PER_SECOND = 5
_MIN_BAR, _MAX_BAR = 8, 40
#: The drawn bar's own rank among the facts: what has a higher number goes before it.
BAR_RANK = 5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What the bar shows now.

    Attributes:
        step: Steps done.
        num_steps: Of all; None if not known.
        facts: Texts beside the bar, from left to right, each with its rank when room is short: the highest numbers go
            first, and the drawn bar goes in its turn, by ``BAR_RANK``.
    """

    step: int
    num_steps: int | None
    facts: tuple[tuple[int, str], ...]


@final
class Bar:
    """A line at the bottom of the terminal; what the process prints goes above it.

    Args:
        outlet: A terminal.
        read: Returns what to show; called in the drawing thread.

    Raises:
        ImportError: There is no rich.
    """

    def __init__(self, outlet: Outlet, read: Callable[[], Moment]) -> None:
        from rich.console import Console  # noqa: PLC0415 - an extra, and 50 ms
        from rich.live import Live  # noqa: PLC0415

        self._read = read
        # Without soft_wrap rich would break the script's long lines at spaces.
        self._console = Console(file=outlet, force_terminal=True, force_jupyter=False, soft_wrap=True)  # type: ignore[arg-type]
        # A standard output that goes to a file must stay there: rich would show it on the terminal instead.
        self._live = Live(
            console=self._console,
            get_renderable=self._draw,
            refresh_per_second=_PER_SECOND,
            transient=True,
            redirect_stdout=_is_terminal(sys.stdout),
            redirect_stderr=_is_terminal(sys.stderr),
        )

    def start(self) -> None:
        """Show it."""
        global _shown  # noqa: PLW0603 - a hook of fork can't be taken back, so there is one for all bars
        _shown = _Streams(sys.stdout, sys.stderr)
        _watch_forks()
        self._live.start(refresh=True)
        # rich hides the cursor; a rank that is killed could not show it again.
        self._console.show_cursor(show=True)
        # The thread must not draw while Python is on its way out, even if nobody has stopped the bar.
        atexit.register(self.stop)

    def say(self, line: str) -> None:
        """Write a line above it."""
        # As it is: rich would break it at the terminal's width, and read square brackets as its own marks.
        self._console.print(line, markup=False, highlight=False, emoji=False)
        self._live.refresh()

    def stop(self) -> None:
        """Take it away."""
        global _shown  # noqa: PLW0603
        atexit.unregister(self.stop)
        self._live.stop()
        _shown = None

    def _draw(self) -> Any:
        from rich.progress_bar import ProgressBar  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        moment = self._read()
        # The last column stays free, since terminals differ in what they do with a sign there; and a space parts the
        # bar from what another rank prints after it.
        texts, bar_width = fit(moment, self._console.width - 2)
        texts[-1] += " "
        grid = Table.grid(padding=(0, 2, 0, 0))
        cells: list[Any] = [Text(text, no_wrap=True, overflow="crop") for text in texts]
        if bar_width and moment.num_steps:
            done = min(moment.step, moment.num_steps)
            cells.insert(0, ProgressBar(total=moment.num_steps, completed=done, width=bar_width))
        grid.add_row(*cells)
        return grid


def fit(moment: Moment, width: int) -> tuple[list[str], int]:
    """Choose what there is room for.

    Args:
        moment: What could be shown.
        width: Columns that may be used.

    Returns:
        The texts from left to right, and the width of the bar; 0: no bar.
    """
    wants_bar = moment.num_steps is not None and moment.num_steps > 0
    facts = list(moment.facts)

    def room() -> int:
        return width - sum(len(text) for _, text in facts) - 2 * (len(facts) - 1)

    while len(facts) > 1 and room() < (_MIN_BAR + 2 if wants_bar else 0):
        last = max(facts, key=lambda fact: fact[0])
        if wants_bar and last[0] < BAR_RANK:
            wants_bar = False
        else:
            facts.remove(last)
    texts = [text[:width] for _, text in facts]
    left = room() - 2
    return texts, min(left, _MAX_BAR) if wants_bar and left >= _MIN_BAR else 0


def can_draw(outlet: Outlet) -> bool:
    """Tell whether a bar can be shown: on a terminal that can move its cursor."""
    return outlet.isatty() and get("TERM").lower() not in {"dumb", "unknown"}


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


@final
@dataclass(frozen=True, slots=True)
class _Streams:
    out: TextIO | None
    err: TextIO | None


_shown: _Streams | None = None
_is_watching = False


def _watch_forks() -> None:
    global _is_watching  # noqa: PLW0603
    if not _is_watching and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_print_directly)
        _is_watching = True


def _print_directly() -> None:
    # The thread may have held rich's lock when a worker was forked: there nobody would ever give it back.
    if _shown is not None:
        sys.stdout, sys.stderr = _shown.out, _shown.err
