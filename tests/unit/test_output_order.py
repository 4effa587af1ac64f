"""Standard output waits for what was written to standard error before it, and for a launcher that does not answer once only."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rankwise.evidence.in_rank import output_order

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_launcher_that_is_stopped_costs_one_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line waits half a second for it, the next ones do not, nor leave marks for it; when it has caught up they wait for it again."""
    passed = tmp_path / "passed"
    passed.write_bytes(bytes(8))
    now, marks = [0.0], []
    monkeypatch.setattr(output_order, "_now", lambda: now[0])
    monkeypatch.setattr(output_order, "_sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(output_order, "_write", lambda _fd, mark: marks.append(mark))
    status, fd = os.fstat(2), os.open(passed, os.O_RDONLY)
    order = output_order._Order(fd, 0, b"mark", (status.st_dev, status.st_ino))

    def print_line() -> float:
        begin, order.is_due = now[0], True
        order.wait()
        return now[0] - begin

    try:
        assert 0.5 <= print_line() < 0.6
        assert [print_line() for _ in range(3)] == [0.0, 0.0, 0.0]
        assert marks == [b"mark"]
        passed.write_bytes((1).to_bytes(8, "little"))
        assert print_line() >= 0.5
        passed.write_bytes((9).to_bytes(8, "little"))
        assert [print_line() for _ in range(2)] == [0.0, 0.0]
        assert len(marks) == 4
    finally:
        os.close(fd)
