"""The nodes of one round, which of them were lost, and how those that are left meet again; the helper process loads this file by its path."""

from __future__ import annotations

import json
import secrets
import threading
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: torch waits 30 s for nodes that may still come. Those that are left after a loss end their ranks and come, or are
#: lost, too.
_LAST_CALL = timedelta(seconds=5)
#: When all that took part before are back, and when others may come as well.
_SOON_S, _MORE_S = 0.2, 2.0
#: So long the first node may take to make the key.
_KEY_S = timedelta(seconds=10)
#: A node that has often paused is given up after such a silence.
_SETTLE_S = 11.0
_TICK_S = 0.05
#: So many nodes have a store in reserve.
_NUM_RESERVES = 4
#: Nodes that do not come so long after a loss are asked whether they live, and again after as long; longer where many
#: ask.
_PROBE_EVERY_S, _PROBE_EVERY_OF_EACH_S = 1.0, 0.01
#: Who answers none of them for so long is lost.
_SILENT_S = 2.5


def count_needed(num_members: int, num_ended: int, num_gone: int, *, keeps_store: bool) -> int:
    """Return how many nodes must meet after a loss, so that no two sides of a cut network do.

    Args:
        num_members: How many took part.
        num_ended: How many of them are proved to have ended as members: these meet nowhere.
        num_gone: How many are proved to have ended by now: if all others meet, there is no other side.
        keeps_store: Whether they meet at the store where all had met, of which there is one: then half of the rest is
            enough.
    """
    voters = num_members - num_ended
    return min((voters + 1) // 2 if keeps_store else voters // 2 + 1, num_members - num_gone)


class Members:
    """Who took part in a round, and who is left.

    Args:
        store: Of the round, a connection of its own.
        node_rank: Which node we are.
        name: Of the round, as the parent knows it.
        orders: How the rendezvous was opened.
        handler: torch's rendezvous.
        say: Tells the parent.
        load: Loads another file of this folder: the package may not be there for the ranks' Python.
    """

    def __init__(
        self,
        store: Any,
        node_rank: int,
        name: str,
        orders: dict[str, Any],
        handler: Any,
        say: Callable[[dict[str, Any]], None],
        load: Callable[[str], Any],
    ) -> None:
        self._store, self._node, self._name, self._say = store, node_rank, name, say
        self._handler, self._standby, self._rendezvous = handler, load("node_standby"), load("node_rendezvous")
        self._orders, self._detecting = orders, load("node_detector")
        self._changed: list[tuple[Any, str, Any]] = []
        self._descriptions = {rank: node for node, rank in _list_participants(handler).items()}
        self._expecting: Any = None
        self._members: list[int] = []
        self._reserves: dict[int, list[Any]] = {}
        self._at: dict[int, list[list[Any]]] = {}
        #: Of the nodes in it: at which address a launcher was reached from here, since when it does not answer, and
        #: when they are asked next.
        self._reached: dict[int, list[Any]] = {}
        self._silent_s: dict[int, float] = {}
        self._probe_s = float("inf")
        self._neighbours: frozenset[int] = frozenset()
        self._is_cut_off = self._has_gathered = False
        #: Not once this node was in a round whose ranks may have been numbered on others: these may go on with fewer.
        self.may_gather = True
        self._serving: int | None = None
        self._stores: dict[tuple[str, int], int] = {}
        self._has_moved = False
        self._round = self._last_round = getattr(
            getattr(getattr(handler, "_state_holder", None), "state", None), "round", None
        )
        self._reserve = self._rendezvous.open_reserve() if node_rank < _NUM_RESERVES and self._can_move else None
        if int(store.add("beats/num", 1)) == 1:  # not all stores have compare_set
            store.set("beats/key", secrets.token_hex(16))
        store.wait(["beats/key"], _KEY_S)
        key = store.get("beats/key").decode()
        self._detector = self._detecting.Detector(
            node_rank, on_lost=self._report_lost, on_expelled=self._report_expelled
        )
        beats = load("node_beats")
        self._reach, life = beats.try_to_reach, beats.listen_for_life()
        self._beats = beats.Beats(self._detector, key, tell=self._tell, life=life)
        self._lost_nodes: dict[str, Any] = {}
        names = load("node_addresses")
        self._locate = names.locate
        addresses = names.list_own(orders)
        reserve = None if self._reserve is None else self._reserve.port
        about = {
            "at": [[one, self._beats.port] for one in addresses],
            "life": [[one, *life] for one in addresses],
            "reserve": [addresses, reserve],
        }
        if names.is_served_here(orders):
            store.set("beats/serves", str(node_rank))
        store.set(f"beats/{node_rank}", json.dumps(about))

    @property
    def _can_move(self) -> bool:
        return bool(self._orders["backend"] == "c10d")

    def begin(self, num_nodes: int, about: tuple[str, int, int]) -> None:
        """Hear the others; ``about`` are this node's host, first rank and number of ranks."""
        keys = [f"beats/{node}" for node in range(num_nodes)]
        everyone = list(range(num_nodes))
        # Nodes of torchrun write no such key, and are not watched.
        self._members = (
            everyone if self._store.check(keys) else [one for one in everyone if self._store.check([keys[one]])]
        )
        place = self._members.index(self._node)
        parent, children = self._detecting.list_neighbours(place, len(self._members))
        if self._store.check(["beats/serves"]):
            self._serving = int(self._store.get("beats/serves"))
        self._served_by = self._serving
        for one in dict.fromkeys([*self._members[:_NUM_RESERVES], *([] if self._serving is None else [self._serving])]):
            about_one = json.loads(self._store.get(keys[one]))
            self._reserves[one], self._at[one] = about_one["reserve"], about_one["life"]
        # Where the job may be if this node loses it: where it first met, where it is now, and where it may go.
        known = [self._locate(self._orders[name]) for name in ("origin", "endpoint")]
        served = [(host, port) for host, port in known if host]
        reserves = [(host, port) for hosts, port in self._reserves.values() if port for host in hosts]
        former, self._orders["places"] = self._orders.get("places", []), list(dict.fromkeys([*served, *reserves]))
        # All sides of a cut network know these in the same order: the store at which all have met, and the reserves.
        self._stores = {
            (host, port): node for node, (hosts, port) in self._reserves.items() for host in hosts if port
        } | dict.fromkeys(served[-1:], -1)
        for one in self._others:
            threading.Thread(target=self._find_address, args=(one,), daemon=True).start()
        node = None if parent is None else self._members[parent]
        self._neighbours = frozenset(self._members[one] for one in ([] if parent is None else [parent]) + children)
        at = None if node is None else (node, json.loads(self._store.get(keys[node]))["at"])
        self._beats.begin(about, at, [self._members[one] for one in children])
        if place == 0:
            self._standby.announce_needed(self._handler, self._orders["run_id"], 0)
        job = (self._rendezvous.name_job_key(self._orders["run_id"]), self._orders["job"])
        forwarder = self._orders.setdefault(
            "forwarder", self._standby.Forwarder(self._orders["run_id"], job, self._rendezvous.is_open)
        )
        forwarder.tell([], None)
        if place == 0 and self._can_move:
            # Looked up by who stands by, and may find the store gone.
            elsewhere = [
                (host, port)
                for one, (hosts, port) in self._reserves.items()
                if port and one != self._serving
                for host in hosts
            ]
            self._standby.announce_reserves(self._handler, self._orders["run_id"], elsewhere)
            if served:
                # Nodes that were left behind wait at one of those.
                past = self._standby.share_past(self._handler, self._orders["run_id"], served)
                current = {served[-1][1], *(port for _, port in reserves)}  # a host may have several names
                places = [place for place in dict.fromkeys([*past, *former]) if place[1] not in current]
                forwarder.tell(places, served[-1])

    def end(self) -> None:
        """Watch no more, and let go of the connections to the store."""
        self._beats.end()
        self._store = self._reserve = None

    # ------------------------------------------------------------ what is lost

    def _report_lost(self, loss: Any) -> None:
        if loss.node in self._neighbours and (loss.is_ended or loss.is_gone):
            # It reported other losses until it ended: who has ended with it has met nobody since.
            for node in self._others - set(self._detector.losses) - self._heard:
                self._ask(node, partial(self._judge_first, time.monotonic()))
        host, base, num = loss.about
        self._lost_nodes[str(loss.node)] = {
            "host": host,
            "base": base,
            "num": num,
            "why": loss.why,
            "is_ended": loss.is_ended,
        }
        self._say({f"{self._name}/lost_nodes": dict(self._lost_nodes)})

    def _report_expelled(self, why: str) -> None:
        self._say({f"{self._name}/expelled": why, f"{self._name}/lost_nodes": {}})

    def _tell(self, text: str) -> None:
        self._say({"said": text})

    def settle(self, timeout_s: float) -> None:
        """Wait until no neighbour is about to be given up."""
        until_s = time.monotonic() + timeout_s
        while not self._detector.is_sure(time.monotonic()) and time.monotonic() < until_s:
            time.sleep(_TICK_S)

    # --------------------------------------------------------- how to go on

    @property
    def has_to_move(self) -> bool:
        """Whether the store of the rendezvous is lost: with its node, or, if that is this one, by the others, who have given it up."""
        if not self._can_move or self._serving is None:
            return False
        is_given_up = self._detector.is_expelled and self._serving == self._node
        return (self._serving in self._detector.losses or is_given_up) and not self._has_gathered

    def leave(self, handler: Any) -> Any:
        """Return the rendezvous at which the nodes that are left meet: the same, without those that were lost, or another if its store was lost.

        No half of a job that was cut in two goes on alone: so many nodes must meet that no others can. Those whose end
            is proved don't count; half of the
        rest is enough with the store at which all have met.
        """
        if self.has_to_move:
            # If the others have given this one up, they had to take it that the store went with it, and have moved.
            away = {self._node} if self._detector.is_expelled else set(self._detector.losses)
            return self._move(handler, [one for one in self._members if one not in away])
        self.exclude_lost(handler)
        return handler

    def expect(self, handler: Any, *, may_come_more: bool) -> None:
        """Have nobody wait for longer once all that are left are there."""
        times = getattr(handler, "times", None)
        if times is not None and not self._detector.is_expelled:
            lost, grace_s = dict(self._detector.losses), _MORE_S if may_come_more else _SOON_S
            left = [node for rank, node in self._descriptions.items() if rank not in lost]
            times.expect(left, grace_s, self._needed, self._descriptions.values())
            self._expecting = times

    def has_enough(self, handler: Any) -> bool:
        """Tell of a round that is complete whether as many of those that took part are in it as have to meet: torch counts newcomers, too.

        If others have completed one meanwhile, that was asked of them.
        """
        if self._last_round is None:
            return True
        now = handler._state_holder.state.round
        is_next, self._last_round = now == self._last_round + 1, now
        self._is_cut_off = self._is_cut_off or not is_next
        num_back = self._rendezvous.count_inside(handler, self._descriptions.values())
        if is_next and num_back < len(self._members):
            self.settle(_SETTLE_S)  # who has not come may be about to be given up
        return not is_next or num_back >= self._needed

    @property
    def was_cut_off(self) -> bool:
        """Whether this node could not reach enough others, or these have met without it: the hosts that it lost are not to blame."""
        return self._is_cut_off or self._has_gathered

    def is_better_store(self, place: tuple[str, int], handler: Any) -> bool:
        """Tell whether those that wait at this node's store are to go to that one, where other members wait: of any two sides, one goes to the other."""
        own = len(self._members) if self.has_to_move else (self._serving or 0) if self._has_moved else -1
        store = self._stores.get(place, own) if self.may_gather else own
        is_anew = store == -1 and handler._state_holder.state.round <= (self._round or 0)
        others = [node for rank, node in self._descriptions.items() if rank != self._node]
        return store < own and not is_anew and bool(self._rendezvous.count_inside(handler, others))

    def gather_at(self, place: tuple[str, int]) -> None:
        """Wait there with the others that took part: who was lost by its silence alone counts again."""
        self._has_moved, self._has_gathered = self._stores[place] != -1, True
        self._serving = self._stores[place] if self._has_moved else self._served_by
        self._last_round = -1 if self._has_moved else self._round
        self._orders["serving_node"] = self._serving == self._node
        self._tell(f"other nodes wait for more at {place[0]}:{place[1]}: this node waits with them")

    def give_up_gathering(self) -> bool:
        """Go by what was lost again, as the store is; False if this node has not gathered with others."""
        had, self._has_gathered = self._has_gathered, False
        return had

    @property
    def may_find_store(self) -> bool:
        """Whether one of the nodes that have a store in reserve may live."""
        lost = self._detector.losses.items()
        return bool(self._reserves.keys() - {node for node, loss in lost if loss.is_ended or loss.is_gone})

    def probe_serving(self) -> None:
        """Find out, when its store fails, whether the node that serves it is lost: whoever heard it may be lost with it."""
        if self._serving is None or self._serving in {self._node, *self._heard} or self.has_to_move:
            return
        # It may have met others before it ended, so that nothing is proved.
        if "open" not in self._reach_all(self._serving):
            self._beats.do(partial(self._note, self._serving, "its store does not answer"))

    def probe_missing(self, handler: Any) -> None:
        """Find out, while the others are waited for, whether one that does not come has ended: whoever heard it may be lost with it.

        It asks those that could serve the store, and so all nodes of a job that a few can decide on. Never waits, and
        asks seldom.
        """
        now_s = time.monotonic()
        if not self._detector.losses or self._detector.is_expelled:
            return
        every_s = _PROBE_EVERY_S + _PROBE_EVERY_OF_EACH_S * len(self._members)
        # Not when torch's call begins to wait: it may hang before it has read anything.
        self._probe_s = min(self._probe_s, now_s + every_s)
        if now_s >= self._probe_s:
            self._probe_s = now_s + every_s
            for node in self._others:
                if self._is_missing(handler, node):
                    self._ask(node, partial(self._judge_missing, handler))
                else:
                    self._silent_s.pop(node, None)

    def _is_missing(self, handler: Any, node: int) -> bool:
        """Tell whether a node has not come, as far as is known, and nobody would tell us if it were lost."""
        if node in self._detector.losses or node in self._heard:
            return False
        state = handler._state_holder.state
        is_past = state.complete and state.round in {self._round, self._last_round} and not self._has_moved
        return (
            is_past or node == self._serving or not self._rendezvous.count_inside(handler, [self._descriptions[node]])
        )

    def _judge_missing(self, handler: Any, node: int, states: set[str]) -> None:
        """Take a node that has not come for lost if it has ended, or is silent and can be done without; it may have met others before it ended."""
        if "open" in states or self._detector.is_expelled or not self._is_missing(handler, node):
            self._silent_s.pop(node, None)
            return
        silent_s = time.monotonic() - self._silent_s.setdefault(node, time.monotonic())
        is_silent = node in self._reached and silent_s >= _SILENT_S
        if self._is_refused(node, states) or (is_silent and self._has_enough_without(node)):
            self._note(node, "it does not come, and its launcher does not answer")
            self._tell(
                f"node {node} (at {self._at[node][0][0]}) is lost: it does not come, and its launcher does not answer"
            )

    def _judge_first(self, begin_s: float, node: int, states: set[str]) -> None:
        if self._is_refused(node, states):
            _, is_gone = self._detector.judge_end(time.monotonic(), begin_s)
            self._note(node, "its launcher has ended", is_gone=is_gone)

    def _is_refused(self, node: int, states: set[str]) -> bool:
        """Tell whether a launcher has ended; not of one that was never reached: a firewall may refuse what comes in."""
        return states == {"refused"} and node in self._reached

    def _has_enough_without(self, node: int) -> bool:
        num_left = len(self._members) - len(self._detector.losses) - 1
        return num_left >= self._count_needed(keeps_store=self._keeps_store and node != self._serving)

    def _find_address(self, node: int) -> None:
        for at in self._at[node]:
            if self._reach(*at) == "open":
                self._reached[node] = at
                return

    def _note(self, node: int, why: str, *, is_gone: bool = False) -> None:
        self._detector.note(
            self._detecting.Loss(node, [self._at[node][0][0], 0, 0], why, is_ended=False, is_gone=is_gone)
        )

    def _ask(self, node: int, conclude: Callable[[int, set[str]], None]) -> None:
        """Find out what is at a launcher's port, and conclude in the thread that hears the others."""

        def ask() -> None:
            states = self._reach_all(node)
            self._beats.do(partial(conclude, node, states))

        threading.Thread(target=ask, daemon=True).start()

    def _reach_all(self, node: int) -> set[str]:
        return {self._reach(*at) for at in ([self._reached[node]] if node in self._reached else self._at[node])}

    @property
    def _heard(self) -> set[int]:
        return {peer.node for peer in list(self._detector.peers)}

    @property
    def _others(self) -> set[int]:
        return set(self._at) & set(self._descriptions) - {self._node}

    @property
    def knowledge(self) -> int:
        """A number that grows with each node that is lost, and each proof that one has ended; -1 if the others have given this one up."""
        lost = list(self._detector.losses.values())
        return -1 if self._detector.is_expelled else sum(1 + loss.is_ended + loss.is_gone for loss in lost)

    def exclude_lost(self, handler: Any) -> None:
        """Have nobody wait for nodes that are lost, and as many meet as it takes; called again if more are lost meanwhile."""
        lost, needed = dict(self._detector.losses), self._needed
        self._note_cut_off(lost, needed)
        self._change(handler, needed)
        if lost:
            self._standby.announce_needed(handler, self._orders["run_id"], needed)
            # Those that were silent may be back where the sides of a cut network gather.
            gone = [node for node, loss in lost.items() if loss.is_ended or not self._has_gathered]
            nodes = [self._descriptions[node] for node in gone if node in self._descriptions]
            self._rendezvous.take_out(handler, nodes, None if self._has_moved else self._round)

    def _note_cut_off(self, lost: dict[int, Any], needed: int) -> None:
        """Say so where too few are left to go on: the others may."""
        if not self._is_cut_off and len(self._members) - len(lost) < needed:
            self._is_cut_off = True
            num_silent = sum(not (loss.is_ended or loss.is_gone) for loss in lost.values())
            self._tell(
                f"this node can't reach {num_silent} of the {len(self._members)} nodes, which may continue without it: it waits (--rdzv-conf join_timeout={self._orders['conf'].get('join_timeout', 600)}), and looks for them, so that one job does not become two; check the network between the nodes"
            )

    @property
    def _needed(self) -> int:
        """How many of those that took part have to meet, by what is known now; 0 while none is lost."""
        if self._detector.is_expelled:
            return count_needed(len(self._members), 0, 0, keeps_store=self._keeps_store)
        return self._count_needed(keeps_store=self._keeps_store) if self._detector.losses else 0

    @property
    def _keeps_store(self) -> bool:
        return self._serving is not None and not self.has_to_move and not self._has_moved

    def _count_needed(self, *, keeps_store: bool) -> int:
        lost = list(self._detector.losses.values())
        num_ended, num_gone = sum(loss.is_ended for loss in lost), sum(loss.is_gone for loss in lost)
        return count_needed(len(self._members), num_ended, num_gone, keeps_store=keeps_store)

    def restore(self) -> None:
        """Give latecomers torch's time again, and let as few nodes meet as the user does."""
        if self._expecting is not None:
            self._expecting.expect([], 0.0)
        while self._changed:
            owner, name, before = self._changed.pop()
            object.__setattr__(owner, name, before)

    def _change(self, handler: Any, needed: int) -> None:
        """Have torch wait for so many nodes at least, and not for long for more."""
        settings = getattr(handler, "_settings", None)
        if settings is None or not needed:
            return
        for owner, name, value in (
            (settings.timeout, "_last_call", min(settings.timeout.last_call, _LAST_CALL)),
            (settings, "min_nodes", max(self._orders["min_nodes"], needed)),
        ):
            if hasattr(owner, name):
                self._changed.append((owner, name, getattr(owner, name)))
                object.__setattr__(owner, name, value)

    def _move(self, former: Any, left: list[int]) -> Any:
        """Open the rendezvous at the reserve of the first node that is left."""
        orders, needed = self._orders, self._needed
        for node, host, port in [
            (one, host, self._reserves[one][1])
            for one in left
            if one in self._reserves
            for host in self._reserves[one][0]
        ]:
            # If that one is lost as well while the others meet there, they go on to the next.
            begin_s = time.monotonic()
            handler = self._rendezvous.reach(orders, host, port) if port else None
            if handler is not None:
                serving = node
                break
            self._silent_s.setdefault(node, begin_s)  # it may be lost with the one that served
        else:
            if self.may_find_store and not self._is_cut_off:
                self._is_cut_off = True
                self._tell(
                    "no node that has a store in reserve is reached: this node tries again; check the network between the nodes"
                )
            raise ConnectionError(
                "the node that served the rendezvous was lost, and none that has a store in reserve is reached"
            )
        if not self._detector.is_expelled:  # else the others have said it, by what they know
            self._standby.announce_needed(handler, orders["run_id"], needed)
        self._serving, self._has_moved, self._last_round = serving, True, -1
        orders["serving_node"] = serving == self._node
        self._rendezvous.abandon(former)
        # The reserve serves from now on; and what torch does when a former rendezvous is collected fails in the thread
        # of its heartbeats.
        orders["kept"] = [*orders.get("kept", []), self._reserve, former]
        self._change(handler, needed)
        self._note_cut_off(dict(self._detector.losses), needed)
        self._tell(
            f"the node that served the rendezvous is lost: node {serving} serves it from now on, at {orders['endpoint']}"
        )
        return handler


def _list_participants(handler: Any) -> dict[Any, int]:
    """Return torch's descriptions of the nodes of the round, with their ranks; empty where its rendezvous has none."""
    holder = getattr(handler, "_state_holder", None)
    return dict(holder.state.participants) if holder is not None else {}
