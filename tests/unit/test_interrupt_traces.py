"""Of a rank that the user has interrupted, the traceback of KeyboardInterrupt is left out on the console, and nothing else."""

from __future__ import annotations

import pytest

from rankwise.launcher.interrupt_traces import InterruptTraces

PLAIN = b"""Traceback (most recent call last):
  File "train.py", line 3, in <module>
    time.sleep(60)
    ~~~~~~~~~~^^^^
KeyboardInterrupt
"""
#: As Python 3.13 writes it on a terminal.
COLOURED = (
    b"Traceback (most recent call last):\r\n"
    b'  File \x1b[35m"train.py"\x1b[0m, line \x1b[35m3\x1b[0m, in \x1b[35m<module>\x1b[0m\r\n'
    b"    \x1b[31mtime.sleep\x1b[0m\x1b[1;31m(60)\x1b[0m\r\n"
    b"    \x1b[31m~~~~~~~~~~\x1b[0m\x1b[1;31m^^^^\x1b[0m\r\n"
    b"\x1b[1;35mKeyboardInterrupt\x1b[0m\r\n"
)


@pytest.mark.parametrize("trace", [PLAIN, COLOURED], ids=["plain", "coloured"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_traceback_of_an_interrupt_is_left_out(trace: bytes, size: int) -> None:
    """In pieces of any size, plain and in colours; what stands around it is shown, in colours too, and so is another error's traceback."""
    other = trace.replace(b"KeyboardInterrupt", b"ValueError")
    text = b"epoch \x1b[1m3\x1b[0m\n" + trace + b"saved\n" + other + b"end"
    traces, shown = InterruptTraces(), b""
    for at in range(0, len(text), size):
        shown += traces.filter(text[at : at + size])
    assert shown + traces.flush() == b"epoch \x1b[1m3\x1b[0m\nsaved\n" + other + b"end"
