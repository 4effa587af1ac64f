"""A rendezvous is looked for at other hosts, and one of them never answers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rankwise.engine import node_rendezvous

if TYPE_CHECKING:
    import pytest


def test_a_frozen_host_holds_up_one_thread_however_often_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """What it opens, once it answers, nobody waits for any more: the next try gets an answer of its own. Other places are not held up."""
    monkeypatch.setattr(node_rendezvous, "_REACH_S", 0.02)
    thaws, tried = threading.Event(), []

    def open_rendezvous() -> str:
        tried.append("frozen")
        thaws.wait()
        return f"answer {len(tried)}"

    for _ in range(5):
        assert node_rendezvous._try(open_rendezvous, "frozen", 1) is None
    assert tried == ["frozen"]
    monkeypatch.setattr(node_rendezvous, "_REACH_S", 60.0)
    assert node_rendezvous._try(lambda: "at once", "frozen", 2) == "at once"
    thaws.set()
    assert node_rendezvous._try(open_rendezvous, "frozen", 1) == "answer 2"
    assert node_rendezvous._try(lambda: 1 / 0, "frozen", 1) is None
