"""A rendezvous between nodes whose clocks differ."""

from __future__ import annotations

import pickle
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousError, dynamic_rendezvous as torchs

from rankwise.engine import node_rendezvous

_LAST_CALL = timedelta(seconds=6)
OWN, OTHER = (torchs._NodeDesc(f"host{number}", 1, 0) for number in range(2))


class Kept:
    """A backend that keeps the state here."""

    name = "kept"

    def __init__(self, state: Any) -> None:
        self.bits = pickle.dumps(state)

    def get_state(self) -> tuple[bytes, int]:
        """Return what was written last."""
        return self.bits, 0

    def set_state(self, state: bytes, _token: object = None) -> tuple[bytes, int, bool]:
        """Take it."""
        self.bits = state
        return state, 0, True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of a clock that never jumps."""
    now_s = [1000.0]
    monkeypatch.setattr(node_rendezvous.time, "monotonic", lambda: now_s[0])
    return now_s


def open_holder(state: Any, times: node_rendezvous.Times | None = None) -> Any:
    """Return torch's view of a state, with corrected times."""
    settings = torchs.RendezvousSettings("job", 1, 4, torchs.RendezvousTimeout(last_call=_LAST_CALL), timedelta(seconds=5), 3)  # fmt: skip
    holder: Any = torchs._BackendRendezvousStateHolder(Kept(state), settings, cache_duration=0)  # type: ignore[arg-type]
    (times or node_rendezvous.Times()).correct(holder, OWN)
    return holder


@pytest.mark.parametrize("wrong_by", [timedelta(hours=-1), timedelta(0), timedelta(days=1)])
def test_a_node_lives_for_as_long_as_its_signs_change(wrong_by: timedelta, clock: list[float]) -> None:
    """Not for as long as they look new by another's clock; and what it has written stays as it is."""
    state = torchs._RendezvousState()
    state.participants, state.complete = {OWN: 0, OTHER: 1}, True
    state.last_heartbeats = dict.fromkeys((OWN, OTHER), datetime.now(timezone.utc) + wrong_by)
    holder = open_holder(state)
    for _ in range(4):
        clock[0] += 6
        state.last_heartbeats[OTHER] += timedelta(seconds=6)
        state.last_heartbeats[OWN] = datetime.now(timezone.utc)
        holder._backend.set_state(pickle.dumps(state))
        holder.sync()
        assert holder.state.last_heartbeats[OTHER] == state.last_heartbeats[OTHER]
    clock[0] += 14
    holder.sync()
    assert OTHER in holder.state.participants
    clock[0] += 2
    holder.sync()
    assert OTHER not in holder.state.participants


def test_a_clock_that_was_set_back_silences_nobody() -> None:
    """Else a node would send its next sign of life when its clock has caught up."""
    state = torchs._RendezvousState()
    state.participants = {OWN: 0}
    state.last_heartbeats = {OWN: datetime.now(timezone.utc) + timedelta(hours=1)}
    holder = open_holder(state)
    holder.sync()
    assert torchs._should_keep_alive(torchs._RendezvousContext(OWN, holder.state, holder._settings))


@pytest.mark.parametrize(
    "wrong_by", [timedelta(hours=-1), timedelta(seconds=-3), timedelta(seconds=5), timedelta(days=1)]
)
def test_the_last_call_lasts_no_longer_than_it_should(wrong_by: timedelta, clock: list[float]) -> None:
    """However far off the clock of the node is that gave it."""
    state = torchs._RendezvousState()
    state.participants = {OTHER: 0}
    state.last_heartbeats = {OTHER: datetime.now(timezone.utc)}
    state.deadline = datetime.now(timezone.utc) + _LAST_CALL + wrong_by
    holder = open_holder(state)
    holder.sync()
    left = holder.state.deadline - datetime.now(timezone.utc)
    assert timedelta(seconds=5) < left <= _LAST_CALL
    clock[0] += 7
    holder.sync()
    assert holder.state.deadline < datetime.now(timezone.utc)


def test_the_last_call_begins_wherever_enough_nodes_are_there(clock: list[float]) -> None:
    """Torch begins it when exactly as many have come as the last one to come needs: of nodes that need different numbers, each may have missed it."""
    state = torchs._RendezvousState()
    state.participants, state.last_heartbeats = {OTHER: 0}, {OTHER: datetime.now(timezone.utc)}
    holder = open_holder(state)
    holder.sync()
    assert timedelta(0) < holder.state.deadline - datetime.now(timezone.utc) <= _LAST_CALL
    clock[0] += 7
    holder.sync()
    assert holder.state.deadline < datetime.now(timezone.utc)


def test_newcomers_begin_no_last_call_in_place_of_those_that_have_to_meet(clock: list[float]) -> None:
    """Two of those that took part have to meet after a loss, and a newcomer has come before the second one: torch has begun the last call, which ends on no node until that one is there."""
    state = torchs._RendezvousState()
    state.participants = {OWN: 0, torchs._NodeDesc("new", 1, 0): 0}
    state.last_heartbeats = dict.fromkeys(state.participants, datetime.now(timezone.utc))
    state.deadline = datetime.now(timezone.utc)
    times = node_rendezvous.Times()
    times.expect([OWN, OTHER], 1.0, 2, [OWN, OTHER, torchs._NodeDesc("lost", 1, 0)])
    holder = open_holder(state, times)
    for _ in range(3):
        holder.sync()
        assert holder.state.deadline is None
        clock[0] += 4
    holder.state.participants[OTHER] = 0
    holder.state.last_heartbeats[OTHER] = datetime.now(timezone.utc)
    holder._sanitize()
    assert timedelta(0) < holder.state.deadline - datetime.now(timezone.utc) <= _LAST_CALL


def test_a_node_that_was_lost_is_taken_out_of_no_later_round(clock: list[float]) -> None:
    """It may have come back to it; of the round in which it was lost it is no part, whatever it has opened the rendezvous as since."""
    state = torchs._RendezvousState()
    state.participants, state.round = {OWN: 0, OTHER: 1}, 4
    state.last_heartbeats = dict.fromkeys((OWN, OTHER), datetime.now(timezone.utc))
    again = torchs._NodeDesc(OTHER.addr, OTHER.pid, 5)
    for is_complete, of_round, is_left in [
        (True, 3, True),
        (True, None, True),
        (True, 4, False),
        (False, 3, False),
    ]:
        state.complete = is_complete
        holder = open_holder(state)
        handler = SimpleNamespace(_state_holder=holder, _this_node=OWN)
        node_rendezvous.take_out(handler, [again], of_round)
        holder.sync()
        assert (OTHER in holder.state.participants) is is_left, (is_complete, of_round)


@pytest.mark.parametrize("is_complete", [False, True])
def test_who_leaves_a_round_that_it_waits_for_is_not_counted_there(*, is_complete: bool) -> None:
    """Nor can its call enter again; a round that has begun is another matter: the others may number their ranks with it."""
    state = torchs._RendezvousState()
    state.participants, state.complete = {OWN: 0, OTHER: 1}, is_complete
    state.last_heartbeats = dict.fromkeys((OWN, OTHER), datetime.now(timezone.utc))
    holder = open_holder(state)
    backend = holder._backend
    node_rendezvous.leave_round(SimpleNamespace(_state_holder=holder, _this_node=OWN))
    with pytest.raises(RendezvousError):
        holder.sync()
    left = pickle.loads(backend.get_state()[0])
    assert (OWN in left.participants, OTHER in left.participants) == (is_complete, True)


@pytest.mark.parametrize(("waiting", "ends_s"), [(set(), 1.0), ({torchs._NodeDesc("host2", 1, 0)}, 2.0)])
def test_the_last_call_ends_early_when_all_that_took_part_before_are_back(
    waiting: set[Any], ends_s: float, clock: list[float]
) -> None:
    """They may have opened the rendezvous again elsewhere since; who waits for the next round gets the time to come."""
    state = torchs._RendezvousState()
    state.participants, state.wait_list = {OTHER: 0}, waiting
    state.last_heartbeats = dict.fromkeys((OTHER, *waiting), datetime.now(timezone.utc))
    state.deadline = datetime.now(timezone.utc) + _LAST_CALL
    times = node_rendezvous.Times()
    times.expect([torchs._NodeDesc(node.addr, node.pid, 7) for node in (OWN, OTHER)], 1.0)
    holder = open_holder(state, times)

    def look() -> float:
        holder._backend.set_state(pickle.dumps(state))
        holder.sync()
        return float((holder.state.deadline - datetime.now(timezone.utc)).total_seconds())

    assert look() > 5.0, "one of them is not there yet"
    state.participants[OWN] = 0
    state.last_heartbeats[OWN] = datetime.now(timezone.utc)
    assert ends_s - 0.5 < look() <= ends_s
    times.expect([OWN], 1.0, 2, [OWN, OTHER])
    assert look() > 5.0, "one that was lost is back, and others may be on their way"
    times.expect([], 0.0)
    assert look() > 5.0
