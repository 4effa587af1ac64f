"""Do what the parent needs torch for: count devices, bind to NUMA nodes, serve ranks' timers, meet the other nodes of a job.

Requests and answers are JSON lines on standard input and output, each answer with its request's number; a request without
one gets none. ``{"waiting": n}`` is sent unasked when other nodes want to join, and so is what other nodes' launchers tell of
their ranks. It ends when its input ends. The rendezvous is torch's own, unchanged, so that nodes started by torchrun and
nodes started by us meet in one job.
"""

import contextlib
import datetime
import importlib.util
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

del sys.path[0]  # our own folder: its names must not shadow anybody's

# Answers leave through a private descriptor: whatever a library prints goes to standard error.
_answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
_lock = threading.Lock()
#: So long the launchers may take to find out that the node which serves the rendezvous is lost, and to go on at another.
_MOVE_S = 3.0
#: Node 0 gives the secret as soon as it has met the others.
_SECRET_S = 60
# A store that is not reached, or that another node has taken away with it, is told in a line of ours, not in a stack of C++.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def _say(answer: dict[str, Any]) -> None:
    with _lock:
        _answers.write(json.dumps(answer) + "\n")
        _answers.flush()


def count_devices(what: str) -> int:
    """Count as torchrun does for ``--nproc-per-node gpu | cpu | auto | xpu | <a backend's name>``."""
    import torch
    from torch.distributed.run import determine_local_world_size

    if what == "auto" and not hasattr(torch, "accelerator"):
        what = "gpu" if torch.cuda.is_available() else "cpu"
    return int(determine_local_world_size(what))


def bind_numa(mode: str, num_ranks: int) -> list[Any]:
    """Return for each local rank the words that stand before its command, as torchrun would put them."""
    import logging

    from torch.numa import binding

    # It logs a traceback before it raises the same; the parent says it in a line.
    logging.getLogger(binding.__name__).setLevel(logging.CRITICAL + 1)
    # Private, and the only way to torchrun's answer: without it the parent says that torch is too old.
    wrap = binding._maybe_wrap_command_args_with_numa_binding
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    return [list(wrap((), gpu_index=index, numa_options=options)) for index in range(num_ranks)]


def _take_address(orders: dict[str, Any]) -> str:
    """Give this node the address by which it reaches the endpoint if its own name has none; return what to say of it.

    torch asks for the name's addresses to find out which node opens the store, and fails; and the name is what it gives the ranks
    of all nodes for rank 0's address, which they look up until their time-out.
    """
    names = _load_beside("node_addresses")
    host, port = names.split(orders["endpoint"])
    own = socket.gethostname()
    if not host or names.look_up(own):
        return ""
    found = names.look_up(host, port)
    if orders["backend"] == "c10d":
        orders["conf"].setdefault("is_host", "1" if host == own or any(map(names.is_here, found)) else "0")
    orders["local_addr"] = address = orders["local_addr"] or names.find_address_towards(found)
    return (
        f"this host's own name {own} has no address; {address} is used, by which it reaches {host}"
        if address
        else ""
    )


def serve_timers(path: str, run_id: str) -> dict[str, Any]:
    """Serve the timers of torch.distributed.elastic.timer, as torchrun does; tell the parent who was killed, and for which."""
    from torch.distributed.elastic.timer import FileTimerServer

    expired: dict[str, str] = {}

    class Server(FileTimerServer):  # type: ignore[misc]
        def _reap_worker(self, worker_pid: int, signal: int) -> bool:
            # Behind each rank it would end its own process, with torchrun: here the parent takes care of the others.
            return worker_pid == os.getpid() or bool(super()._reap_worker(worker_pid, signal))

    def tell(event: str, timer: Any) -> None:
        if event == "timer expired" and timer.signal > 0:
            expired[str(timer.worker_pid)] = timer.scope_id
            _say({"expired": expired})

    Server(file_path=path, run_id=run_id, max_interval=0.1, daemon=True, log_event=tell).start()
    return {}


class _Answer:
    """What a call in another thread has come to."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: Exception | None = None
        self.is_there = threading.Event()

    def fill(self, call: Any) -> None:
        """Make the call."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self.error = error
        self.is_there.set()


class Meeting:
    """One job's rendezvous as this node sees it, over all its restarts."""

    def __init__(self, orders: dict[str, Any]) -> None:
        # Each round gets a store of its own: torch's reuse of one store over restarts leaves the addresses of
        # dead ranks in it, and a node that joins late waits for a key that nobody writes again.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        import logging

        from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

        # That a heartbeat was not sent, or nobody is there to say good-bye to: the parent is told what matters of it.
        logging.getLogger("torch.distributed.elastic.rendezvous.dynamic_rendezvous").setLevel(
            logging.CRITICAL
        )
        self.orders, self.static = orders, orders["backend"] == "static"
        self.note = "" if self.static else _take_address(orders)
        self.handler = registry.get_rendezvous_handler(
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
        self.store, self.world, self.watching, self.is_joining = None, 0, False, False
        self.exchange: Any = None
        self.members: Any = None
        self.num_joined = 0

    def join(self, restart: int, host: str, *, num_roles: int) -> dict[str, Any]:
        """Meet the other nodes and return which ranks are ours.

        Args:
            restart: Which attempt this is, from 0.
            host: Our name; empty if we tell the others nothing of our ranks.
            num_roles: How many ranks ``--role-counts`` makes, which share a secret; 0 without it. Where another number has come each
                launcher ends with an error, and the first may take the store away with it: nobody waits for a secret there.
        """
        self.watching = False
        self._end_exchange()
        self.num_joined += 1
        self.is_joining = True
        info = self._meet()
        self.is_joining = False
        node_rank, self.world, self.store = info.rank, info.world_size, info.store
        store, meeting_place = info.store, info.bootstrap_store_info
        served = self.static
        if self.static and restart:
            from torch.distributed import PrefixStore
            from torch.distributed.elastic.rendezvous import RendezvousStoreInfo

            # Ranks of the first attempt use the agents' own store, as under torchrun; later ones a fresh one.
            store = PrefixStore(f"rankwise/restart_{restart}", store)
            address = meeting_place.master_addr
            meeting_place, served = RendezvousStoreInfo.build(node_rank, store, local_addr=address), False
        self.store = store
        if host:
            self._open_exchange(restart, node_rank, host)
        base, world, role_base, role_world = self._agree_on_ranks(store, node_rank)
        if self.exchange is not None:
            self.exchange.begin(self.world, (base, self.orders["local_world_size"]))
        if self.members is not None:
            self.members.begin(self.world, (host, base, self.orders["local_world_size"]))
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
            "master_addr": meeting_place.master_addr,
            "master_port": meeting_place.master_port,
            "store_is_served": served,
            "run_id": self.handler.get_run_id(),
            "round": str(self.num_joined),
            "judge": None if self.exchange is None else self.exchange.judge,
        }

    def _meet(self) -> Any:
        """Meet in torch's rendezvous; nodes that were lost are taken out of it first, so that nobody waits for them."""
        before, self.members = self.members, None
        if before is None or self.static:
            info = self.handler.next_rendezvous()
        else:
            info = self._meet_without_lost(before)
            before.restore()
        if before is not None:
            before.end()
        return info

    def _meet_without_lost(self, before: Any) -> Any:
        """The launchers hear each other meanwhile: a call of torch's store would not return if the node that serves it were lost now."""
        while True:
            moves, met = before.has_to_move, _Answer()

            def meet(met: "_Answer" = met) -> None:
                handler = before.leave(self.handler)
                if handler is not self.handler:
                    self.handler = handler
                    self.watch()
                met.value = handler.next_rendezvous()

            threading.Thread(target=met.fill, args=(meet,), daemon=True).start()
            failed_s: float | None = None
            while moves or not before.has_to_move:
                if not met.is_there.wait(0.05):
                    continue
                if met.error is None:
                    return met.value
                # The store may be gone because its node is, which its neighbours are about to tell.
                failed_s = failed_s or time.monotonic()
                if moves or time.monotonic() - failed_s > _MOVE_S:
                    raise met.error
                time.sleep(0.05)

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

        store = PrefixStore(f"rankwise/watch_{restart if self.static else 0}", _open_own(self.store))
        self.exchange = _load_beside("node_exchange").Exchange(store, node_rank, str(self.num_joined), _say)
        self.exchange.announce(host)
        members = _load_beside("node_members")
        try:
            self.members = members.Members(
                store, node_rank, str(self.num_joined), self.orders, self.handler, _say, _load_beside
            )
        except Exception as error:  # noqa: BLE001 - a store that lacks a call: the job runs as it did without
            _say({"said": f"the launchers of other nodes are not heard: {_describe(error)}"})

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
        told = 0
        while handler is self.handler:
            time.sleep(0.5)
            if not self.watching:
                told = 0
                self._tell_joined()
                continue
            try:
                waiting = handler.num_nodes_waiting()
            except Exception as error:  # noqa: BLE001 - torch raises many kinds; the parent is told what and decides
                time.sleep(_MOVE_S)
                if handler is self.handler and self.watching:
                    _say({"lost": f"{type(error).__name__}: {error}"})
                return
            if waiting != told:
                _say({"waiting": waiting})
                told = waiting

    def _tell_joined(self) -> None:
        """Tell the parent how many nodes have come, and in how many seconds torch starts without more; private, and not with each backend."""
        state = getattr(getattr(self.handler, "_state_holder", None), "state", None)
        if self.is_joining and state is not None:
            end = getattr(state, "deadline", None)
            now = datetime.datetime.now(datetime.timezone.utc)
            left_s = None if end is None else (end.replace(tzinfo=now.tzinfo) - now).total_seconds()
            needed = getattr(getattr(self.handler, "_settings", None), "min_nodes", self.orders["min_nodes"])
            _say({"joined": len(getattr(state, "participants", ())), "needed": needed, "starts_in_s": left_s})  # fmt: skip

    def finish(self, timeout_s: float, num_lost: int) -> dict[str, Any]:
        """Wait until all nodes that are left are through, so that no store goes while others still need it."""
        from torch.distributed.elastic.utils import store as store_util

        self.watching = False
        # On a connection of its own: the parent may give it up, and what others ask must get through meanwhile.
        own = _open_own(self.store)
        store_util.barrier(own, self.world - num_lost, "torchelastic/agent/terminal_state", timeout_s)
        return {}

    def close(self) -> dict[str, Any]:
        """Close the meeting for good."""
        self.watching = False
        self._end_exchange()
        if self.members is not None:
            self.members.end()
        self.handler.shutdown()
        return {}


def _load_beside(name: str) -> Any:
    """Load a file of this folder: the package may not be there for the ranks' Python."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"no {name}.py beside {__file__}")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def _open_own(store: Any) -> Any:
    """Return another connection to a store, whose requests don't wait for those of the first; the same where there is no other."""
    try:
        return store.clone()
    except Exception:  # noqa: BLE001 - which stores can do it, and how they refuse, differs
        return store


class Desk:
    """Where requests are dealt with, each by the method of its name."""

    def __init__(self) -> None:
        self._meeting: Meeting | None = None

    def count(self, what: str) -> dict[str, Any]:
        return {"count": count_devices(what)}

    def numa(self, mode: str, num_ranks: int) -> dict[str, Any]:
        return {"prefixes": bind_numa(mode, num_ranks)}

    def serve_timers(self, path: str, run_id: str) -> dict[str, Any]:
        return serve_timers(path, run_id)

    def open(self, **orders: Any) -> dict[str, Any]:
        self._meeting = Meeting(orders)
        self._meeting.watch()
        return {"note": self._meeting.note}

    def join(self, restart: int, host: str, *, num_roles: int) -> dict[str, Any]:
        return self._met().join(restart, host, num_roles=num_roles)

    def finish(self, barrier_s: float, num_lost: int = 0) -> dict[str, Any]:
        return self._met().finish(barrier_s, num_lost)

    def question(self, token: float) -> dict[str, Any]:
        self._exchange().ask(token)
        return {}

    def publish(self, num: int, text: str) -> dict[str, Any]:
        self._exchange().publish(num, text)
        return {}

    def decide(self, text: str) -> dict[str, Any]:
        return {"text": self._exchange().decide(text)}

    def end_attempt(self, text: str) -> dict[str, Any]:
        self._exchange().end_attempt(text)
        return {}

    def hear(self, bound_s: float) -> dict[str, Any]:
        return {"num": self._exchange().hear(bound_s)}

    def collect(self) -> dict[str, Any]:
        self._exchange().collect()
        return {}

    def say_word(self, text: str) -> dict[str, Any]:
        self._exchange().say_word(text)
        return {}

    def wait_word(self, bound_s: float) -> dict[str, Any]:
        return {"text": self._exchange().wait_word(bound_s)}

    def close(self) -> dict[str, Any]:
        return self._met().close()

    def _exchange(self) -> Any:
        exchange = self._met().exchange
        if exchange is None:
            raise RuntimeError("nothing is told to other nodes")
        return exchange

    def _met(self) -> Meeting:
        if self._meeting is None:
            raise RuntimeError("no meeting is open")
        return self._meeting


def _describe(error: BaseException) -> str:
    """Return an error in a line, and the one that it refers to as the inner exception."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    refers, inner = " See inner exception for details.", error.__cause__
    return text.replace(refers, f" {_describe(inner)}") if inner is not None else text


def main() -> None:
    """Serve requests until the parent closes our input."""
    desk = Desk()

    def serve(line: str) -> None:
        request = json.loads(line)
        number = request.pop("number", None)
        try:
            answer = getattr(desk, request.pop("op"))(**request)
        except BaseException as error:  # noqa: BLE001 - the parent is told whatever it was
            answer = {"error": _describe(error)}
        if number is not None:
            _say({"answer": answer, "number": number})

    # A request may block for minutes: the end of the input must be seen meanwhile.
    for line in sys.stdin:
        threading.Thread(target=serve, args=(line,), daemon=True).start()
    os._exit(0)


if __name__ == "__main__":
    main()
