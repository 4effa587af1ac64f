"""How many nodes must meet after a loss, and that torch is told so wherever they meet."""

from __future__ import annotations

import itertools
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rankwise.engine import node_detector, node_members, node_rendezvous
from rankwise.engine.node_entry import Entry
from rankwise.engine.node_members import Members, count_needed


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
    """Two of five that took part are in the next round with two newcomers, the one with the store among them: the other three may meet elsewhere. So it stays if they meet once more. Where the others had met meanwhile, it was this node that was cut off."""
    members = Members.__new__(Members)
    five, new = ([SimpleNamespace(addr=name, pid=1) for name in names] for names in ("sabcd", "xy"))
    members._descriptions, members._members = dict(enumerate(five)), list(range(5))
    members._orders, members._serving, members._node, members._has_moved = {"backend": "c10d"}, 0, 1, False
    members._has_gathered = members._is_cut_off = False
    members._rendezvous, members._last_round = node_rendezvous, 4
    losses = {node: SimpleNamespace(is_ended=False, is_gone=False) for node in lost}
    members._detector = SimpleNamespace(losses=losses, is_expelled=is_expelled)

    def settle(_: float) -> None:
        losses.update({node: SimpleNamespace(is_ended=False, is_gone=False) for node in lost_later})

    vars(members)["settle"] = settle
    state = SimpleNamespace(round=round_number, participants=[*five[:2], *new])
    handler = SimpleNamespace(_state_holder=SimpleNamespace(state=state))
    assert members.has_enough(handler) is is_enough
    assert members.was_cut_off is (round_number > 5)
    state.round += 1
    assert members.has_enough(handler) is (is_enough and not lost)
    state.round += 1
    state.participants.append(five[2])
    assert members.has_enough(handler)


class _Asked:
    """Members of a round of four that node 0 has lost node 1 of, where what is asked is answered at once."""

    def __init__(self, **more: Any) -> None:
        self.noted: list[node_detector.Loss] = []
        self.answers = {1: "refused", 2: "refused", 3: "refused"}
        self.members = members = Members.__new__(Members)
        members._orders, members._serving, members._node = {"backend": "c10d", "conf": {}}, 0, 0
        members._is_cut_off = False
        members._members, members._has_moved, members._round = [0, 1, 2, 3], False, 4
        members._has_gathered, members._served_by, members._tell = False, 0, lambda _: None
        members.may_gather = True
        members._stores = {("met", 0): -1, **{("reserve", node): node for node in range(4)}}
        members._at = {node: [["host", node]] for node in range(4)}
        members._reached, members._silent_s = {node: ["host", node] for node in (1, 2, 3)}, {}
        members._probe_s, members._last_round = 0.0, 4
        members._descriptions = {node: SimpleNamespace(addr=str(node), pid=node) for node in range(4)}
        members._detector = node_detector.Detector(0, on_lost=self.noted.append, on_expelled=lambda _: None)
        members._detecting, members._rendezvous = node_detector, node_rendezvous
        members._beats, members._say = SimpleNamespace(do=lambda action: action()), lambda _: None
        members._reach = lambda _, node: self.answers[node]
        self.state = SimpleNamespace(participants=[members._descriptions[0]], complete=False, round=4)
        self.handler = SimpleNamespace(_state_holder=SimpleNamespace(state=self.state))
        vars(members).update(more)

    def lose(self, node: int, *, is_ended: bool = True) -> None:
        self.members._detector.note(node_detector.Loss(node, ["host", node, 1], "", is_ended=is_ended))
        self.noted.clear()

    def ask(self) -> list[tuple[int, bool, bool]]:
        """Ask those that are missing; return what is known anew."""
        self.members._probe_s = 0.0
        self.members.probe_missing(self.handler)
        known, self.noted[:] = [(loss.node, loss.is_ended, loss.is_gone) for loss in self.noted], []
        return known


@pytest.fixture(autouse=True)
def _threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_members.threading, "Thread", lambda target, **_: SimpleNamespace(start=target))


def test_who_does_not_come_is_asked_whether_it_lives() -> None:
    """Whoever heard a node may be lost with it: one that has ended is lost, but may have met others before; one that lives, or has come, is not."""
    asked = _Asked()
    assert asked.ask() == [], "nobody is lost, so that nobody is missing"
    asked.lose(1)
    asked.answers[3] = "open"
    assert asked.ask() == [(2, False, False)]
    asked.answers[3] = "refused"
    asked.state.participants.append(asked.members._descriptions[3])
    assert asked.ask() == []
    asked.state.complete = True  # the last round: who was in it may be dead
    assert asked.ask() == [(3, False, False)]


def test_who_is_silent_is_lost_if_the_others_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that pauses is silent, too: it counts as lost when it is so for some seconds, and never where the job can't go on without it."""
    now_s = [100.0]
    monkeypatch.setattr(node_members.time, "monotonic", lambda: now_s[0])
    asked = _Asked()
    asked.lose(1)
    asked.answers = {2: "silent", 3: "silent"}
    assert asked.ask() == []
    now_s[0] += 3.5
    assert [node for node, *_ in asked.ask()] == [2], "without 3, too, half of those that are left would be missing"
    behind = _Asked(_reached={})
    behind.lose(1)
    for _ in range(3):
        now_s[0] += 3.5
        assert behind.ask() == [], "a firewall that refuses what comes in proves nothing"
    asked.members._descriptions = {}  # torch's rendezvous at etcd lists nobody
    assert asked.ask() == []


def test_who_is_not_reached_when_the_store_moves_has_been_silent_since_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nodes that are cut off together with the one that served are known some seconds sooner; one that answers later is not lost."""
    now_s = [100.0]
    monkeypatch.setattr(node_members.time, "monotonic", lambda: now_s[0])
    for answer, lost in (("silent", [1]), ("open", [])):
        asked = _Asked(_node=2, _serving=0, _reserves={1: [["host"], 7], 2: [["own"], 8]}, _changed=[], _reserve=None)
        reach = {"host": None, "own": SimpleNamespace()}
        asked.members._rendezvous = SimpleNamespace(
            reach=lambda _, host, __, reach=reach: reach[host],
            abandon=lambda _: None,
            count_inside=lambda *_: 0,
        )
        asked.members._standby = SimpleNamespace(announce_needed=lambda *_: None)
        asked.members._orders |= {"run_id": "x", "min_nodes": 1, "endpoint": "here"}
        asked.members._reached |= {1: ["host", 1]}
        asked.lose(0)
        asked.members._move(None, [1, 2, 3])
        now_s[0] += 3.5
        asked.answers = {1: answer, 3: "open"}
        assert [node for node, *_ in asked.ask()] == lost
        now_s[0] += 100


@pytest.mark.parametrize(("is_ended", "is_told"), [(False, True), (True, False)])
def test_who_is_left_with_too_few_says_so_where_the_store_has_gone_as_well(*, is_ended: bool, is_told: bool) -> None:  # fmt: skip
    """It would wait at its own store, one of two that are needed, for up to ten minutes: the user learns why. Where the others' end is proved it goes on."""
    messages: list[str] = []
    asked = _Asked(_node=3, _serving=0, _reserves={3: [["own"], 8]}, _changed=[], _reserve=None)
    asked.members._rendezvous = SimpleNamespace(reach=lambda *_: SimpleNamespace(), abandon=lambda _: None)
    asked.members._standby = SimpleNamespace(announce_needed=lambda *_: None)
    asked.members._orders |= {"run_id": "x", "min_nodes": 1, "endpoint": "here"}
    asked.members._tell = messages.append
    for node in (0, 1, 2):
        asked.lose(node, is_ended=is_ended)
    asked.members._move(None, [3])
    assert any("can't reach 3 of the 4 nodes, which may continue without it" in text for text in messages) is is_told
    assert asked.members.was_cut_off is is_told


def test_who_ends_at_once_with_its_neighbour_has_met_nobody() -> None:
    """When a neighbour ends, those that only it may have heard are asked at once: they were members until now."""
    asked = _Asked(_neighbours=frozenset([1]), _name="1", _lost_nodes={})
    asked.answers[3] = "open"
    asked.members._detector = node_detector.Detector(0, on_lost=asked.members._report_lost, on_expelled=lambda _: None)  # fmt: skip
    asked.members._detector.note(node_detector.Loss(1, ["host", 1, 1], "", is_ended=True, is_gone=True))
    found = asked.members._detector.losses
    assert {node: (loss.is_ended, loss.is_gone) for node, loss in found.items()} == {1: (True, True), 2: (False, True)}  # fmt: skip


def _stand_at(node: int, place: tuple[str, int]) -> Members:
    """Return a member that waits at its own reserve, or at the store where all had met, which node 0 serves; all others are silent."""
    asked = _Asked(_node=node, _serving=0 if place[0] == "met" else node, _has_moved=place[0] != "met")
    for other in {0, 1, 2, 3} - {node} if place[0] != "met" else {1, 2, 3}:
        asked.lose(other, is_ended=False)
    return asked.members


def test_the_sides_of_a_network_that_is_whole_again_gather_at_one_store() -> None:
    """Of any two stores at which members wait, one side goes to that of the other, never both; and nowhere else."""
    places = {("met", 0): 0, ("reserve", 1): 1, ("reserve", 2): 2, ("reserve", 3): 3}

    def goes(node: int, own: tuple[str, int], to: tuple[str, int], who: str, round_number: int = 5) -> bool:
        state = SimpleNamespace(round=round_number, participants=[SimpleNamespace(addr=who, pid=int(who))])
        handler = SimpleNamespace(_state_holder=SimpleNamespace(state=state))
        return _stand_at(node, own).is_better_store(to, handler)

    for (one, at), (other, there) in itertools.permutations(places.items(), 2):
        assert goes(at, one, other, str(there)) is not goes(there, other, one, str(at)), (one, other)
    members = _stand_at(3, ("reserve", 3))
    members.may_gather = False  # others may have numbered their ranks with this node's, and go on as half of fewer
    met = SimpleNamespace(round=5, participants=[members._descriptions[0]])
    assert not members.is_better_store(("met", 0), SimpleNamespace(_state_holder=SimpleNamespace(state=met)))
    assert not goes(3, ("reserve", 3), ("met", 0), "3"), "nobody else is there"
    assert not goes(3, ("reserve", 3), ("met", 0), "9"), "only a newcomer is"
    assert not goes(3, ("reserve", 3), ("elsewhere", 0), "1")
    assert not goes(3, ("reserve", 3), ("met", 0), "1", round_number=0), "it was started anew"


def test_who_has_gathered_counts_those_that_were_silent() -> None:
    """It was cut off itself: they are not taken out of the round, half of all are enough at the store where all had met, and a store that is lost again is left again."""
    members = _stand_at(3, ("reserve", 3))
    taken_out: list[Any] = []
    members._rendezvous = SimpleNamespace(take_out=lambda _, nodes, __: taken_out.extend(nodes))
    members._standby, members._changed = SimpleNamespace(announce_needed=lambda *_: None), []
    members._is_cut_off = False
    members._orders |= {"run_id": "x", "min_nodes": 1, "conf": {}}
    assert members._needed == 3
    members.gather_at(("met", 0))
    assert members.was_cut_off
    assert (members.has_to_move, members._needed, members._orders["serving_node"]) == (False, 2, False)
    members.exclude_lost(SimpleNamespace())
    assert taken_out == []
    assert members.give_up_gathering()
    assert members.has_to_move
    members.exclude_lost(SimpleNamespace())
    assert len(taken_out) == 3
    assert not members.give_up_gathering()


def test_a_store_that_is_no_longer_the_better_one_is_not_gone_to() -> None:
    """It was found before this node went to another one: to go there would take it away from where the others gather."""
    job = SimpleNamespace(handler="here", orders={"endpoint": "here"})
    entry = Entry(job, lambda _: SimpleNamespace())
    search = SimpleNamespace(gathering=("there", ("reserve", 1), {"endpoint": "there"}))
    assert not entry._gather(SimpleNamespace(is_better_store=lambda *_: False), search)
    assert (search.gathering, job.handler, job.orders) == (None, "here", {"endpoint": "here"})


def test_a_store_may_be_found_as_long_as_one_that_serves_may_live() -> None:
    """Who reaches none waits: the whole network may be down; not if all that have one are proved to have ended."""
    asked = _Asked(_reserves={0: [["host"], 1], 1: [["host"], 2]})
    asked.lose(0)
    asked.lose(1, is_ended=False)
    assert asked.members.may_find_store
    asked.lose(1)
    assert not asked.members.may_find_store


def test_who_serves_the_store_is_probed_when_it_fails() -> None:
    """Where nothing listens any more its end is noted, and not where a launcher answers."""
    asked = _Asked(_serving=1)
    asked.answers[1] = "open"
    asked.members.probe_serving()
    assert not asked.noted
    asked.answers[1] = "refused"
    asked.members.probe_serving()
    (loss,) = asked.noted
    assert (loss.node, loss.is_ended, loss.is_gone) == (1, False, False)
