"""Calls that are bounded by a thread: also where the interpreter goes down and starts none any more."""

from __future__ import annotations

import sys
import threading

import pytest

from rankwise.base import deadline


def test_a_call_is_bounded_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts no thread at its exit, when a rank that did not close leaves its group: one that was kept takes the call, and one that blocks ends in time."""
    monkeypatch.setattr(deadline, "_STARTS_NONE_AT_EXIT", True)
    monkeypatch.setattr(deadline, "_waiting", {})
    deadline.prepare_exit()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert deadline.call_within(20.0, lambda: 3) == 3
    with pytest.raises(ValueError, match="of the call"):
        deadline.call_within(20.0, lambda: int("of the call"))
    blocked = threading.Event()
    with pytest.raises(deadline.OverdueError):
        deadline.call_within(0.1, blocked.wait)
    assert deadline.call_within(20.0, lambda: 4) == 4
    blocked.set()


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="Python 3.12 needs one")
def test_no_thread_is_kept_where_none_is_needed() -> None:
    """Other versions of Python start threads as long as code runs."""
    before = threading.active_count()
    deadline.prepare_exit()
    assert threading.active_count() == before
