"""How many nodes must meet after a loss, and that torch is told so wherever they meet."""

from __future__ import annotations

import json
import socket
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies as st

from rankwise.engine import node_beats, node_detector, node_rendezvous, node_standby
from rankwise.engine.node_members import Members, count_needed

if TYPE_CHECKING:
    from collections.abc import Callable


@given(st.lists(st.sampled_from(["here", "there", "ended"]), min_size=1, max_size=12), st.data())
def test_no_two_sides_of_a_cut_go_on(nodes: list[str], data: st.DataObject) -> None:
    """Whoever is where, and whatever each side knows of those that have ended: not both sides have enough nodes; and if nothing is cut, those that are left have, even if they know only that the others have ended by now."""
    ended = [number for number, side in enumerate(nodes) if side == "ended"]
    known = data.draw(st.lists(st.sampled_from(ended), unique=True)) if ended else []
    with_store = data.draw(st.sampled_from(["here", "there", "ended"]))
    enough = [
        nodes.count(side) >= count_needed(len(nodes), num_ended, num_gone, keeps_store=side == with_store) > 0
        for side, num_ended, num_gone in (
            ("here", len(known), len(ended)),
            ("there", len(ended), len(ended)),
        )
    ]
    assert not all(enough)
    if "there" not in nodes and "here" in nodes:
        assert nodes.count("here") >= count_needed(len(nodes), 0, len(ended), keeps_store=False)


def test_torch_waits_for_enough_nodes_at_each_store_and_for_as_few_as_before_afterwards() -> None:
    """When a second loss takes the next store, too, the third one is told as well; then all have their user's settings again."""
    members = Members.__new__(Members)
    members._changed, members._orders, members._expecting = [], {"min_nodes": 1}, None
    handlers = [
        SimpleNamespace(_settings=SimpleNamespace(min_nodes=1, timeout=SimpleNamespace(_last_call=timedelta(seconds=30), last_call=timedelta(seconds=30))))
        for _ in range(2)
    ]  # fmt: skip
    for handler in (*handlers, handlers[0]):
        members._change(handler, 3)
        assert handler._settings.min_nodes == 3
        assert handler._settings.timeout._last_call == timedelta(seconds=5)
    members.restore()
    for handler in handlers:
        assert handler._settings.min_nodes == 1
        assert handler._settings.timeout._last_call == timedelta(seconds=30)


@pytest.mark.parametrize(
    ("lost", "lost_later", "is_expelled", "round_number", "is_enough"),
    [
        ({}, {}, False, 5, True),  # the others left by themselves
        ({2}, {}, False, 5, False),
        ({}, {2}, False, 5, False),  # it is about to be given up
        ({2}, {}, False, 6, True),  # others had met meanwhile
        ({}, {}, True, 5, False),
    ],
)
def test_newcomers_are_no_majority(
    *, lost: set[int], lost_later: set[int], is_expelled: bool, round_number: int, is_enough: bool
) -> None:
    """Two of five that took part are in the next round with two newcomers, the one with the store among them: the other three may meet elsewhere. So it stays if they meet once more."""
    members = Members.__new__(Members)
    five, new = ([SimpleNamespace(addr=name, pid=1) for name in names] for names in ("sabcd", "xy"))
    members._descriptions, members._members = dict(enumerate(five)), list(range(5))
    members._orders, members._serving, members._node, members._has_moved = {"backend": "c10d"}, 0, 1, False
    members._rendezvous, members._last_round = node_rendezvous, 4
    losses = {node: SimpleNamespace(is_ended=False, is_gone=False) for node in lost}
    members._detector = SimpleNamespace(losses=losses, is_expelled=is_expelled)

    def settle(_: float) -> None:
        losses.update({node: SimpleNamespace(is_ended=False, is_gone=False) for node in lost_later})

    vars(members)["settle"] = settle
    state = SimpleNamespace(round=round_number, participants=[*five[:2], *new])
    handler = SimpleNamespace(_state_holder=SimpleNamespace(state=state))
    assert members.has_enough(handler) is is_enough
    state.round += 1
    assert members.has_enough(handler) is (is_enough and not lost)
    state.round += 1
    state.participants.append(five[2])
    assert members.has_enough(handler)


def test_a_launcher_that_nobody_else_heard_is_asked_whether_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever heard a node may be lost with it: one that serves the store is asked when that fails, one that does not come is asked while the others wait. Where nothing listens any more its end is noted, and not where a launcher answers."""
    noted: list[node_detector.Loss] = []
    members = Members.__new__(Members)
    members._orders, members._serving, members._node = {"backend": "c10d"}, 1, 0
    lost: dict[int, object] = {}
    members._detector = SimpleNamespace(losses=lost, is_expelled=False, judge_end=lambda _: (True, True))
    members._beats, members._detecting = SimpleNamespace(note=noted.append), node_detector
    members._reach, members._rendezvous = node_beats.try_to_reach, node_rendezvous
    members._descriptions = {node: SimpleNamespace(addr=str(node), pid=node) for node in range(4)}
    here = [members._descriptions[0], members._descriptions[3]]
    handler = SimpleNamespace(_state_holder=SimpleNamespace(state=SimpleNamespace(participants=here)))
    with socket.create_server(("127.0.0.1", 0)) as launcher:
        members._at = {node: [["127.0.0.1", launcher.getsockname()[1]]] for node in range(4)}

        def greet() -> None:
            connection, _ = launcher.accept()
            with connection:
                connection.sendall(b"{")

        answer = threading.Thread(target=greet)
        answer.start()
        members.probe_serving()
        answer.join()
    assert not noted
    members.probe_serving()
    (loss,) = noted
    assert (loss.node, loss.is_ended, loss.is_gone) == (1, True, True)

    monkeypatch.setattr(threading, "Thread", _Now)
    members._probe_s = 0.0
    members.probe_missing(handler)
    assert len(noted) == 1, "nobody is lost, so that nobody is missing"
    lost[1] = loss
    members.probe_missing(handler)
    # It may have met others before its end.
    assert [(one.node, one.is_ended, one.is_gone) for one in noted[1:]] == [(2, False, True)]
    members.probe_missing(handler)
    assert len(noted) == 2, "asked again at once"


def test_a_launcher_with_the_store_and_too_few_nodes_sends_everyone_elsewhere() -> None:
    """Two of three do not answer the node that serves the rendezvous: nobody may meet there any more, newcomers least of all, and it looks where the others go."""
    written: dict[str, str] = {}
    told: list[dict[str, Any]] = []
    members = Members.__new__(Members)
    members._orders = {"backend": "c10d", "run_id": "x"}
    members._members, members._serving, members._node, members._has_moved = [0, 1, 2], 0, 0, False
    members._reserves = {0: [["a"], 1], 1: [["b"], 2], 2: [["c"], 3]}
    losses = {node: SimpleNamespace(is_ended=False, is_gone=False) for node in (1, 2)}
    members._detector = SimpleNamespace(losses=losses, is_expelled=False)
    members._standby, members._say = node_standby, told.append
    handler = SimpleNamespace(_store=SimpleNamespace(set=written.__setitem__, check=lambda keys: keys[0] in written), _state_holder=None)  # fmt: skip
    members._rendezvous = SimpleNamespace()
    assert members.leave(handler) is handler
    assert json.loads(written["rankwise/x/moved"]) == ["b", 2]
    assert "can't reach 2 of the 3 nodes" in told[0]["said"]
    assert node_standby.has_moved(handler, {"run_id": "x", "places": [("b", 2)]})


class _Now:
    """A thread that runs at once."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self.start = target
