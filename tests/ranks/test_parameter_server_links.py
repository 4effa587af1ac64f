"""Links between workers and servers, in one process: what a worker makes of servers that are late, die, or are somebody else."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankwise
from rankwise.parallel.servers.entrance import Door
from rankwise.parallel.servers.layout import spread
from rankwise.parallel.servers.link import ANSWER, HELLO, PULL, PUSH, Link, Message
from rankwise.parallel.servers.rules import Rules
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


def take_in(door: Door) -> Link:
    """Take in the worker, as a server that expects its first gradient."""
    link = None
    while link is None:
        link = door.accept(BOUND_S)
    assert link.receive(timeout_s=BOUND_S).kind == HELLO
    return link


def welcome(link: Link) -> None:
    link.send(Message(HELLO, note={"clocks": {"0": 0}}), timeout_s=BOUND_S)


@contextmanager
def open_door(store: dist.Store) -> Iterator[Door]:
    door = Door(store, "0", rank=0, host="")
    door.open()
    try:
        yield door
    finally:
        door._listener.close()  # as a process that dies


def run_beside(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def make_worker(store: dist.Store, model: nn.Module, *, returns: bool = False) -> Worker:
    return Worker(
        1, model, spread(model, 1), layout_digest="", server_ranks=[0], rules=make_rules(), compression=None, store=store, returns=returns,
    )  # fmt: skip


def test_a_late_answer_is_not_taken_for_the_next_one() -> None:
    """After a time-out the link is closed: whoever goes on with it gets an error, and never the answer to the question before."""
    ours, theirs = socket.socketpair()
    link = Link(ours, peer="server 0", rank=1)
    peer = Link(theirs, peer="worker 1", rank=0)
    with pytest.raises(rankwise.CollectiveTimeoutError):
        link.receive(timeout_s=0.01)
    with pytest.raises(rankwise.CollectiveError, match="worker 1 is gone"):
        peer.send(Message(ANSWER, number=1), timeout_s=BOUND_S)
    for go_on in (lambda: link.receive(timeout_s=BOUND_S), lambda: link.send(Message(PULL), timeout_s=1.0)):
        with pytest.raises(rankwise.CollectiveTimeoutError, match="the link to server 0 was closed"):
            go_on()
    peer.close()


def test_a_server_that_dies_while_a_gradient_is_sent_again() -> None:
    """It is sent once more to the next process of this server; the training hears nothing of it, and nothing counts as lost."""
    store, came = dist.HashStore(), list[int]()

    def serve() -> None:
        with open_door(store) as door:
            first = take_in(door)
            welcome(first)
            first.receive(timeout_s=BOUND_S)
        with open_door(store) as door:
            first.close()
            second = take_in(door)
            second._socket.shutdown(socket.SHUT_RD)
        with open_door(store) as door:
            welcome(second)
            link = take_in(door)
        second.close()
        welcome(link)
        message = link.receive(timeout_s=BOUND_S)
        assert message.kind == PUSH
        came.append(message.number)
        assert link.receive(timeout_s=BOUND_S).kind == PULL
        link.send(Message(ANSWER, body=torch.zeros(layout.size_bytes, dtype=torch.uint8)), timeout_s=BOUND_S)
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
