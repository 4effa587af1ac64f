"""Links between workers and servers, in one process: what a worker makes of servers that are late, die, or are somebody else."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankwise
from clocks import FakeClock
from rankwise.parallel.servers import coordinator as coordinating, listener as listener_module
from rankwise.parallel.servers.layout import spread
from rankwise.parallel.servers.link import Kind, Link, LinkLostError, Message
from rankwise.parallel.servers.listener import JobStore, Listener, connect, find_host
from rankwise.parallel.servers.shard import Rules
from rankwise.parallel.servers.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BOUND_S = 30.0


def make_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def make_rules(mode: str = "async") -> Rules:
    return Rules(
        mode=mode, staleness=0, backup_workers=0, optimizer=make_sgd, table_optimizer=make_sgd, scheduler=None, clip_norm=None, timeout_s=BOUND_S,
    )  # fmt: skip


def accept(listener: Listener) -> Link:
    """Take in the worker, as a server that expects its first gradient."""
    link = None
    while link is None:
        link = listener.accept(BOUND_S)
    assert link.receive(timeout_s=BOUND_S).kind == Kind.HELLO
    return link


def send_clocks(link: Link) -> None:
    link.send(Message(Kind.HELLO, note={"clocks": {"0": 0}}), timeout_s=BOUND_S)


@contextmanager
def open_listener(store: dist.Store, host: str = "") -> Iterator[Listener]:
    listener = Listener(store, "0", rank=0, host=host)
    listener.open()
    try:
        yield listener
    finally:
        listener._socket.close()  # as a process that dies


def run_beside(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def make_worker(store: dist.Store, model: nn.Module, *, returns: bool = False) -> Worker:
    return Worker(
        1, model, spread(model, 1), layout_digest="", rules=make_rules(), store=store, returns=returns,
    )  # fmt: skip


def test_a_late_answer_is_not_taken_for_the_next_one() -> None:
    """After a timeout the link is closed: whoever goes on with it gets an error, and never the answer to the question before."""
    ours, theirs = socket.socketpair()
    link = Link(ours, peer="server 0", rank=1)
    peer = Link(theirs, peer="worker 1", rank=0)
    with pytest.raises(rankwise.CollectiveTimeoutError):
        link.receive(timeout_s=0.01)
    with pytest.raises(rankwise.CollectiveError, match="worker 1 is gone"):
        peer.send(Message(Kind.ANSWER, number=1), timeout_s=BOUND_S)
    for go_on in (
        lambda: link.receive(timeout_s=BOUND_S),
        lambda: link.send(Message(Kind.PULL), timeout_s=1.0),
    ):
        with pytest.raises(rankwise.CollectiveTimeoutError, match="the link to server 0 was closed"):
            go_on()
    peer.close()


def test_a_server_that_dies_while_a_gradient_is_sent_again() -> None:
    """It is sent once more to the next process of this server; the training hears nothing of it, and nothing counts as lost."""
    store, came = dist.HashStore(), list[int]()

    def serve() -> None:
        with open_listener(store) as listener:
            first = accept(listener)
            send_clocks(first)
            first.receive(timeout_s=BOUND_S)
        with open_listener(store) as listener:
            first.close()
            second = accept(listener)
            second._socket.shutdown(socket.SHUT_RD)
        with open_listener(store) as listener:
            send_clocks(second)
            link = accept(listener)
        second.close()
        send_clocks(link)
        message = link.receive(timeout_s=BOUND_S)
        assert message.kind == Kind.PUSH
        came.append(message.number)
        assert link.receive(timeout_s=BOUND_S).kind == Kind.PULL
        link.send(Message(Kind.ANSWER, body=torch.zeros(layout.size_bytes, dtype=torch.uint8)), timeout_s=BOUND_S)
        link.close()

    model = nn.Linear(2, 1)
    (layout,) = spread(model, 1)
    thread = run_beside(serve)
    worker = make_worker(store, model, returns=True)
    worker._has_pulled = True
    model(torch.ones(1, 2)).sum().backward()
    worker.push(1.0)
    worker.pull()
    thread.join(BOUND_S)
    assert (came, worker.num_lost) == ([0], 0)
    worker.close()


def test_a_silent_stranger_holds_up_nobody() -> None:
    """It has connected and shows nothing; a worker that comes after it is taken in, though what it shows comes in two parts."""
    store = dist.HashStore()
    with open_listener(store) as listener, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(listener._address[0])
        silent = listener.accept(BOUND_S)
        assert silent is not None
        with socket.socket(socket.AF_UNIX) as slow:
            slow.connect(listener._address[0])
            nonce = bytes(16)
            shown = nonce + listener_module._make_proof("worker", listener._address, listener._nonce, nonce)
            slow.sendall(shown[:20])
            link = listener.accept(BOUND_S)
            assert link is not None
            worker = Link(slow.dup(), peer="the server", rank=1)
            run_beside(lambda: slow.sendall(shown[20:])).join()
            worker.send(Message(Kind.HELLO), timeout_s=BOUND_S)
            assert link.receive(timeout_s=BOUND_S).kind == Kind.HELLO
            assert worker.exchange(32, BOUND_S) == listener_module._make_proof(
                "server", listener._address, listener._nonce, nonce
            )
    for one in (silent, link, worker):
        one.close()


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_both_sides_prove_that_they_know_the_jobs_secret(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has read the store but not the secret is not let in; a listener that somebody else has put into the store is not believed."""
    store = dist.HashStore()
    with open_listener(store, host) as listener:
        monkeypatch.setenv("RANKWISE_JOB_SECRET", "guessed")
        stranger = connect(store, "0", peer="server 0", rank=1, timeout_s=BOUND_S)
        monkeypatch.setenv("RANKWISE_JOB_SECRET", "secret")
        link = listener.accept(BOUND_S)
        assert link is not None
        stranger.send(Message(Kind.HELLO), timeout_s=BOUND_S)
        with pytest.raises(rankwise.CollectiveError, match="does not know the job's secret"):
            link.receive(timeout_s=BOUND_S)
        link.close()
        with pytest.raises(rankwise.CollectiveError, match="is gone"):
            stranger.receive(timeout_s=BOUND_S)
        stranger.close()

        worker = connect(store, "0", peer="server 0", rank=1, timeout_s=BOUND_S)
        connection, _ = listener._socket.accept()
        connection.sendall(bytes(32) + b"what would be unpickled")
        with pytest.raises(rankwise.CollectiveError, match="the process that answers as server 0 does not know"):
            worker.receive(timeout_s=BOUND_S)
        connection.close()


def test_a_server_that_has_died_and_does_not_return_is_not_waited_for() -> None:
    """Its address is in the store and refuses: an error at once; where it may return, that is waited for."""
    store = dist.HashStore()
    with open_listener(store):
        pass
    with pytest.raises(rankwise.RendezvousError, match="no link to server 0: it has died"):
        connect(store, "0", peer="server 0", rank=1, timeout_s=600.0, may_return=False)
    with pytest.raises(rankwise.RendezvousError, match=r"no link to server 0 within 0\.2 s"):
        connect(store, "0", peer="server 0", rank=1, timeout_s=0.2)


def test_a_store_that_is_gone_is_named() -> None:
    """Whoever looks for a server at a store that has ended hears of the store, and not in torch's words alone."""

    def fail(*_: Any) -> None:
        raise dist.DistNetworkError("Connection reset by peer\nException raised from ...")

    store: Any = JobStore(cast("Any", SimpleNamespace(check=fail, set=fail)), 1)
    with pytest.raises(
        rankwise.RendezvousError, match=r"the job's store failed: Connection reset by peer\n  ->"
    ) as caught:
        connect(store, "0", peer="server 0", rank=1, timeout_s=BOUND_S)
    assert caught.value.rank == 1
    # Nor is a worker stopped by it that only wants to say that it has ended.
    listener = Listener(store, "1", rank=1, host="")
    listener.close()
    assert listener._socket.fileno() == -1


def test_a_worker_that_is_refused_lets_go_of_its_link() -> None:
    """Also while somebody holds the error: for the server it has ended at once, and is not a worker that says nothing."""
    store, ends = dist.HashStore(), list[Exception]()

    def serve() -> None:
        with open_listener(store) as listener:
            link = accept(listener)
            link.send(Message(Kind.REFUSED, note={"error": "another model"}), timeout_s=BOUND_S)
            try:
                link.receive(timeout_s=5.0)
            except rankwise.RankwiseError as error:
                ends.append(error)
            link.close()

    thread = run_beside(serve)
    with pytest.raises(rankwise.CollectiveError, match="another model") as caught:
        make_worker(store, nn.Linear(2, 1))
    thread.join(BOUND_S)
    assert isinstance(ends[0], LinkLostError)
    assert caught.value.rank == 1


def test_a_forked_child_does_not_hold_a_link_open() -> None:
    """The peer hears at once that a rank is gone, whatever the rank's DataLoader has left behind."""
    ours, theirs = socket.socketpair()
    link, peer = Link(ours, peer="server 0", rank=1), Link(theirs, peer="worker 1", rank=0)
    ends, starts = os.pipe()
    child = os.fork()
    if not child:
        os.close(starts)
        os.read(ends, 1)  # until the parent has judged
        os._exit(0)
    link.close()
    with pytest.raises(rankwise.CollectiveError, match="it has closed the connection"):
        peer.receive(timeout_s=BOUND_S)
    peer.close()
    os.close(starts)
    os.close(ends)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("master", "num_nodes", "ways", "expected"),
    [
        ("127.0.0.1", 1, {"127.0.0.1": "127.0.0.1"}, "127.0.0.1"),
        ("node1", 2, {"node1": "10.0.0.7"}, "10.0.0.7"),
        (
            "node1",
            1,
            {"node1": "127.0.1.1", "here": "127.0.1.1", listener_module._OUTSIDE: "10.0.0.5"},
            "10.0.0.5",
        ),
        ("localhost", 2, {"here": "10.0.0.6"}, "10.0.0.6"),
        ("node1", 2, {"node1": "127.0.1.1", "here": "127.0.1.1"}, "others reach"),
        ("node1", 2, {}, "others reach"),
    ],
)
def test_the_address_that_others_reach(
    master: str, num_nodes: int, ways: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that stands for loopback on its own host is not published to other hosts; where nothing else is, that is an error."""
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(listener_module, "look_up", lambda place, _port: place)
    monkeypatch.setattr(listener_module, "find_address_towards", ways.get)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    if expected[0] != "1":
        with pytest.raises(rankwise.RendezvousError, match=expected):
            find_host(dist.HashStore(), num_nodes)
        return
    assert find_host(dist.HashStore(), num_nodes) == expected
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert find_host(dist.HashStore(), num_nodes) == "127.0.0.1"


def test_workers_of_a_coordinator_that_gives_up_have_lost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two workers comes: the coordinator says how many did, and that one does not take the end of the link for the end of all work."""
    monkeypatch.setattr(coordinating, "_JOIN_S", 1.0)
    store, ends = dist.HashStore(), list[object]()

    def work() -> None:
        try:
            ends.append(coordinating.work(1, 0, 2, store=store, timeout_s=BOUND_S))
        except rankwise.RankwiseError as error:
            ends.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    listener = Listener(store, coordinating.COORDINATOR, rank=0, host="")
    with pytest.raises(rankwise.RendezvousError, match="1 of 2 workers connected to the coordinator within 1 s: rank 1"):  # fmt: skip
        coordinating.Coordinator(0, [1, 2], listener=listener, timeout_s=BOUND_S)
    worker.join(BOUND_S)
    assert isinstance(ends[0], LinkLostError)
    assert listener._socket.fileno() == -1


def test_all_workers_together_are_waited_for_when_a_coordinator_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some seconds in all, and not for each worker that does not answer: with a hundred of them a job would hang for minutes at its end."""
    clock = FakeClock()
    monkeypatch.setattr(coordinating, "SYSTEM_CLOCK", clock)
    store = dist.HashStore()
    listener = Listener(store, coordinating.COORDINATOR, rank=0, host="")
    coordinator = coordinating.Coordinator(0, [], listener=listener, timeout_s=BOUND_S)
    silent: Any = [SimpleNamespace(join=clock.sleep) for _ in range(100)]
    coordinator._threads = silent
    began = clock.now
    coordinator.close()
    assert clock.now - began <= coordinating._BYE_S
