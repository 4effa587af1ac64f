"""One job's rendezvous as this node sees it; the helper process loads this file by its path."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_MOVE_S, _LOOK_S = 3.0, 0.5
#: So long the nodes that have met may take to number their ranks.
_AGREE_S = 15.0
#: The nodes that stand by are counted every so many looks.
_STANDBY_TURNS = 4
#: Node 0 gives the secret as soon as it has met the others.
_SECRET_S = 60


class _UnnumberedError(RuntimeError):
    """The nodes have met, and one of them was lost before all knew their ranks."""


class JobRendezvous:
    """One job's rendezvous as this node sees it, over all its restarts.

    Args:
        orders: How to open it.
        say: Tells the parent.
        load: Loads another file of this folder: the package may not be there for the ranks' Python.
    """

    def __init__(
        self, orders: dict[str, Any], say: Callable[[dict[str, Any]], None], load: Callable[[str], Any]
    ) -> None:
        self._say, self._load = say, load
        # Each round gets a store of its own: torch's reuse of one store over restarts leaves the addresses of
        # dead ranks in it, and a node that joins late waits for a key that nobody writes again.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        import logging

        # That a heartbeat was not sent, each step of a rendezvous at etcd: the parent is told what matters of it.
        for name in ("dynamic_rendezvous", "etcd_rendezvous"):
            logger = logging.getLogger(f"torch.distributed.elastic.rendezvous.{name}")
            logger.addFilter(lambda record: record.levelno >= logging.CRITICAL)
        self.orders, self.static = orders, orders["backend"] == "static"
        orders["origin"] = orders["endpoint"]
        self.note = "" if self.static else _take_address(orders, load("node_addresses"))
        self.handler = load("node_rendezvous").open_rendezvous(orders)
        self.store: Any = None
        self.world, self.watching, self.is_joining = 0, False, False
        self.exchange: Any = None
        self.members: Any = None
        self.num_joined = 0
        #: Nodes that wait for the next round, and that stand by.
        self.num_more = 0

    def stand_by(self) -> dict[str, Any]:
        """Wait until this node may meet the others; say why not, if the job is over."""
        if self.static or self.members is not None:  # who has taken part meets the others first
            return {"over": ""}
        rendezvous, orders = self._load("node_rendezvous"), self.orders
        standby = self._load("node_standby").Standby(
            orders,
            self._say,
            partial(rendezvous.reach, orders),
            partial(rendezvous.open_again, orders),
            self._load("node_addresses").locate(orders["origin"]),
        )
        handler, over = standby.wait(self.handler)
        self.go_to(handler)
        return {"over": over}

    def join(self, restart: int, host: str, *, num_roles: int, store_port: int) -> dict[str, Any]:
        """Meet the other nodes and return which ranks are ours.

        Args:
            restart: Which attempt this is, from 0.
            host: Our name; empty if we tell the others nothing of our ranks.
            num_roles: How many ranks ``--role-counts`` makes, which share a secret; 0 without it. Where another number
                has come each launcher ends with an error, and the first may take the store away with it: nobody waits
                for a secret there.
            store_port: That our launcher holds for the ranks' store, in case that it is ours to serve.
        """
        self._load("node_rendezvous").hold_port(store_port)
        self.watching = False
        self._end_exchange()
        self.num_joined += 1
        before, self.members = self.members, None
        try:
            return self._join(before, restart, host, num_roles)
        except _UnnumberedError as error:
            # Those that took part in the last round hear each other until the next one has begun.
            self._end_exchange()
            if self.members is not None:
                self.members.end()
            self.members = before
            return {"again": str(error)}
        finally:
            if before is not None and before is not self.members:
                before.end()

    def _join(self, before: Any, restart: int, host: str, num_roles: int) -> dict[str, Any]:
        self.is_joining = True
        entry = self._load("node_entry").Entry(self, self._load)
        info = self._meet(entry, before)
        self.is_joining = False
        if info is None:
            return {"again": entry.why}
        if before is not None and not before.has_enough(self.handler):
            raise _UnnumberedError(
                "too few of the nodes that took part before have come, and the others may continue without them"
            )
        if before is not None:
            before.may_gather = False
        node_rank, self.world, self.store = info.rank, info.world_size, info.store
        store, rendezvous_place = info.store, info.bootstrap_store_info
        served = self.static
        if self.static and restart:
            from torch.distributed import PrefixStore
            from torch.distributed.elastic.rendezvous import RendezvousStoreInfo

            # Ranks of the first attempt use the agents' own store, as under torchrun; later ones a fresh one.
            store = PrefixStore(f"rankwise/restart_{restart}", store)
            address = rendezvous_place.master_addr
            rendezvous_place, served = RendezvousStoreInfo.build(node_rank, store, local_addr=address), False
        self.store = store
        try:
            base, world, role_base, role_world = self._number_ranks(store, node_rank, restart, host)
        except Exception as error:
            if isinstance(error, _UnnumberedError):
                raise
            if self.static:
                if restart or not self._may_be_served_again(error):
                    raise
                self.handler._store = None  # torch keeps it
            raise _UnnumberedError(
                f"a node that had met the others was lost before all ranks were numbered ({type(error).__name__})"
            ) from error
        # How many waited for this round may still be on its way to the parent, which would take them for others.
        self._say({"waiting": 0})
        self.watching = not self.static
        secret = self._share_secret(store, node_rank) if num_roles == world else ""
        return {
            "secret": secret,
            "node_rank": node_rank,
            "num_nodes": self.world,
            "base_rank": base,
            "world_size": world,
            "base_role_rank": role_base,
            "role_world_size": role_world,
            "master_addr": rendezvous_place.master_addr,
            "master_port": rendezvous_place.master_port,
            "store_is_served": served,
            "run_id": self.handler.get_run_id(),
            "round": str(self.num_joined),
            "was_cut_off": before is not None and before.was_cut_off,
            "judge": None if self.exchange is None else self.exchange.judge,
        }

    def _meet(self, entry: Any, before: Any) -> Any:
        """Meet in torch's rendezvous; nodes that were lost are taken out of it first, so that nobody waits for them."""
        try:
            return self._meet_static() if self.static else entry.meet(before)
        finally:
            if before is not None:
                before.restore()

    def _meet_static(self) -> Any:
        """Meet at the first node's store, which may be lost, and served again, until all have come."""
        until_s = time.monotonic() + float(str(self.orders["conf"].get("timeout", 600)))  # torch's
        while True:
            try:
                return self.handler.next_rendezvous()
            except Exception as error:
                if not self._may_be_served_again(error) or time.monotonic() > until_s:
                    raise
                self._say({"said": f"the store at {self.orders['endpoint']} was lost before the nodes had met"})
            time.sleep(_MOVE_S)

    def _may_be_served_again(self, error: Exception) -> bool:
        lost = self._load("node_entry").LOST_STORE
        return type(error).__name__ in lost and int(self.orders["conf"]["rank"]) != 0

    def _number_ranks(self, store: Any, node_rank: int, restart: int, host: str) -> list[Any]:
        """Number the ranks over all nodes, and hear the others from now on."""
        if host:
            self._open_exchange(restart, node_rank, host)
        ranks = self._load("node_entry").Call(partial(self._agree_on_ranks, store, node_rank))
        # Nodes of a static rendezvous come one after the other; else all are here, and one that is not any more was
        # lost in this very second.
        if not ranks.is_over.wait(None if self.static else _AGREE_S):
            raise _UnnumberedError(f"a node that had met the others did not number its ranks within {_AGREE_S:.0f} s")
        if ranks.error is not None:
            raise ranks.error
        own = self.orders["local_world_size"]
        if self.exchange is not None:
            self.exchange.begin(self.world, (ranks.value[0], own))
        if self.members is not None:
            self.members.begin(self.world, (host, ranks.value[0], own))
        return list(ranks.value)

    def go_to(self, handler: Any) -> None:
        """Meet the others there from now on."""
        if handler is not self.handler:
            self._load("node_rendezvous").abandon(self.handler)
            # What torch does when a former rendezvous is collected fails in the thread of its heartbeats.
            self.orders["kept"] = [*self.orders.get("kept", []), self.handler]
            self.handler = handler
            self.watch()

    def _share_secret(self, store: Any, node_rank: int) -> str:
        """Return a random text that all nodes get; the last one to read it deletes it, so that it is not read from the store later."""
        from datetime import timedelta

        key = "rankwise/secret"
        if node_rank == 0:
            store.set(key, os.urandom(16).hex())
        try:
            store.wait([key], timedelta(seconds=_SECRET_S))
        except Exception as error:
            why = "has ended" if "timeout" not in str(error) else "runs without --role-counts"
            raise RuntimeError(
                f"node 0 gives the ranks no secret, it {why}: start the same command on every node"
            ) from error
        secret = store.get(key).decode()
        if int(store.add(f"{key}/num_read", 1)) == self.world:
            with contextlib.suppress(Exception):  # some stores delete nothing
                store.delete_key(key)
        return str(secret)

    def _open_exchange(self, restart: int, node_rank: int, host: str) -> None:
        from torch.distributed import PrefixStore

        store = PrefixStore(f"rankwise/watch_{restart if self.static else 0}", self._open_second())
        self.exchange = self._load("node_exchange").Exchange(store, node_rank, str(self.num_joined), self._say)
        self.exchange.announce(host)
        members = self._load("node_members")
        try:
            self.members = members.Members(
                store, node_rank, str(self.num_joined), self.orders, self.handler, self._say, self._load
            )
        except Exception as error:  # noqa: BLE001 - a store that lacks a call: the job runs as it did without
            self._say({"said": f"the launchers of other nodes are not heard: {type(error).__name__}: {error}"})

    def _open_second(self) -> Any:
        """Open another connection to the round's store. torch tries that for a minute if the store has gone, while the first one fails at once."""
        call = self._load("node_entry").Call
        opening, until_s = call(partial(_open_own, self.store)), time.monotonic() + _AGREE_S
        look = partial(call, partial(self.store.check, ["torchelastic/role_info/0"]))
        probe = look()
        while not opening.is_over.wait(_LOOK_S):
            if probe.error is not None:
                raise probe.error
            if time.monotonic() > until_s:
                raise _UnnumberedError(
                    f"the store did not answer within {_AGREE_S:.0f} s: its host is frozen or cut off"
                )
            if probe.is_over.is_set():
                probe = look()
        return opening.value

    def _end_exchange(self) -> None:
        if self.exchange is not None:
            self.exchange.end()
        self.exchange = None

    def _agree_on_ranks(self, store: Any, node_rank: int) -> list[Any]:
        """Number the ranks over all nodes, in torchrun's keys and forms."""
        mine = {
            "role": self.orders["role"],
            "rank": node_rank,
            "local_world_size": self.orders["local_world_size"],
        }
        store.set(f"torchelastic/role_info/{node_rank}", json.dumps(mine).encode())
        if node_rank == 0:
            keys = [f"torchelastic/role_info/{index}" for index in range(self.world)]
            infos = [json.loads(store.get(key)) for key in keys]
            total = 0
            per_role: dict[str, int] = {}
            for info in infos:
                info["base"], info["role_base"] = total, per_role.get(info["role"], 0)
                total += info["local_world_size"]
                per_role[info["role"]] = info["role_base"] + info["local_world_size"]
            for index, info in enumerate(infos):
                part = [info["base"], total, info["role_base"], per_role[info["role"]]]
                store.set(f"torchelastic/assigned_ranks/{index}", json.dumps(part).encode())
        numbers = json.loads(store.get(f"torchelastic/assigned_ranks/{node_rank}"))
        return list(numbers)

    def watch(self) -> None:
        """Tell the parent, for as long as the rendezvous is this one, when other nodes wait to join."""
        threading.Thread(target=self._watch, args=(self.handler,), daemon=True).start()

    def _watch(self, handler: Any) -> None:
        published = published_standby = joined = 0
        tickets, turns = self._open_tickets(handler), 0
        while handler is self.handler:
            time.sleep(_LOOK_S)
            if not self.watching or joined != self.num_joined:
                published, published_standby, turns, joined = 0, 0, 0, self.num_joined
                self._tell_joined()
                continue
            try:
                waiting = handler.num_nodes_waiting()
            except Exception as error:  # noqa: BLE001 - torch raises many kinds; the parent is told what and decides
                time.sleep(_MOVE_S)
                if handler is self.handler and self.watching:
                    self._say({"lost": f"{type(error).__name__}: {error}"})
                return
            if joined != self.num_joined or not self.watching:
                continue  # that was the last round
            if self._load("node_rendezvous").is_full(handler):
                waiting = 0  # torch keeps who was a moment too late for the last place among those that wait
            if waiting != published:
                self._say({"waiting": waiting})
                published = waiting
            self.num_more = waiting + published_standby
            turns += 1
            if tickets is not None and turns % _STANDBY_TURNS == 1:
                with contextlib.suppress(Exception):
                    standby = len(tickets.list_alive(handler._state_holder.state))
                    if standby != published_standby:
                        self._say({"standby": standby})
                        published_standby = standby

    def _open_tickets(self, handler: Any) -> Any:
        standby = self._load("node_standby")
        return (
            standby.Tickets(_open_own(handler._store), self.orders["run_id"])
            if standby.can_stand_by(handler, self.orders)
            else None
        )

    def _tell_joined(self) -> None:
        """Tell the parent how many nodes have come, and in how many seconds torch starts without more; private, and not with each backend."""
        state = getattr(getattr(self.handler, "_state_holder", None), "state", None)
        if self.is_joining and state is not None:
            end = getattr(state, "deadline", None)
            now = datetime.datetime.now(datetime.timezone.utc)
            left_s = None if end is None else (end.replace(tzinfo=now.tzinfo) - now).total_seconds()
            needed = getattr(getattr(self.handler, "_settings", None), "min_nodes", self.orders["min_nodes"])
            self._say({"joined": len(getattr(state, "participants", ())), "needed": needed, "starts_in_s": left_s})

    def finish(self, barrier_s: float, num_lost: int = 0) -> dict[str, Any]:
        """Wait until all nodes that are left are through, so that no store goes while others still need it."""
        from torch.distributed.elastic.utils import store as store_util

        self.watching = False
        # On a connection of its own: the parent may give it up, and what others ask must get through meanwhile.
        own = _open_own(self.store)
        store_util.barrier(own, self.world - num_lost, "torchelastic/agent/terminal_state", barrier_s)
        return {}

    def close(self) -> dict[str, Any]:
        """Close it for good."""
        self.watching = False
        self._end_exchange()
        if self.members is not None:
            self.members.end()
        if not self.static:
            self._load("node_standby").announce_end(self.handler, self.orders["run_id"])
        self.handler.shutdown()
        return {}


def _open_own(store: Any) -> Any:
    """Return another connection to a store, whose requests don't wait for those of the first; the same where there is no other."""
    try:
        return store.clone()
    except Exception:  # noqa: BLE001 - which stores can do it, and how they refuse, differs
        return store


def _take_address(orders: dict[str, Any], names: Any) -> str:
    """Give this node the address by which it reaches the endpoint if its own name has none; return what to say of it.

    torch asks for the name's addresses to find out which node opens the store, and fails; and the name is what it gives
    the ranks of all nodes for rank 0's address, which they look up until their time-out.
    """
    host, port = names.split(orders["endpoint"])
    own = socket.gethostname()
    if not host or names.look_up(own):
        return ""
    found = names.look_up(host, port)
    if orders["backend"] == "c10d":
        orders["conf"].setdefault("is_host", "1" if host == own or any(map(names.is_here, found)) else "0")
    orders["local_addr"] = address = orders["local_addr"] or names.find_address_towards(found)
    return (
        f"this host's own name {own} has no address; {address} is used, by which it reaches {host}" if address else ""
    )
