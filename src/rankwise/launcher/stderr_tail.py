"""The last bytes of a rank's standard error, and how far its interpreter's end had come when it wrote them."""

from __future__ import annotations

import re
import time
from collections import deque
from typing import final

#: A rank writes it where its interpreter begins to end (1), and behind its functions of atexit (2); it is taken out
#: here again.
END_MARK = b"\x1b_rankwise:end {}\x1b\\"
#: It writes this one where it waits until all before it has been passed on (``evidence/in_rank/output_order.py``).
ORDER_MARK = END_MARK.replace(b"{}", b"0")
MARKS = (*(END_MARK.replace(b"{}", stage) for stage in (b"1", b"2")), ORDER_MARK)
ANY_MARK = re.compile(b"|".join(map(re.escape, MARKS)))
TAIL_BYTES = 1 << 16


@final
class StderrTail:
    """What one rank wrote last.

    Attributes:
        num_order_marks: How often the rank waits, or has waited, until all is passed on.
        waiting_s: Since when, by the monotonic clock, the beginning of a mark waits for its rest; None if none does.
    """

    def __init__(self) -> None:
        # Before the interpreter began to end, then in its functions of atexit, then behind them.
        self._parts: list[deque[bytes]] = [deque()]
        self._cut = b""
        self.num_order_marks = 0
        self.waiting_s: float | None = None

    def write(self, data: bytes) -> bytes:
        """Keep what the rank wrote; return it without marks, and without the beginning of one at its end."""
        data, begin, shown = self._cut + data, 0, b""
        for mark in ANY_MARK.finditer(data):
            shown += self._keep(data[begin : mark.start()])
            begin = mark.end()
            if mark[0] == ORDER_MARK:
                self.num_order_marks += 1
            elif mark[0] == MARKS[0]:
                # Of a Python before there may be others, in a rank that is a shell.
                self._parts = [deque([self.read()]), deque()]
            else:
                own, *since = self._parts
                self._parts = [own, deque(chunk for part in since for chunk in part), deque()]
        rest = data[begin:]
        self._cut = rest[len(rest) - _count_begun(rest) :]
        self.waiting_s = time.monotonic() if self._cut else None
        return shown + self._keep(rest.removesuffix(self._cut))

    def give_up_waiting(self) -> bytes:
        """Return what looked like the beginning of a mark, and is none."""
        cut, self._cut, self.waiting_s = self._cut, b"", None
        return self._keep(cut)

    def read(self) -> bytes:
        """Return the last bytes."""
        return b"".join(b"".join(part) for part in self._parts)

    def read_before_end(self) -> list[bytes]:
        """Return the last bytes from before the interpreter began to end, and those of its functions of atexit."""
        return [b"".join(part) for part in self._parts[:2]]

    def _keep(self, data: bytes) -> bytes:
        part = self._parts[-1]
        if data:
            part.append(data)
        size = sum(map(len, part))
        while part and size - len(part[0]) >= TAIL_BYTES:
            size -= len(part.popleft())
        return data


def _count_begun(data: bytes) -> int:
    """Return how many bytes at the end are the beginning of a mark."""
    lengths = range(len(MARKS[0]) - 1, 0, -1)
    return next((num for num in lengths if data.endswith(tuple(mark[:num] for mark in MARKS))), 0)
