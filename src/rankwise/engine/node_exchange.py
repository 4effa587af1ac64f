"""What the launchers of a job's nodes tell each other of their ranks, by torch's store; the helper process loads this file by its path."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: How often we look whether another node asks, and how often while one does.
_SLOW_S, _FAST_S = 1.0, 0.2
_AWAKE_S = 30.0
#: And while all are about to leave.
_SOON_S = 0.02


class Exchange:
    """What the launchers of one round tell each other of ranks that wait, by the store at which they have met.

    While all is well a node makes one small request a second, and writes nothing. A number that grows is the question:
        whoever's
    ranks wait makes it grow, and all nodes publish what is known of theirs. One node, the judge, reads it.

    Args:
        store: A connection of its own: others may block theirs for minutes.
        node_rank: Which node we are.
        name: Of the round, as the parent knows it; what is told unasked bears it.
        say: Tells the parent.
    """

    def __init__(self, store: Any, node_rank: int, name: str, say: Callable[[dict[str, Any]], None]) -> None:
        self._store, self._node_rank, self._name, self._say = store, node_rank, name, say
        self._asked = self._num_published = 0
        self._awake_s = 0.0
        self._others: dict[int, int] = {}
        self.judge, self._host, self._over = node_rank, "", threading.Event()
        self._publishing, self._collecting, self._asking = (
            threading.Lock(),
            threading.Lock(),
            threading.Lock(),
        )

    def announce(self, host: str) -> None:
        """Say that we are here; before the ranks are numbered, so that all know it afterwards."""
        self._host = host
        self._store.set(f"here/{self._node_rank}", json.dumps({"host": host, "num": 0}))

    def begin(self, num_nodes: int, ranks: tuple[int, int]) -> None:
        """Find the judge, the first node that takes part, and follow what is asked; ``ranks`` are our first one and how many."""
        self.num_nodes = num_nodes
        self._about = {"host": self._host, "ranks": ranks}
        self._store.set(f"here/{self._node_rank}", json.dumps({**self._about, "num": 0}))
        self.judge = next(node for node in range(num_nodes) if self._store.check([f"here/{node}"]))
        threading.Thread(target=self._follow, daemon=True).start()

    def end(self) -> None:
        """Look no more."""
        self._over.set()

    def list_nodes(self) -> dict[int, dict[str, Any]]:
        """Return the nodes that take part: their hosts' names, and which ranks are theirs."""
        keys = {node: f"here/{node}" for node in range(self.num_nodes)}
        return {node: json.loads(self._store.get(key)) for node, key in keys.items() if self._store.check([key])}

    def ask(self, token: float) -> None:
        """Ask all nodes; the parent hears which question it was."""
        with self._asking:  # the parent hears that a question is its own before it hears of the question
            asked = int(self._store.add("asked", 1))
            self._awake_s = time.monotonic() + _AWAKE_S
            self._say({f"{self._name}/question": [token, asked]})

    def publish(self, num: int, text: str) -> None:
        """Tell the others of our ranks, unless something newer was told already."""
        with self._publishing:
            if num <= self._num_published:
                return
            self._num_published = num
            self._store.set(f"scene/{self._node_rank}", text)
            self._store.set(f"here/{self._node_rank}", json.dumps({**self._about, "num": num}))

    def decide(self, text: str) -> str:
        """Make known what this attempt has come to; the first word of any node counts, and is returned."""
        stands = self._store.compare_set("decision", "", text)
        self._store.add("asked", 1)
        return str(stands.decode())

    def end_attempt(self, text: str) -> None:
        """Make known that the attempt ends here, and why; the first word of any node counts."""
        # torch's etcd has no compare_set.
        if int(self._store.add("num_ends", 1)) == 1:
            self._store.set("ended", text)
        self._store.add("asked", 1)
        self._hear_ends()

    def hear(self, bound_s: float, what: str) -> None:
        """Say that we have heard the last word, and wait until all have; ``what`` it was."""
        self._store.set(f"heard/{what}/{self._node_rank}", "1")
        keys = [f"heard/{what}/{node}" for node in self.list_nodes()]
        end = time.monotonic() + bound_s
        while not self._store.check(keys) and time.monotonic() < end:
            threading.Event().wait(_SOON_S)

    def wait_word(self, bound_s: float) -> str:
        """Return what the judge has said of the whole job after its end; empty if nothing in time."""
        end = time.monotonic() + bound_s
        while not self._store.check(["word"]):
            if time.monotonic() > end:
                return ""
            threading.Event().wait(_SOON_S)
        return str(self._store.get("word").decode())

    def say_word(self, text: str) -> None:
        """Make that known."""
        self._store.set("word", text)

    def collect(self) -> None:
        """Pass on what other nodes have published since the last time."""
        self._hear_ends()
        with self._collecting:
            self._collect()

    def _hear_ends(self) -> None:
        """Pass on what was said for all: how the attempt is judged, and that it has ended, and why."""
        for name in ("decision", "ended"):
            if self._store.check([name]):
                self._say({f"{self._name}/{name}": self._store.get(name).decode()})

    def _collect(self) -> None:
        if not self._others:
            nodes = self.list_nodes()
            if not all("ranks" in about for about in nodes.values()):
                return  # one has only just come
            self._others = dict.fromkeys(nodes, 0)
            self._say(
                {f"{self._name}/nodes": {str(node): [about["host"], *about["ranks"]] for node, about in nodes.items()}}
            )
        others = [node for node in self._others if node != self._node_rank]
        keys = [f"here/{node}" for node in others]
        if not keys:
            return
        has_many = getattr(self._store, "has_extended_api", bool)()
        states = self._store.multi_get(keys) if has_many else [self._store.get(key) for key in keys]
        for node, state in zip(others, states, strict=True):
            num = json.loads(state)["num"]
            if num > self._others[node]:
                self._others[node] = num
                text = self._store.get(f"scene/{node}").decode()
                self._say({f"{self._name}/scene/{node}": {"num": num, "at_s": time.monotonic(), "text": text}})

    def _follow(self) -> None:
        while not self._over.is_set():
            is_awake = time.monotonic() < self._awake_s
            self._over.wait(_FAST_S if is_awake else _SLOW_S)
            try:
                self._look(is_awake=is_awake)
            except Exception as error:  # noqa: BLE001 - torch raises many kinds; the parent is told what and goes on alone
                if not self._over.is_set():
                    self._say({f"{self._name}/lost": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
                return

    def _look(self, *, is_awake: bool) -> None:
        with self._asking:
            asked = int(self._store.add("asked", 0))
        if asked != self._asked:
            self._asked, self._awake_s = asked, time.monotonic() + _AWAKE_S
            self._hear_ends()
            self._say({f"{self._name}/asked": asked})
        if self.judge == self._node_rank and (is_awake or time.monotonic() < self._awake_s):
            self.collect()
