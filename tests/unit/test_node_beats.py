"""The connections by which launchers of several nodes hear each other: who is lost is known to all, and nobody is lost for less."""

from __future__ import annotations

import contextlib
import errno
import json
import queue
import select
import selectors
import socket
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from rankwise.engine import node_beats, node_detector
from rankwise.engine.node_beats import Beats
from rankwise.engine.node_detector import Detector, Loss, list_neighbours
from support import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = "a key"


class _Node:
    """A launcher's side, as the helper process makes it."""

    def __init__(self, number: int, key: str = KEY) -> None:
        self.losses: list[Loss] = []
        self.expelled: list[str] = []
        self.said: list[str] = []
        detector = Detector(number, on_lost=self.losses.append, on_expelled=self.expelled.append)
        self.beats = Beats(detector, key, tell=self.said.append)
        self.at = [["127.0.0.1", self.beats.port]]
        self.number = number

    def begin(self, at: Any, children: list[int]) -> None:
        """Hear the others; nodes of one process do not wait for each other."""
        about = (f"host{self.number}", self.number, 1)
        threading.Thread(target=self.beats.begin, args=(about, at, children), daemon=True).start()


def _begin(nodes: list[_Node], *, are_reached: bool = True) -> None:
    for node in nodes:
        parent, children = list_neighbours(node.number, len(nodes))
        at = None if parent is None else (parent, nodes[parent].at)
        node.begin(at, children)
    wait_until(lambda: sum(_count_known(node) for node in nodes) == 2 * (len(nodes) - 1), 20)
    links = [peer.link for node in nodes for peer in node.beats.detector.peers]
    wait_until(lambda: all(link.is_reached for link in links) or not are_reached, 20)


def _count_known(node: _Node) -> int:
    return len(node.beats.detector.peers)


def _die(node: _Node) -> None:
    """End a node as kill -9 does: without a word."""
    node.beats._send = lambda *_: None  # type: ignore[method-assign]
    node.beats._over.set()
    node.beats._thread.join(5)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(node_detector, "_FIRST_S", 0.0)
    made = [_Node(number) for number in range(20)]
    _begin(made)
    yield made
    for node in made:
        node.beats.end()


def test_a_launcher_that_ends_is_known_to_all_and_one_that_says_good_bye_is_not_lost(nodes: list[_Node]) -> None:  # fmt: skip
    """Of 20 nodes an inner one ends without a word: 18 others learn of it with its host and ranks; then one leaves with a good-bye, and nobody tells of that."""
    dead, leaves, others = nodes[1], nodes[2], [nodes[0], *nodes[3:]]
    _die(dead)
    wait_until(lambda: all(node.losses for node in (*others, leaves)), 20)
    leaves.beats.end()
    wait_until(lambda: all(_count_known(node) == 14 for node in nodes[:1]), 20)  # 16 children less two
    for node in others:
        (loss,) = node.losses
        assert (loss.node, list(loss.about), loss.is_ended) == (1, ["host1", 1, 1], True)
        assert not node.expelled


def test_a_launcher_that_has_left_the_round_without_a_word_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Its port of this round is closed, and the one that is open for as long as it lives is not."""
    monkeypatch.setattr(node_detector, "_FIRST_S", 0.0)
    made = [_Node(number) for number in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as life:
        made[1].beats._life_port = life.getsockname()[1]
        _begin(made, are_reached=False)  # nobody answers there by a word
        _die(made[1])
        wait_until(lambda: made[0].losses, 20)
    (loss,) = made[0].losses
    assert (loss.is_ended, loss.is_gone) == (False, False)
    assert "has left this round" in loss.why
    made[0].beats.end()


def test_a_refusal_proves_no_end_where_the_port_was_never_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind NAT or a firewall every new connection is refused, while the launcher and its own connection live."""
    monkeypatch.setattr(node_detector, "_FIRST_S", 0.0)
    monkeypatch.setattr(node_beats, "try_to_reach", lambda *_, **__: "refused")
    made = [_Node(number) for number in range(2)]
    _begin(made, are_reached=False)
    _die(made[1])
    wait_until(lambda: made[0].losses, 20)
    (loss,) = made[0].losses
    assert (loss.is_ended, loss.is_gone) == (False, False)
    assert "can't be reached" in loss.why
    made[0].beats.end()


def test_another_process_at_its_port_is_no_sign_of_life() -> None:
    """A launcher has ended, and the next one on its host was given the same port: each says who it is."""
    port, name = node_beats.listen_for_life()
    assert node_beats.try_to_reach("127.0.0.1", port, name) == "open"
    assert node_beats.try_to_reach("127.0.0.1", port, "another") == "refused"


def test_a_port_is_tried_again_before_tcp_repeats_what_was_lost() -> None:
    """A kernel whose queue is full drops the first packets of a connection, as a bad network does, and TCP sends them again after a second; a launcher, and its host, answer a new one sooner."""
    asks: list[Callable[[int], object]] = [
        lambda port: node_beats.try_to_reach("127.0.0.1", port, "name"),
        lambda port: node_beats.does_host_answer("127.0.0.1", port),
    ]
    for ask, answer in zip(asks, ("open", True), strict=True):
        with contextlib.ExitStack() as made, selectors.DefaultSelector() as selector:
            listener = made.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            address = (socket.AF_INET, socket.SOCK_STREAM, 0, "", listener.getsockname())
            for _ in range(2):  # one more than it takes
                node_beats._begin_to_connect(address, selector)
            for key in selector.get_map().values():
                made.callback(key.fileobj.close)  # type: ignore[union-attr]
            found = queue.SimpleQueue[object]()
            port = listener.getsockname()[1]
            node_beats._start(lambda ask=ask, found=found, port=port: found.put(ask(port)))  # type: ignore[misc]
            time.sleep(0.1)  # what it has sent is lost
            while not found.qsize() and select.select([listener], [], [], 1.0)[0]:
                with listener.accept()[0] as connection, contextlib.suppress(OSError):
                    connection.send(b"name\n")
            assert found.get(timeout=20) == answer


def refuse_name(*_: object, **__: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


class _MuteHost:
    """A selector, on a clock of its own, of a host whose kernel connects 20 ms after it was asked, and that says nothing."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.connection = SimpleNamespace(fileobj=SimpleNamespace(getsockopt=lambda *_: 0), data="connecting")

    def get_map(self) -> list[object]:
        return [self.connection]

    def select(self, timeout_s: float) -> list[tuple[object, int]]:
        self.now_s += max(timeout_s, 1e-3)
        is_made = self.connection.data == "connecting" and self.now_s >= 100.02
        return [(self.connection, 0)] if is_made else []

    def modify(self, _: object, __: int, data: str) -> None:
        self.connection.data = data


def test_who_accepts_and_says_nothing_is_silent_after_half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a frozen launcher does. The bound counts from when the connection was made; it is not twice as long."""
    host = _MuteHost()
    monkeypatch.setattr(node_beats, "time", SimpleNamespace(monotonic=lambda: host.now_s))
    monkeypatch.setattr(node_beats, "_begin_to_connect", lambda *_: None)
    assert node_beats._race([("address",)], cast("Any", host), greets=True) is None
    assert host.now_s - 100.02 == pytest.approx(node_beats._REACH_S, abs=0.05)


def test_who_refuses_can_be_reached_and_who_has_no_address_here_can_not() -> None:
    """A refusal is the host's answer, behind a firewall too; that this host knows no way is none, and costs a try each 20 ms."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert node_beats.try_to_reach("127.0.0.1", port) == "refused"
    assert node_beats.does_host_answer("127.0.0.1", port)
    tries: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        begin = node_beats._begin_to_connect
        patch.setattr(node_beats, "_begin_to_connect", lambda *args: (tries.append(args), begin(*args)))
        assert not node_beats.does_host_answer("255.255.255.255", port)
        assert node_beats.try_to_reach("255.255.255.255", port) == "silent"
        patch.setattr(node_beats, "_race", refuse_name)
        assert node_beats.try_to_reach("localhost", port) == "silent"
    assert 2 <= len(tries) <= 60


def test_without_descriptors_a_probe_concludes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the peer would be taken for one that is still being asked, for ever."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    made = _Node(0)
    monkeypatch.setattr(node_beats, "_race", fail)
    states: list[str] = []
    link = SimpleNamespace(host="127.0.0.1", port=1, life_port=0, name="name", is_reached=True)
    made.beats.probe(SimpleNamespace(link=link), states.append)
    made.beats._found.get(timeout=20)()
    made.beats.end()
    assert states == ["silent"]


def test_what_came_during_a_stall_is_read_as_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher stops right after the system has told it that nothing has come. Meanwhile the other one beats, and ends: that was before this one goes on, and others may have met it."""
    made = [_Node(number) for number in range(2)]
    _begin(made)
    stopped, goes_on, ahead_s = threading.Event(), threading.Event(), [0.0]
    monkeypatch.setattr(node_beats, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0], sleep=time.sleep))  # fmt: skip
    select = made[0].beats._selector.select

    def stop(timeout: float | None = None) -> Any:
        if goes_on.is_set():
            return select(timeout)
        stopped.set()
        goes_on.wait(60)
        return []

    made[0].beats._selector.select = stop  # type: ignore[method-assign]
    stopped.wait(20)
    (link,) = made[1].beats._connections
    num_sent = link.num_sent
    wait_until(lambda: link.num_sent > num_sent, 20)
    _die(made[1])
    ahead_s[0] = 1.0
    goes_on.set()
    wait_until(lambda: made[0].losses, 20)
    assert not made[0].losses[0].is_ended
    made[0].beats.end()


def test_a_frozen_launcher_is_given_up_and_finds_that_out_itself(nodes: list[_Node]) -> None:
    """Its host still acknowledges what is sent: that is told; awake, it hears that the others went on, and counts none of them as lost."""
    frozen, awake = nodes[3], threading.Event()
    select = frozen.beats._selector.select

    def sleep(timeout: float | None = None) -> Any:
        awake.wait(60)
        return select(timeout)

    frozen.beats._selector.select = sleep  # type: ignore[method-assign]
    others = [*nodes[:3], *nodes[4:]]
    wait_until(lambda: all(node.losses for node in others), 30)
    loss = nodes[-1].losses[0]
    assert (loss.node, loss.is_ended) == (3, False)
    assert "its host still answers" in loss.why
    awake.set()
    wait_until(lambda: frozen.expelled, 20)
    assert not frozen.losses
    assert frozen.beats.detector.is_expelled


def test_a_stranger_is_refused() -> None:
    """Without the job's key nobody is heard, whatever he says, nor ends the watch; and nobody gets a proof that would let him in here or elsewhere."""
    node = _Node(0)
    node.beats.begin(("host0", 0, 1), None, [1])
    greeting = {"about": ["x", 1, 1], "port": 1, "proof": "0" * 64}
    try:
        for told in (
            b'{"nonce": "a"}\n' + json.dumps({"node": 1, **greeting}).encode(),
            json.dumps({"node": 0, **greeting}).encode(),
            json.dumps({"lost": [0, ["x", 0, 1], "because", True]}).encode(),
            b'{"node": Infinity}',
            b"[" * 20_000,
            b'["nonsense"]',
            b"\xff\xfe",
        ):
            with socket.create_connection(("127.0.0.1", node.beats.port), timeout=10) as stranger:
                stranger.sendall(told + b"\n")
                with contextlib.suppress(ConnectionResetError):
                    while data := stranger.recv(4096):
                        assert b"proof" not in data
        assert node.beats._thread.is_alive()
    finally:
        node.beats.end()
    assert not node.losses
    assert not node.expelled
