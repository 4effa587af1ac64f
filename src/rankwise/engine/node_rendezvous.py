"""torch's own rendezvous, and what we change in it; the helper process loads this file by its path.

Its names are private to torch: where one is missing, torch's own way holds.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MOST_TRIES = 20
#: So long a store may take to answer that is to be used.
_REACH_S = 3.0
_FOREVER = timedelta(days=365)
#: A node writes a sign of life each 5 s. Where the first that we see is too old, its clock may be wrong: it has so long
#: to write another.
_SECOND_SIGN_S = 7.0
#: Who waits for the next round comes so soon.
_WAITING_S = 2.0
#: torch looks at the state once a second; up to 100 nodes look more often than that.
_LOOK_S, _LOOK_OF_EACH_S, _MOST_LOOK_S = 0.1, 0.01, 1.0
#: Who tries to reach a host and port, in which way, and the rendezvous that it has found.
_reaching: dict[tuple[str, str, int], tuple[threading.Thread, list[Any]]] = {}
_reaching_lock = threading.Lock()


def open_rendezvous(orders: dict[str, Any]) -> Any:
    """Open it as it was ordered, with each node's own clock."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    handler: Any = registry.get_rendezvous_handler(
        RendezvousParameters(
            backend=orders["backend"],
            endpoint=orders["endpoint"],
            run_id=orders["run_id"],
            min_nodes=orders["min_nodes"],
            max_nodes=orders["max_nodes"],
            local_addr=orders["local_addr"],
            **orders["conf"],
        )
    )
    holder, store = getattr(handler, "_state_holder", None), getattr(handler, "_store", None)
    if orders["backend"] == "c10d" and store is not None:
        store.set(name_job_key(orders["run_id"]), orders["job"])
    if hasattr(holder, "_cache_duration"):
        _look_often(holder, min(_MOST_LOOK_S, max(_LOOK_S, _LOOK_OF_EACH_S * orders["max_nodes"])))
    if hasattr(holder, "_sanitize"):
        handler.times = Times()
        handler.times.correct(holder, handler._this_node)
    return handler


def name_job_key(run_id: str) -> str:
    """Return where a store says which job's nodes meet at it: many jobs have the same id, torch's default."""
    return f"rankwise/{run_id}/job"


def _look_often(holder: Any, every_s: float) -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    def delay(seconds: float | tuple[float, float]) -> None:
        time.sleep(random.uniform(*seconds) if isinstance(seconds, tuple) else min(seconds, every_s))

    holder._cache_duration = every_s
    vars(dynamic_rendezvous)["_delay"] = delay  # this process opens no other


def open_elsewhere(orders: dict[str, Any], host: str, port: int) -> Any:
    """Open it at a store that is served already, and note that it is there from now on."""
    orders["endpoint"] = _join(host, port)
    return open_rendezvous({**orders, "backend": "c10d", "conf": {**orders["conf"], "is_host": "0"}})


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_reserve() -> Any:
    """Open a store to which the others may go if that of the rendezvous is lost; None if this host has no port for it."""
    from torch.distributed import TCPStore

    with contextlib.suppress(RuntimeError):
        return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    return None


def hold_port(port: int) -> None:
    """Have the nodes agree on this port for the ranks' store, if it is ours to serve: our launcher has bound it.

    torch takes one that is free when it looks, and by then another program may have it.
    """
    from torch.distributed.elastic.rendezvous import api

    vars(api)["get_free_port"] = lambda: port


def reach(orders: dict[str, Any], host: str, port: int) -> Any:
    """Open it where this node does not serve it; None if nothing is there, or nothing answers: the store of a frozen host never does."""
    own = dict(orders)
    handler = _try(lambda: open_elsewhere(own, host, port) if is_open(host, port) else None, ("reach", host, port))
    if handler is not None:
        orders.update(endpoint=_join(host, port), serving_node=False)
    return handler


def open_again(orders: dict[str, Any], host: str, port: int) -> Any:
    """Open it where the user has said, as at first; None if it is not served there, and not by this node."""
    own = {**orders, "endpoint": orders["origin"]}
    # A connection to a store that is not served is tried for a minute.
    may_open = own["backend"] != "c10d" or _may_serve(own, host)
    handler = _try(lambda: open_rendezvous(own) if may_open or is_open(host, port) else None, ("again", host, port))
    if handler is not None:
        orders["endpoint"] = own["endpoint"]
        orders.pop("serving_node", None)
    return handler


def _may_serve(orders: dict[str, Any], host: str) -> bool:
    """Tell whether torch has this node serve it, if nobody does."""
    from torch.distributed.elastic.rendezvous import utils

    matches: Any = getattr(utils, "_matches_machine_hostname", None)
    choice = orders["conf"].get("is_host")
    return bool(matches and matches(host)) if choice is None else str(choice).lower() in {"1", "true", "t", "yes", "y"}


def _try(opening: Callable[[], Any], way: tuple[str, str, int]) -> Any:
    """Return what it opens; None if it fails, or has not done so yet: what it finds later is for who asks next.

    A frozen host holds up one thread, however often it is tried.
    """
    opened: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):  # it was lost meanwhile, too
            opened.extend(one for one in [opening()] if one is not None)

    with _reaching_lock:
        thread, found = _reaching.get(way, (None, opened))
        if thread is None or not (thread.is_alive() or found):
            thread, found = threading.Thread(target=run, daemon=True), opened
            _reaching[way] = thread, found
            thread.start()
    thread.join(_REACH_S)
    with _reaching_lock:
        return found.pop() if found else None


def is_open(host: str, port: int) -> bool:
    """Tell whether something listens there."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1.0):
        return True
    return False


class Times:
    """The times in a rendezvous' state by the clock of this node, however wrong those of others are.

    torch takes each for written by one clock: a node whose clock is an hour ahead takes all others for dead, and takes
        them out; where it is behind, others wait for
    an hour longer than the last call lasts.
    """

    def __init__(self) -> None:
        self._signs: dict[Any, tuple[datetime, float]] = {}
        self._last_call: tuple[int, float] | None = None
        self._expected, self._voters = set[Any](), set[Any]()
        self._needed, self._grace_s = 0, 0.0
        self._all_since_s: float | None = None
        # torch's call and another of this node's threads may read a state at the same time.
        self._lock = threading.Lock()

    def expect(self, nodes: Iterable[Any], grace_s: float, needed: int = 0, voters: Iterable[Any] = ()) -> None:
        """Have the last call end so many seconds after these have come. With no nodes, it ends as ever.

        It does not begin before so many of ``voters`` have come. Where one of those is back that was not expected, more
        may be on their way.
        """
        self._expected, self._voters = set(map(_identify, nodes)), set(map(_identify, voters))
        self._needed, self._grace_s = needed, grace_s

    def correct(self, holder: Any, own: Any) -> None:
        """Do so each time that a state is read by ``holder``, for the node ``own``."""
        remove_dead = holder._sanitize

        def sanitize() -> None:
            with self._lock:
                sanitize_alone()

        def sanitize_alone() -> None:
            state = holder.state
            written = dict(state.last_heartbeats)
            self._note(written, holder._settings)
            now, now_s = datetime.now(timezone.utc), time.monotonic()
            state.last_heartbeats = {node: now - timedelta(seconds=now_s - self._signs[node][1]) for node in written}
            remove_dead()
            state.last_heartbeats = {node: written[node] for node in state.last_heartbeats}
            if own in written and written[own] > now:
                state.last_heartbeats[own] = now - holder._settings.keep_alive_interval  # else it sends none until then
            self._correct_last_call(state, holder._settings, now, now_s)

        holder._sanitize = sanitize

    def _note(self, written: dict[Any, datetime], settings: Any) -> None:
        """Note when each sign of life was first seen."""
        now, now_s = datetime.now(timezone.utc), time.monotonic()
        bound_s = (settings.keep_alive_interval * settings.keep_alive_max_attempt).total_seconds()
        for node, moment in written.items():
            before = self._signs.get(node)
            if before is None:
                age_s = max(0.0, (now - moment).total_seconds())
                self._signs[node] = (moment, now_s - min(age_s, max(0.0, bound_s - _SECOND_SIGN_S)))
            elif before[0] != moment:
                self._signs[node] = (moment, now_s)

    def _correct_last_call(self, state: Any, settings: Any, now: datetime, now_s: float) -> None:
        """Let it last from when it was first seen.

        Nodes that need different numbers may all have missed the moment at which torch begins it.
        """
        here = set(map(_identify, state.participants))
        is_enough = len(here) >= settings.min_nodes and len(self._voters & here) >= self._needed
        if self._needed and not is_enough:
            state.deadline = None  # torch has begun it: newcomers count there, too
        if state.complete or (state.deadline is None and not is_enough):
            self._last_call = self._all_since_s = None
            return
        if self._last_call is None or self._last_call[0] != state.round:
            self._last_call = (state.round, now_s)
        state.deadline = now + settings.timeout.last_call - timedelta(seconds=now_s - self._last_call[1])
        if not self._expected or not self._expected <= here or self._voters & here - self._expected:
            self._all_since_s = None
            return
        if self._all_since_s is None:
            self._all_since_s = now_s
        grace_s = _WAITING_S if state.wait_list else self._grace_s
        state.deadline = min(state.deadline, now + timedelta(seconds=self._all_since_s + grace_s - now_s))


def _identify(node: Any) -> tuple[str, int]:
    """Return what stays the same of a node wherever it opens a rendezvous."""
    return node.addr, node.pid


def count_inside(handler: Any, nodes: Iterable[Any]) -> int:
    """Return how many of these nodes take part in the round."""
    return len(set(map(_identify, nodes)) & set(map(_identify, list(handler._state_holder.state.participants))))


def _retire(handler: Any) -> None:
    """Send no more signs of life there: others would take a round of the past for one that still runs."""
    timer: Any = getattr(handler, "_keep_alive_timer", None)
    with contextlib.suppress(AttributeError):
        timer._ctx.stop_event.set()  # its own cancel() would wait for a call that a frozen store holds up


def withdraw(handler: Any) -> Callable[[], None] | None:
    """Have torch's call fail if it holds this node in its list of those that are too many: the last place was taken meanwhile.

    Returns:
        Restores torch's settings; None where it does not hold it.
    """
    holder = getattr(handler, "_state_holder", None)
    if holder is None or handler._this_node not in getattr(holder.state, "redundancy_list", ()):
        return None
    settings, timeout = handler._settings, handler._settings.timeout
    if settings.max_nodes < 0:
        return None  # done already
    before = (settings.max_nodes, timeout._join)
    # It leaves its list when places seem to be free, and then has no time left to wait for one.
    object.__setattr__(settings, "max_nodes", -settings.max_nodes)
    timeout._join = -_FOREVER

    def restore() -> None:
        object.__setattr__(settings, "max_nodes", before[0])
        timeout._join = before[1]

    return restore


def is_shut_out(handler: Any) -> bool:
    """Tell whether torch holds this node in its list of those that wait for the next round, though all places of this one were taken meanwhile."""
    holder = getattr(handler, "_state_holder", None)
    if holder is None:
        return False
    return is_full(handler) and handler._this_node in holder.state.wait_list


def is_full(handler: Any) -> bool:
    """Tell whether all places of the round are taken by nodes that are still in it."""
    holder = getattr(handler, "_state_holder", None)
    if holder is None:
        return False
    return bool(holder.state.complete) and len(holder.state.participants) >= abs(handler._settings.max_nodes)


def leave_round(handler: Any) -> None:
    """Take this node out of a round that it waits for: the others there must not count it any more.

    Its call fails, and can't enter again.
    """
    _stop(handler)
    _take_out(handler, lambda state: {handler._this_node} & set(() if state.complete else state.participants))


def abandon(handler: Any) -> None:
    """Have calls that still wait there fail, and change nothing: it may be reached again when the others have met without this node."""
    handler.is_abandoned = True
    _stop(handler)


def _stop(handler: Any) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousError

    def refuse() -> None:
        raise RendezvousError("this node meets the others elsewhere")  # its heartbeats take that in silence

    _retire(handler)
    with contextlib.suppress(AttributeError):
        handler._state_holder.sync = refuse


def take_out(handler: Any, lost: Iterable[Any], of_round: int | None) -> None:
    """Take nodes that were lost out of torch's rendezvous, which would wait 15 s for a sign of them.

    Args:
        handler: torch's rendezvous.
        lost: The nodes.
        of_round: In which round they were lost; in a later one that is complete they may be back. None where all rounds
            are later.
    """
    identities = {_identify(node) for node in lost}

    def change(state: Any) -> set[Any]:
        inside = {*state.participants, *state.wait_list}
        is_later = state.complete and state.round != of_round
        return set() if is_later else {node for node in inside if _identify(node) in identities}

    _take_out(handler, change)


def wait_outside(handler: Any) -> None:
    """Take this node out of those that wait for the next round: torch puts it among those that are too many then."""
    _take_out(handler, lambda state: {handler._this_node} & state.wait_list)


def _take_out(handler: Any, choose: Callable[[Any], set[Any]]) -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    own, epilogue = (
        getattr(handler, "_state_holder", None),
        getattr(dynamic_rendezvous, "_remove_participant_epilogue", None),
    )
    if own is None or epilogue is None:
        return  # another kind of rendezvous, or another torch: its own bound holds
    # Another than torch's own, which a call of it may be using meanwhile.
    holder = type(own)(own._backend, own._settings, cache_duration=0)
    if hasattr(handler, "times"):
        handler.times.correct(holder, handler._this_node)
    for _ in range(_MOST_TRIES):
        holder.sync()
        state = holder.state
        gone = choose(state)
        if not gone or getattr(handler, "is_abandoned", False):  # while it waited for the store
            return
        was_inside = gone & set(state.participants)
        for one in gone:
            state.participants.pop(one, None)
            state.wait_list.discard(one)
            state.last_heartbeats.pop(one, None)
        if was_inside:
            epilogue(state, holder._settings)
        holder.mark_dirty()
        if holder.sync():
            return
