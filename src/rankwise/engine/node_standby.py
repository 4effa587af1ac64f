"""A node that comes when a job runs already waits outside of torch's rendezvous until it may enter; the helper process loads this file by its path.

If all places are taken it stands by, and takes the one of a node that is lost. While the others meet again after a loss it stays outside in any case: there
it would count as one of those that took part before, and the smaller side of a network that was cut could become large enough by it. It enters
once enough of them have met.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: How often it looks; a store that does not answer for so long is lost, and so is the job when none is found for so
#: long.
_LOOK_S, _SILENT_S, _LOST_S = 0.3, 3.0, 60.0
#: So long it waits at a store in reserve for the others, who may be elsewhere.
_STAY_S = 5.0
#: So many places where the job has been are remembered.
_MOST_PAST = 12
_FORWARD_S, _REACH = 1.0, timedelta(seconds=5)
_FOREVER = timedelta(days=365)


class Tickets:
    """The nodes that stand by, each by its number, in the order in which they came.

    Args:
        store: Of the rendezvous.
        run_id: The job's name.
    """

    def __init__(self, store: Any, run_id: str) -> None:
        self._store, self._prefix = store, f"rankwise/{run_id}/standby"
        self._seen: dict[int, tuple[int, float]] = {}
        self._names: dict[int, str] = {}

    def take(self, node: object) -> int:
        """Return a number of one's own; ``node`` is torch's description of it."""
        ticket = int(self._store.add(f"{self._prefix}/number", 1))
        self._store.set(f"{self._prefix}/{ticket}/node", str(node))
        return ticket

    def beat(self, ticket: int) -> None:
        """Show that one is still there."""
        self._store.add(f"{self._prefix}/{ticket}", 1)

    def list_alive(self, state: Any) -> list[int]:
        """Return the numbers of those that were heard of late and are not in torch's ``state`` yet: who may enter still stands by until it has."""
        now_s, alive = time.monotonic(), []
        entered = {str(node) for node in _list_inside(state)}
        for ticket in range(1, int(self._store.add(f"{self._prefix}/number", 0)) + 1):
            beats = int(self._store.add(f"{self._prefix}/{ticket}", 0))
            if self._seen.get(ticket, (None, 0.0))[0] != beats:
                self._seen[ticket] = (beats, now_s)
            if beats and now_s - self._seen[ticket][1] < _SILENT_S and self._name(ticket) not in entered:
                alive.append(ticket)
        return alive

    def _name(self, ticket: int) -> str:
        if ticket not in self._names:  # written before the first beat
            self._names[ticket] = self._store.get(f"{self._prefix}/{ticket}/node").decode()
        return self._names[ticket]


def _list_inside(state: Any) -> set[Any]:
    return {*state.participants, *state.wait_list}


def announce_reserves(handler: Any, run_id: str, places: list[tuple[str, int]]) -> None:
    """Tell who stands by where the others go if the node that serves the rendezvous is lost."""
    store = getattr(handler, "_store", None)
    if store is not None:
        store.set(f"rankwise/{run_id}/reserves", json.dumps(places))


def announce_needed(handler: Any, run_id: str, needed: int) -> None:
    """Tell who comes how many of those that took part before must have met after a loss; 0 once they have."""
    store = getattr(handler, "_store", None)
    if store is not None:
        store.set(f"rankwise/{run_id}/needed", str(needed))


def announce_end(handler: Any, run_id: str) -> None:
    """Tell who stands by that the job is over."""
    store = getattr(handler, "_store", None)
    with contextlib.suppress(Exception):  # the store may be gone already, and then they see that
        if store is not None:
            store.set(f"rankwise/{run_id}/over", "1")


def share_past(handler: Any, run_id: str, places: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Add to the places where the job has been, and return the latest: who heads the job later may not have been there."""
    store, key = handler._store, f"rankwise/{run_id}/past"
    known = [(host, port) for host, port in json.loads(store.get(key))] if store.check([key]) else []
    latest = [*(place for place in known if place not in places), *places]
    if known and known[0] not in latest[-_MOST_PAST:]:
        latest = [known[0], *latest[-_MOST_PAST:]]  # the first is where new nodes are told to go
    store.set(key, json.dumps(latest))
    return latest


class Forwarder:
    """Tells those who come where the job has been, and find a store there, where it is now: nodes that were left behind, or that are started again.

    Args:
        run_id: The job's name.
        job: Where a store says whose it is, and what it says of this job: another with the same name, or none, is told
            nothing.
        is_open: Whether something listens at a host and port.
    """

    def __init__(self, run_id: str, job: tuple[str, str], is_open: Callable[[str, int], bool]) -> None:
        self._run_id, self._is_open = run_id, is_open
        self._key, self._job = job
        self._now: Any = None
        self._places: set[tuple[str, int]] = set()
        self._begun: set[tuple[str, int]] = set()

    def tell(self, places: list[tuple[str, int]], now: Any) -> None:
        """Tell it from now on at these hosts and ports, where the job has been, and nowhere else."""
        self._now, self._places = now, set(places)
        for place in self._places - self._begun:
            # A frozen store takes the connection and never answers: that holds up one thread, in however many rounds.
            self._begun.add(place)
            threading.Thread(target=self._run, args=place, daemon=True).start()

    def _run(self, host: str, port: int) -> None:
        from torch.distributed import TCPStore

        store = None
        while True:
            time.sleep(_FORWARD_S)
            try:
                if (host, port) not in self._places:
                    store = None
                    continue
                if store is None and self._is_open(host, port):
                    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_REACH)
                if store is not None and store.check([self._key]) and store.get(self._key).decode() == self._job:
                    store.set(f"rankwise/{self._run_id}/moved", json.dumps(self._now))
            except Exception:  # noqa: BLE001 - torch raises many kinds; whatever it is, the next store there is a new one
                store = None


def can_stand_by(handler: Any, orders: dict[str, Any]) -> bool:
    """Tell whether a node can look at the state before it enters; torch's older rendezvous at etcd, and others, have their own way."""
    return (
        orders["backend"] in {"c10d", "etcd-v2"}
        and getattr(handler, "_state_holder", None) is not None
        and getattr(handler, "_store", None) is not None
    )


def has_moved(handler: Any, orders: dict[str, Any]) -> bool:
    """Tell whether the job goes on elsewhere, says one of its nodes; note where it will be if this store is lost."""
    store = getattr(handler, "_store", None) if hasattr(handler, "_state_holder") else None
    if store is None:
        return False
    try:
        # The others may have met after this node had looked, and without it.
        reserves = [] if orders.get("places") else _read_reserves(store, orders["run_id"])
        if reserves and not orders.get("places"):
            orders["places"] = reserves
        return bool(store.check([f"rankwise/{orders['run_id']}/moved"]))
    except Exception:  # noqa: BLE001 - a store without it, or none any more
        return False


def _read_reserves(store: Any, run_id: str) -> list[tuple[str, int]]:
    key = f"rankwise/{run_id}/reserves"
    return [(host, port) for host, port in json.loads(store.get(key))] if store.check([key]) else []


class Standby:
    """Waits until this node may enter.

    Args:
        orders: How the rendezvous was opened.
        say: Tells the parent.
        reach: Opens the rendezvous at another host and port; None if nothing is there.
        open_again: The same where the user has said, and this node may serve it.
        origin: Where that is.
    """

    def __init__(
        self,
        orders: dict[str, Any],
        say: Callable[[dict[str, Any]], None],
        reach: Callable[[str, int], Any],
        open_again: Callable[[str, int], Any],
        origin: tuple[str, int],
    ) -> None:
        self._orders, self._say, self._reach = orders, say, reach
        self._open_again, self._origin = open_again, origin

    def wait(self, handler: Any) -> tuple[Any, str]:
        """Return the rendezvous at which to enter, and why not, if the job is over.

        Raises:
            ConnectionError: No node of the job is reached any more.
            TimeoutError: The others do not meet again.
        """
        if not can_stand_by(handler, self._orders):
            return handler, ""
        look, begun_s, found_s = _Look(handler, self._orders, is_moved=False), time.monotonic(), time.monotonic()
        places: list[tuple[str, int]] = list(self._orders.get("places", ()))
        while True:
            look.wait_change()
            now_s = time.monotonic()
            if look.says in {"enter", "over"}:
                self._orders["places"] = look.reserves or places
                return look.handler, "" if look.says == "enter" else "the job has ended"
            if look.moved_to is not None:
                places = [look.moved_to]
            places = look.reserves or places
            self._say({"standing_by": look.is_full})
            if look.is_there:
                found_s = now_s
            if look.is_full:
                begun_s = now_s
            elif now_s - begun_s > float(self._orders["conf"].get("join_timeout", 600)):
                raise TimeoutError(f"the other nodes have not met again for {now_s - begun_s:.0f} s")
            if look.is_lost(now_s):
                look = self._replace(look, places, now_s - found_s)

    def _replace(self, look: _Look, places: list[tuple[str, int]], lost_s: float) -> _Look:
        """Look elsewhere; where nothing is found, here again: that may have been an answer of the past, or the store is new."""
        if lost_s > _LOST_S:
            shown = ", ".join(f"{host}:{port}" for host, port in places or [self._origin])
            raise ConnectionError(
                f"no node of this job is reached any more, neither where it met nor at {shown}"
                if places
                else f"nothing serves the rendezvous at {shown} any more"
            )
        found = self._look_elsewhere(places)
        if found is None and look.is_silent(time.monotonic()):
            return look
        look.is_given_up = True
        return found or _Look(look.handler, self._orders, is_moved=look.is_moved)

    def _look_elsewhere(self, places: list[tuple[str, int]]) -> Any:
        for _ in range(len(places)):
            host, port = places.pop(0)
            places.append((host, port))
            handler = self._reach(host, port)
            if handler is not None:
                return _Look(handler, self._orders, is_moved=True)
        # Before the nodes have met for the first time there is no other place, and nobody who has moved.
        handler = None if places else self._open_again(*self._origin)
        if handler is not None:
            return _Look(handler, self._orders, is_moved=False)
        time.sleep(_LOOK_S)
        return None


class _Look:
    """What threads see of one rendezvous: a call of a store whose host is frozen never returns.

    Attributes:
        says: "wait", "enter" or "over".
        moved_to: Where the job goes on, says one of its nodes.
        is_full: Whether all places are taken.
        is_there: Whether the job's nodes have met here.
        reserves: Where they go if this store is lost.
        is_given_up: Set by who looks elsewhere.
    """

    def __init__(self, handler: Any, orders: dict[str, Any], *, is_moved: bool) -> None:
        self.handler, self._orders, self.is_moved = handler, orders, is_moved
        self.says, self.is_full, self.is_there, self.is_given_up = "wait", False, False, False
        self.reserves: list[tuple[str, int]] = []
        self.moved_to: tuple[str, int] | None = None
        self._begun_s = self._seen_s = time.monotonic()
        self._failed_s: float | None = None
        self._changed, self._ticket = threading.Event(), 0
        self._tickets = Tickets(handler._store, orders["run_id"])
        threading.Thread(target=self._run, daemon=True).start()

    def wait_change(self) -> None:
        """Wait until there is something new, or for a while."""
        self._changed.wait(_LOOK_S)
        self._changed.clear()

    def is_lost(self, now_s: float) -> bool:
        """Tell whether the store does not answer any more, or the others don't come to this one."""
        if self.moved_to is not None:
            return True
        if self._failed_s is not None:  # if the job has ended, that is about to be known
            return now_s - self._failed_s > _LOOK_S
        return self.is_silent(now_s) or (self.is_moved and not self.is_there and now_s - self._begun_s > _STAY_S)

    def is_silent(self, now_s: float) -> bool:
        """Tell whether a call does not return: it may, once the host runs again, and another would only wait beside it."""
        return self._failed_s is None and self.moved_to is None and now_s - self._seen_s > _SILENT_S

    def _run(self) -> None:
        try:
            while not self.is_given_up and (self.says == "wait" or self._is_entering()):
                if self._ticket:
                    self._tickets.beat(self._ticket)
                if self.says == "wait":
                    self._look()
                    self._changed.set()
                time.sleep(_LOOK_S)
        except Exception:  # noqa: BLE001 - torch raises many kinds; whatever it is, this store is of no use
            self._failed_s = time.monotonic()
            self._changed.set()

    def _look(self) -> None:
        if has_moved(self.handler, self._orders):
            host, port = json.loads(self.handler._store.get(self._key("moved")))
            self.moved_to = (host, port)
            return
        holder = self.handler._state_holder
        holder._last_sync_time = -1.0  # what it has read a second ago won't do
        holder.sync()
        state, most = holder.state, self._orders["max_nodes"]
        self._seen_s, store = time.monotonic(), self.handler._store
        self.reserves = _read_reserves(store, self._orders["run_id"]) or self.reserves
        self.is_there = self.is_there or bool(state.complete)
        node = self.handler._this_node
        free = most - len(_list_inside(state) - {node})
        self.is_full = bool(state.complete) and len(state.participants) >= most
        is_own = node in state.participants
        may_enter = free > 0 and (state.complete or len(state.participants) >= self._count_before_us())
        if state.closed:
            self.says = "over"
        elif is_own or (may_enter and self._is_next(free)):
            self.says = "enter"
        elif self.is_full and not self._ticket:
            self._ticket = self._tickets.take(node)
            self._tickets.beat(self._ticket)
            threading.Thread(target=self._wait_over, daemon=True).start()

    def _is_entering(self) -> bool:
        """Tell whether torch does not count us in yet: a free place that is ours would go to who stands behind us."""
        is_inside = self.handler._this_node in _list_inside(self.handler._state_holder.state)
        return self.says == "enter" and not is_inside and time.monotonic() - self._seen_s < 3 * _STAY_S

    def _count_before_us(self) -> float:
        """Return how many must have met before a node that did not take part before may join them: as many as let no other side of a cut network meet."""
        store, key = self.handler._store, self._key("needed")
        if store.check([key]):
            return int(store.get(key))
        return float("inf") if self.is_moved else 0

    def _is_next(self, free: int) -> bool:
        """Tell whether a free place is ours: who has stood by for longer goes first."""
        state = self.handler._state_holder.state
        before = [one for one in self._tickets.list_alive(state) if not self._ticket or one < self._ticket]
        return len(before) < free

    def _wait_over(self) -> None:
        with contextlib.suppress(Exception):
            self.handler._store.clone().wait([self._key("over")], _FOREVER)
            self.says = "over"
            self._changed.set()

    def _key(self, name: str) -> str:
        return f"rankwise/{self._orders['run_id']}/{name}"
