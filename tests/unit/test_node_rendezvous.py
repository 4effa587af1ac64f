"""A rendezvous is looked for at other hosts, and one of them never answers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rankwise.engine import node_rendezvous

if TYPE_CHECKING:
    import pytest


def test_a_frozen_host_holds_up_one_thread_however_often_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """What it opens in the end is for who asks next, so that a host that only is slow is reached at last; then it is asked anew. Other places are not held up."""
    monkeypatch.setattr(node_rendezvous, "_REACH_S", 0.02)
    thaws, tried = threading.Event(), []

    def open_rendezvous() -> str:
        tried.append("frozen")
        thaws.wait()
        return f"answer {len(tried)}"

    way = ("reach", "frozen", 1)
    for _ in range(5):
        assert node_rendezvous._try(open_rendezvous, way) is None
    assert tried == ["frozen"]
    monkeypatch.setattr(node_rendezvous, "_REACH_S", 60.0)
    assert node_rendezvous._try(lambda: "at once", ("again", "frozen", 1)) == "at once"
    thaws.set()
    assert node_rendezvous._try(open_rendezvous, way) == "answer 1"
    assert node_rendezvous._try(open_rendezvous, way) == "answer 2"
    assert node_rendezvous._try(lambda: 1 / 0, way) is None
    assert node_rendezvous._try(lambda: None, way) is None
    assert node_rendezvous._try(lambda: "it serves now", way) == "it serves now"
