"""What follows a job: the lines of the files that it writes, as they come, and its state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rankwise.base.clock import Clock

Answer = TypeVar("Answer")
#: A scheduler that is started again, or a network that fails, need not answer for so long.
_SILENT_S = 300.0


@final
class PatientAsker(Generic[Answer]):
    """Asks for a job's state, of a scheduler that need not answer each time.

    Args:
        ask: Asks once.
        clock: Where the time comes from.
    """

    def __init__(self, ask: Callable[[], Answer], clock: Clock = SYSTEM_CLOCK) -> None:
        self._ask, self._clock = ask, clock
        self._answered_s = clock.monotonic()

    def __call__(self) -> Answer | None:
        """Return the state; None if there is no answer now.

        Raises:
            LaunchError: There has been none for five minutes.
        """
        try:
            found = self._ask()
        except LaunchError:
            if self._clock.monotonic() - self._answered_s > _SILENT_S:
                raise
            return None
        self._answered_s = self._clock.monotonic()
        return found


def follow_files(path: Path, is_over: Callable[[], bool | None] | None, look_s: float) -> Iterator[tuple[Path, str]]:
    """Give the lines of files, without their ends, beside the file of each.

    Args:
        path: Where; its name may have the stars of a shell. A file that is not there yet is waited for.
        is_over: Tells whether nothing more will come, None if that is not known now; None: give what is there.
        look_s: How often to look for more, in seconds.
    """
    rests: dict[Path, tuple[int, bytes]] = {}
    while True:
        is_last = is_over is None or is_over()  # asked before: what is written until then is read
        for found in sorted(path.parent.glob(path.name)):
            begin, rest = rests.get(found, (0, b""))
            with found.open("rb") as file:
                file.seek(begin)
                while chunk := file.read(1 << 20):
                    *lines, rest = (rest + chunk).split(b"\n")
                    yield from ((found, line.decode("utf-8", "replace")) for line in lines)
                rests[found] = file.tell(), rest
        if is_last:
            yield from ((found, rest.decode("utf-8", "replace")) for found, (_, rest) in rests.items() if rest)
            return
        SYSTEM_CLOCK.sleep(look_s)
