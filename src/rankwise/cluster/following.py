"""The lines of files that a job writes, as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def follow_files(path: Path, is_over: Callable[[], bool] | None, look_s: float) -> Iterator[str]:
    """Give the lines of files, without their ends.

    Args:
        path: Where; its name may have the stars of a shell. A file that is not there yet is waited for.
        is_over: Tells whether nothing more will come; None: give what is there.
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
                    yield from (line.decode("utf-8", "replace") for line in lines)
                rests[found] = file.tell(), rest
        if is_last:
            yield from (rest.decode("utf-8", "replace") for _, rest in rests.values() if rest)
            return
        SYSTEM_CLOCK.sleep(look_s)
