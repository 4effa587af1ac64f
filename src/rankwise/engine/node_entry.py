"""How a node gets into a round of torch's rendezvous, or learns that it has to go elsewhere; the helper process loads this file by its path."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: So long the launchers may take to find out that the node which serves the rendezvous is lost, and to go on at
#: another.
_MOVE_S = 3.0
#: How often a node looks whether others have met elsewhere, once it has waited for longer than they usually take.
_SEARCH_S, _USUAL_S = 1.0, 3.0
#: So long one that the others have given up looks for them.
_FIND_S = 60.0
#: So long a store may be silent where the sides of a network that was cut have gathered.
_GATHER_S = 30.0
_TICK_S = 0.05
#: What torch raises when the store has gone.
LOST_STORE = {"RendezvousConnectionError", "DistNetworkError"}


class Call:
    """A call in a thread of its own, and what it has come to."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.value: Any = None
        self.error: Exception | None = None
        self.is_over = threading.Event()
        threading.Thread(target=self._make, args=(call,), daemon=True).start()

    def _make(self, call: Callable[[], Any]) -> None:
        try:
            self.value = call()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self.error = error
        self.is_over.set()


class _Search:
    """Looks whether the others have met elsewhere, while this node waits for them: the network may have been cut, and be whole again.

    Args:
        orders: How the rendezvous was opened, where it is, and where else the job may be.
        reach: Opens the rendezvous at another host and port; None if nothing is there.
        before: Who took part in the last round; None for a node that did not.

    Attributes:
        found: The rendezvous, and the orders that belong to it.
        gathering: A rendezvous where others wait for as many as have to meet, as this node does; where it is, and the
            orders.
    """

    def __init__(self, orders: dict[str, Any], reach: Callable[..., Any], before: Any) -> None:
        self._orders, self._reach, self._before, self._ended = orders, reach, before, threading.Event()
        self.found: tuple[Any, dict[str, Any]] | None = None
        self.gathering: tuple[Any, tuple[str, int], dict[str, Any]] | None = None
        for host, port in orders.get("places", ()):
            # One each: the store of a frozen host takes the connection and never answers.
            threading.Thread(target=self._run, args=(host, port), daemon=True).start()

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    def _run(self, host: str, port: int) -> None:
        handler, orders = None, dict(self._orders)
        seen: dict[Any, Any] = {}
        self._ended.wait(_USUAL_S)
        while not self._ended.wait(_SEARCH_S) and self.found is None:
            is_nowhere = self._before is not None and self._before.has_to_move
            if self._orders["endpoint"] in {f"{host}:{port}", f"[{host}]:{port}"} and not is_nowhere:
                handler = None
                continue  # we wait here
            try:
                handler = handler or self._reach(orders, host, port)
                if handler is None:
                    continue
                before, seen = seen, _read_heartbeats(handler)
                # Those of nodes that have gone stay there for a while.
                if not any(before.get(node, moment) != moment for node, moment in seen.items()):
                    continue
                if handler._state_holder.state.complete:
                    self.found = (handler, orders)
                elif self._before is not None and self._before.is_better_store((host, port), handler):
                    self.gathering = (handler, (host, port), orders)
            except Exception:  # noqa: BLE001 - torch raises many kinds; it is lost again
                handler = None


class Entry:
    """One node's way into one round.

    Args:
        job: The job's rendezvous as this node sees it.
        load: Loads another file of this folder.
    """

    def __init__(self, job: Any, load: Callable[[str], Any]) -> None:
        self._job, self._standby, self._rendezvous = (
            job,
            load("node_standby"),
            load("node_rendezvous"),
        )
        #: Why this node is not to meet the others where it was to; empty if it goes elsewhere.
        self.why = ""
        #: Of which rendezvous it was asked last whether the job has moved, when, and what came of it.
        self._asked: tuple[Any, float, Any] = (None, 0.0, None)
        #: The latest call by which this node leaves the last round.
        self._current: threading.Event | None = None
        self._gathered_s = time.monotonic()

    def meet(self, before: Any) -> Any:
        """Return torch's round; None where this node is not to meet the others here: its place was taken, or they have met elsewhere.

        Args:
            before: Who took part in the last round; None for a node that did not.
        """
        search = _Search(self._job.orders, self._rendezvous.reach, before)
        try:
            return self._meet_first(search) if before is None else self._meet_without_lost(before, search)
        finally:
            self._current = None
            search.end()

    def _meet_first(self, search: _Search) -> Any:
        call = Call(self._job.handler.next_rendezvous)
        restore = self._wait(call, lambda: search.found is not None)
        is_lost = restore is None and type(call.error).__name__ in LOST_STORE
        orders = self._job.orders
        if not call.is_over.is_set():
            return self._leave(search)
        if is_lost and self._standby.can_stand_by(self._job.handler, orders):
            # It looks for the others as who stands by does; before they have ever met, where the user has said.
            if not orders.get("places"):
                self.why = f"the store at {orders['endpoint']} was lost before the nodes had met"
            return self._leave(search)
        return _take(call, restore)

    def _meet_without_lost(self, before: Any, search: _Search) -> Any:
        """The launchers hear each other meanwhile: a call of torch's store would not return if the node that serves it were lost now."""
        conf = self._job.orders["conf"]
        until_s = time.monotonic() + float(conf.get("join_timeout", 600))  # torch's
        while True:
            moves, known, has_left = before.has_to_move, before.knowledge, threading.Event()
            self._current = has_left

            # The store is lost: that at which all had met, or, behind it, the one to which this call has moved.
            def is_left(*, moves: bool = moves, has_left: threading.Event = has_left) -> bool:
                return bool(before.has_to_move) and (not moves or has_left.is_set())

            call, failed_s, restore = Call(partial(self._meet_again, before, has_left)), float("inf"), None
            while not is_left():
                is_vain = partial(self._is_vain, before, search, is_left, known=known)
                restore = self._wait(call, is_vain) or restore
                if search.found is not None or self._has_moved():
                    return self._leave(search)
                # What moves to another store may not be overtaken, nor a round be left that has just begun.
                is_waiting = not call.is_over.is_set() and (not moves or has_left.is_set())
                may_gather = time.monotonic() < until_s and (is_waiting or call.error is not None)
                if may_gather and self._gather(before, search):
                    break
                if not call.is_over.is_set():
                    if before.knowledge != known and not is_left():
                        known = before.knowledge
                        self._exclude(before)
                    continue
                is_unmoved = moves and not has_left.is_set() and time.monotonic() < until_s
                if restore is None and self._may_try_again(before, call, is_unmoved=is_unmoved):
                    break
                # The store may be gone because its node is, which its neighbours are about to tell, if they live.
                failed_s = min(failed_s, time.monotonic())
                # Given up by the others, it learns from nobody where they are, but may find them.
                bound_s = _FIND_S if before.knowledge < 0 else 0.0 if moves and not has_left.is_set() else _MOVE_S
                if call.error is None or restore is not None or time.monotonic() - failed_s > bound_s:
                    return _take(call, restore)
                before.probe_serving()
                time.sleep(_TICK_S)

    def _may_try_again(self, before: Any, call: Call, *, is_unmoved: bool) -> bool:
        """Tell whether to begin anew after an error: the store where the sides gathered is lost as well, or none has been reached, as the whole network is down."""
        if type(call.error).__name__ in LOST_STORE and before.give_up_gathering():
            return True
        if call.error is None or not is_unmoved or not before.may_find_store:
            return False
        time.sleep(_SEARCH_S)
        return True

    def _gather(self, before: Any, search: _Search) -> bool:
        """Wait with the others at one store: each side of a network that was cut waits at its own, and none has enough alone. False if there is none."""
        found, search.gathering = search.gathering, None
        if found is None or not before.is_better_store(found[1], found[0]):
            return False  # it may have been one before this node went to another
        handler, place, orders = found
        self._current = None
        Call(partial(self._rendezvous.leave_round, self._job.handler)).is_over.wait(_SEARCH_S)
        self._job.orders.update(endpoint=orders["endpoint"], serving_node=False)
        self._job.go_to(handler)
        before.gather_at(place)
        self._gathered_s = time.monotonic()
        return True

    def _meet_again(self, before: Any, has_left: threading.Event) -> Any:
        handler = before.leave(self._job.handler)
        if has_left is not self._current:
            return None  # it hung at a frozen store, and this node has moved meanwhile
        if handler is not self._job.handler:
            self._job.handler = handler
            self._job.watch()
        has_left.set()
        before.expect(handler, may_come_more=self._job.num_more > 0)
        return handler.next_rendezvous()

    def _is_vain(self, before: Any, search: _Search, is_left: Callable[[], bool], *, known: int) -> bool:
        before.probe_missing(self._job.handler)
        handler = self._job.handler
        heard_s = max(self._gathered_s, getattr(getattr(handler, "_state_holder", None), "_last_sync_time", 0.0))
        if time.monotonic() - heard_s > _GATHER_S and before.give_up_gathering():
            self._rendezvous.abandon(handler)  # its store is frozen
        is_elsewhere = search.found is not None or search.gathering is not None
        return is_elsewhere or before.knowledge != known or is_left()

    def _exclude(self, before: Any) -> None:
        """More nodes were lost while the others meet: have nobody wait for them."""
        call = Call(partial(before.exclude_lost, self._job.handler))
        call.is_over.wait(_SEARCH_S)  # a store that is lost by now never answers
        before.expect(self._job.handler, may_come_more=self._job.num_more > 0)

    def _has_moved(self) -> bool:
        """Tell whether the job goes on elsewhere, as far as that is known: the question is asked in another thread, since a frozen store never answers."""
        handler = self._job.handler
        asked, at_s, call = self._asked
        if asked is not handler or (call.is_over.is_set() and time.monotonic() - at_s > _SEARCH_S):
            is_known = asked is handler and bool(call.value)
            call = Call(partial(self._standby.has_moved, handler, self._job.orders))
            self._asked = (handler, time.monotonic(), call)
            return is_known
        return bool(call.value)

    def _wait(self, call: Call, is_vain: Callable[[], bool]) -> Callable[[], None] | None:
        """Wait for the round; if torch holds this node as one too many, have its call fail, and return what mends that."""
        restore, taking_out = None, None
        while not call.is_over.wait(_TICK_S) and not is_vain() and not self._has_moved():
            handler = self._job.handler
            restore = restore or self._rendezvous.withdraw(handler)
            if self._rendezvous.is_shut_out(handler) and (taking_out is None or taking_out.is_over.is_set()):
                # With that torch puts it among those that are too many.
                taking_out = Call(partial(self._rendezvous.wait_outside, handler))
        return restore

    def _leave(self, search: _Search) -> None:
        """Meet the others elsewhere; torch's call, which nothing ends from outside, is made to fail."""
        self._rendezvous.abandon(self._job.handler)
        if search.found is not None:
            handler, orders = search.found
            self._job.orders.update(endpoint=orders["endpoint"], serving_node=False)
            self._job.go_to(handler)


def _read_heartbeats(handler: Any) -> dict[Any, Any]:
    """Return when the nodes that meet or have met there were last heard; empty if we are one of them: that is a round of the past."""
    holder = handler._state_holder
    holder._last_sync_time = -1.0  # what it has read a second ago won't do
    holder.sync()
    state = holder.state
    is_past = any(
        one.pid == os.getpid() and one.addr == handler._this_node.addr
        for one in [*state.participants, *state.wait_list]
    )
    if state.closed or is_past:
        return {}
    return {node: moment for node, moment in state.last_heartbeats.items() if node in state.participants}


def _take(call: Call, restore: Callable[[], None] | None) -> Any:
    if restore is not None:
        restore()
    if call.error is not None and restore is None:
        raise call.error
    return call.value
