"""Which nodes are lost, on a simulated network: all that live hear of it in time, and nobody is lost for less. The detectors are the launchers' own."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings, strategies as st

from rankwise.engine import node_detector
from rankwise.engine.node_detector import BEAT_S, Detector, Loss, Peer, Silence, list_neighbours
from unit.simulated_nodes import Network

if TYPE_CHECKING:
    from collections.abc import Iterator


@given(st.integers(2, 400), st.data())
def test_whatever_a_loss_leaves_of_the_tree_hears_of_it(number: int, data: st.DataObject) -> None:
    """Each part into which lost nodes cut the tree has a node that was connected to a lost one; and parents and children agree."""
    lost = data.draw(st.sets(st.integers(0, number - 1), min_size=1, max_size=min(number - 1, 40)))
    near = _list_near(number)
    assert all(place in near[other] for place in near for other in near[place])
    assert all(_find_heard(near, place, lost) for place in near if place not in lost)


def test_a_silence_counts_by_a_peers_own_habits() -> None:
    """A second of silence is a loss for one that beats ten times a second, and none for one that often pauses for half a second, or has only just come."""
    quick, slow, new = Silence(0.0), Silence(0.0), Silence(99.0)
    for beat in range(990):
        quick.hear(beat * BEAT_S)
    for beat in range(100):
        slow.hear(beat * 1.0 - 0.5 * (beat % 2))
    now = 100.0
    assert now - quick.heard_s > quick.bound_s(now)
    assert now - slow.heard_s <= slow.bound_s(now)
    assert now - new.heard_s <= new.bound_s(now)
    assert Silence(0.0).bound_s(1000.0) < 1.0
    stalled = Silence(0.0)
    stalled.forgive(5.0)
    assert 5.5 - stalled.heard_s <= stalled.bound_s(100.0)
    for _ in range(10):
        stalled.forgive(0.6)
    assert 6.0 - stalled.heard_s > stalled.bound_s(100.0)


def test_an_end_proves_less_to_one_that_did_not_run() -> None:
    """Who did not run for a second may have been given up, and the launcher that has ended may have met others before; in some seconds these may have let more nodes in. Not if it was heard after that."""
    detector = Detector(0, on_lost=lambda _: None, on_expelled=lambda _: None)
    proofs = []
    for now_s in (0.0, 1.0, 4.0, *(4.0 + 0.3 * turn for turn in range(1, 12))):
        detector.wake(now_s)
        proofs.append(detector.judge_end(now_s))
    assert proofs[:4] == [(True, True), (False, True), (False, False), (False, False)]
    assert proofs[-1] == (True, True)
    detector.wake(20.0)
    assert detector.judge_end(20.2, stated_s=20.0) == (False, False)  # read with all that had come meanwhile
    assert detector.judge_end(20.2, stated_s=20.1) == (True, True)


def test_an_end_proves_less_of_one_that_was_silent_before() -> None:
    """Others may have given it up sooner than this node, and it may have met them before it ended; an answer at its port says no more than that it lived."""
    detector = Detector(0, on_lost=lambda _: None, on_expelled=lambda _: None)
    assert [detector.judge_end(10.0, stated_s=at_s) for at_s in (9.5, 9.0, 7.0)] == [
        (True, True),
        (False, True),
        (False, False),
    ]
    silence = Silence(0.0)
    silence.answer(5.0)
    assert (silence.heard_s, silence.stated_s) == (5.0, 0.0)


def test_the_better_of_two_verdicts_stands_and_is_passed_on_once() -> None:
    """Neighbours lose a node at the same time: one, to which its port was never open, knows no more than that, and another has a proof; who found its store silent does not know its ranks. Whichever comes first."""
    about = ["host2", 4, 2]
    silent, ended = (
        Loss(2, about, "silent", is_ended=False),
        Loss(2, about, "ended", is_ended=True, is_gone=True),
    )
    store = Loss(2, ["10.0.0.1", 0, 0], "its store does not answer", is_ended=False, is_gone=True)
    for losses in itertools.permutations((silent, ended, store)):
        reported: list[Loss] = []
        detector = Detector(0, on_lost=reported.append, on_expelled=lambda _: None)
        for loss in losses * 2:
            detector.read(Peer(1, about, False, Silence(0.0), Silence(0.0), None), loss.message)
        assert detector.losses[2] == ended
        assert reported[-1] == ended
        assert len(reported) <= len(losses)


def test_the_end_of_one_that_was_given_up_proves_nothing() -> None:
    """It knows that, and may have met others meanwhile."""
    network = Network(3)
    network.run(20.0)
    root = network.nodes[0].detector
    root.note(Loss(1, ["host1", 8, 8], "silent", is_ended=False))
    network.kill(1)
    network.run(3.0)
    assert not any(node.detector.losses[1].is_gone for node in (network.nodes[0], network.nodes[2]))


@pytest.fixture(scope="module")
def settled() -> Iterator[None]:
    """In the first seconds of an attempt silences may last longer; here the ranks have long imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_detector, "_FIRST_S", 0.0)
        yield


@pytest.mark.usefixtures("settled")
@settings(max_examples=60)
@given(st.integers(2, 120), st.sampled_from([0.0, 0.01]), st.integers(0, 2**20), st.data())
def test_all_that_live_hear_of_each_loss_beside_them(number: int, loss: float, seed: int, data: st.DataObject) -> None:  # fmt: skip
    """Launchers that are killed, hosts that are switched off and launchers that are frozen at the same time: the others hear of those that border on their part of the tree, within two seconds, of no other, and are not expelled."""
    faults = data.draw(
        st.dictionaries(st.integers(0, number - 1), st.sampled_from(["kill", "lose", "freeze"]), min_size=1, max_size=5)
    )
    network, near = Network(number, loss=loss, seed=seed), _list_near(number)
    network.run(1.0)
    for place, fault in faults.items():
        getattr(network, fault)(place)
    network.run(2.0)
    for node in network.nodes:
        if node.number not in faults:
            assert set(node.detector.losses) >= _find_heard(near, node.number, set(faults))
            assert set(node.detector.losses) <= set(faults)
            assert not node.expelled


@pytest.mark.usefixtures("settled")
@given(st.integers(3, 60), st.data())
def test_one_that_was_frozen_learns_that_the_others_went_on(number: int, data: st.DataObject) -> None:
    """Awake, it is expelled, whatever else it reads first, and counts nobody as lost."""
    place = data.draw(st.integers(0, number - 1))
    network = Network(number)
    network.run(1.0)
    network.freeze(place)
    network.run(3.0)
    network.thaw(place)
    network.run(3.0)
    frozen = network.nodes[place]
    assert frozen.expelled
    assert not frozen.detector.losses
    assert all(set(node.detector.losses) == {place} for node in network.nodes if node is not frozen)


@pytest.mark.usefixtures("settled")
@given(st.integers(4, 100), st.data())
def test_a_cut_blames_nobody_of_ones_own_side(number: int, data: st.DataObject) -> None:
    """Nothing passes between two parts of a network: whoever hears of a loss hears of a node of the other part, not proved to have ended."""
    side = data.draw(st.sets(st.integers(0, number - 1), min_size=1, max_size=number - 1))
    network = Network(number)
    network.run(1.0)
    network.cut(side)
    network.run(2.5)
    near = _list_near(number)
    for node in network.nodes:
        there = side if node.number not in side else set(range(number)) - side
        assert set(node.detector.losses) <= there
        assert not any(loss.is_ended for loss in node.detector.losses.values())
        assert set(node.detector.losses) >= near[node.number] & there


@pytest.mark.usefixtures("settled")
@given(st.integers(3, 60), st.sampled_from(["in", "out"]), st.booleans(), st.data())
def test_a_node_whose_network_passes_one_way_only_is_the_one_that_is_lost(number: int, passes: str, has_paused: bool, data: st.DataObject) -> None:  # fmt: skip
    """It has lost all its neighbours, and its word to those that hear it is not believed: it does not hear them. That no process has paused for long counts for processes alone. Healed, nobody else is lost."""
    place = data.draw(st.integers(0, number - 1))
    network = Network(number)
    network.run(1.0)
    for peer in [one for node in network.nodes for one in node.detector.peers] if has_paused else []:
        peer.silence._longest_s = 1.0
    network.cut({place}, passes=passes)
    for turn in range(2):
        network.run(2.0)
        for node in network.nodes:
            assert node.number == place or set(node.detector.losses) == {place}
            assert node.number == place or not node.expelled
        if not turn:
            network.heal()


@pytest.mark.usefixtures("settled")
def test_who_was_given_up_tells_those_that_had_waited_for_it_for_longer() -> None:
    """Children of a root know each other through it alone: it is frozen for so long that one of them gives it up, and the others, which it had often kept waiting, would not."""
    network = Network(4)
    network.run(1.0)
    for node in network.nodes[2:]:
        (peer,) = node.detector.peers
        peer.silence._longest_s = 1.0
    network.freeze(0)
    network.run(1.5)
    network.thaw(0)
    network.run(1.0)
    assert network.nodes[0].expelled
    assert [set(node.detector.losses) for node in network.nodes] == [set(), {0}, {0}, {0}]


@pytest.mark.usefixtures("settled")
def test_a_network_that_loses_a_third_of_all_packets_loses_no_node() -> None:
    """For eight seconds TCP repeats what is lost, later each time; a silence that is too long is one of the connection, and new ones pass."""
    for seed in range(60):
        network = Network(4, seed=seed)
        network.run(1.0)
        network.loss = 0.3
        network.run(8.0)
        assert [node.detector.losses for node in network.nodes] == [{}] * 4


@pytest.mark.usefixtures("settled")
def test_a_cut_that_is_healed_in_time_is_no_loss() -> None:
    """What was held up comes, in its order, and nobody is lost."""
    network = Network(40)
    network.run(2.0)
    network.cut({1, 17, 18})
    network.run(0.6)
    network.heal()
    network.run(3.0)
    assert not any(node.detector.losses or node.expelled for node in network.nodes)


def test_a_host_that_acknowledges_nothing_is_lost_as_soon_in_the_first_seconds(monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """While all ranks import a launcher may be silent for longer, since it may not get to run; its kernel does."""
    monkeypatch.setattr(node_detector, "_FIRST_S", 15.0)
    network = Network(4)
    network.run(1.0)
    network.lose(1)
    network.freeze(2)
    network.run(1.5)
    assert [list(network.nodes[node].detector.losses) for node in (0, 3)] == [[1], [1]]
    network.run(2.5)
    assert set(network.nodes[3].detector.losses) == {1, 2}


def test_a_slow_node_hears_of_a_loss_as_well(settled: None) -> None:
    """The root freezes; one of its children, to whose part of the tree nobody else could tell it, pauses for up to 0.6 s between two looks: all know in a few seconds."""
    network = Network(100, slow={5: 0.5})
    network.run(2.0)
    network.freeze(0)
    network.run(4.0)
    assert all(set(node.detector.losses) == {0} for node in network.nodes[1:])


@pytest.mark.usefixtures("settled")
def test_loss_of_packets_and_slow_processes_are_no_losses_of_nodes() -> None:
    """200 nodes, of which one in ten does not get to run for up to 0.7 s at a time, on a network that loses one packet in a hundred: in a minute nobody is given up."""
    network = Network(200, loss=0.01, slow=dict.fromkeys(range(0, 200, 10), 0.7))
    network.run(60.0)
    assert not any(node.detector.losses or node.expelled for node in network.nodes)


@pytest.mark.usefixtures("settled")
def test_who_waits_longer_than_others_for_a_silent_node_is_not_sure_meanwhile() -> None:
    """A node has often paused, as one of its neighbours has seen: the others give it up sooner, and end their ranks."""
    network = Network(4)
    network.run(2.0)
    patient = network.nodes[1].detector
    assert patient.is_sure(network.now_s)
    patient.peers[0].silence._longest_s = 1.0
    network.freeze(0)
    network.run(1.5)
    assert network.nodes[2].detector.is_sure(network.now_s)
    assert not patient.is_sure(network.now_s)
    network.run(3.0)
    assert set(patient.losses) == {0}
    assert patient.is_sure(network.now_s)


@pytest.mark.usefixtures("settled")
def test_a_connection_that_stands_still_is_no_loss_of_a_node_that_answers() -> None:
    """Four packets in a row are lost, and what was sent behind them comes 0.9 s late: a new connection finds the launcher at work. Frozen, it does not answer."""
    network = Network(20)
    network.run(2.0)
    (parent,) = (peer for peer in network.nodes[1].detector.peers if peer.is_parent)
    parent.link.arrived_s = network.now_s + 0.9
    network.run(3.0)
    assert not any(node.detector.losses or node.expelled for node in network.nodes)
    network.freeze(2)
    network.run(1.0)
    assert set(network.nodes[0].detector.losses) == {2}


@pytest.mark.usefixtures("settled")
def test_a_connection_that_never_moves_again_is_made_anew() -> None:
    """A firewall has forgotten it: nobody is lost for that, and news passes by the next one."""
    network = Network(40)
    network.run(2.0)
    (parent,) = (peer for peer in network.nodes[1].detector.peers if peer.is_parent)
    parent.link.arrived_s = float("inf")
    network.run(30.0)
    assert not any(node.detector.losses or node.expelled for node in network.nodes)
    network.kill(20)
    network.run(1.0)
    assert all(set(node.detector.losses) == {20} for node in network.nodes if node.number != 20)


def _list_near(number: int) -> dict[int, set[int]]:
    near: dict[int, set[int]] = {}
    for place in range(number):
        parent, children = list_neighbours(place, number)
        near[place] = {*children, *([] if parent is None else [parent])}
    return near


def _find_heard(near: dict[int, set[int]], place: int, lost: set[int]) -> set[int]:
    """Return the lost nodes that border on a place's part of the tree."""
    part, new = {place}, {place}
    while new := {other for one in new for other in near[one] if other not in lost} - part:
        part |= new
    return {other for one in part for other in near[one] if other in lost}


def test_a_neighbour_that_is_lost_before_it_has_connected_again_is_missed(settled: None) -> None:
    """Its connection broke, it answered at its port, and its host was gone a moment later: no beat would tell."""
    network = Network(4)
    network.run(20.0)
    root = network.nodes[0].detector
    root.close(next(peer for peer in root.peers if peer.node == 2), "its connection broke", network.now_s)
    network.run(0.01)
    network.lose(2)
    network.run(30.0)
    for node in (0, 1, 3):
        assert list(network.nodes[node].detector.losses) == [2]
