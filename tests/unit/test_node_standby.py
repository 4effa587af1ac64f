"""Who may enter torch's rendezvous when a place is free, and that nobody else does."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

from rankwise.engine import node_entry, node_rendezvous, node_standby
from support import wait_until


@pytest.fixture
def port() -> Any:
    """Serve a store."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def open_handler(port: int, num_nodes: int) -> Any:
    """Return one node's rendezvous at that store, for exactly so many nodes."""
    return registry.get_rendezvous_handler(
        RendezvousParameters("c10d", f"localhost:{port}", "job", num_nodes, num_nodes, is_host="0")
    )


def test_one_place_is_taken_by_one_of_those_that_stand_by(port: int) -> None:
    """Two stand by and a place comes free: the second stays outside until the first has it, and then as well, since none is left."""
    store = TCPStore("localhost", port)
    nodes = [open_handler(port, 1) for _ in range(2)]
    tickets = node_standby.Tickets(store, "job")
    for number, node in enumerate(nodes, 1):
        assert tickets.take(node._this_node) == number
        tickets.beat(number)
    outside = nodes[1]._state_holder.state
    assert tickets.list_alive(outside) == [1, 2]
    node_entry.Call(nodes[0].next_rendezvous).is_over.wait(20)
    nodes[1]._state_holder.sync()
    assert tickets.list_alive(nodes[1]._state_holder.state) == [2]
    nodes[0].shutdown()


def test_a_free_place_is_kept_for_who_enters_however_long_that_takes(port: int, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The first that stands by may enter, and takes longer for it than a silence lasts: who stands behind it still waits, and stays outside once it is in."""
    monkeypatch.setattr(node_standby, "_SILENT_S", 0.2)
    monkeypatch.setattr(node_standby, "_LOOK_S", 0.05)
    orders = {"run_id": "job", "max_nodes": 1, "places": [("localhost", port)], "backend": "c10d", "conf": {}}
    lost = open_handler(port, 1)
    assert node_entry.Call(lost.next_rendezvous).is_over.wait(20)
    nodes, looks = [open_handler(port, 1) for _ in range(2)], []
    for number, node in enumerate(nodes, 1):
        looks.append(node_standby._Look(node, orders, is_moved=False))
        wait_until(lambda number=number: looks[-1]._ticket == number)
    holder = lost._state_holder
    while lost._this_node in holder.state.participants:
        holder.state.participants.pop(lost._this_node)
        holder.mark_dirty()
        holder.sync()
    wait_until(lambda: looks[0].says == "enter")
    time.sleep(1)  # five silences
    assert looks[1].says == "wait"
    node_entry.Call(nodes[0].next_rendezvous)
    holder = nodes[1]._state_holder
    wait_until(lambda: nodes[0]._this_node in {*holder.state.participants, *holder.state.wait_list})
    time.sleep(0.5)
    assert looks[1].says == "wait"
    looks[1].is_given_up = True
    nodes[0].shutdown()


def test_a_frozen_store_of_the_past_holds_up_one_thread_in_however_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Nodes that come to one that answers are told in each round where the job is now."""
    monkeypatch.setattr(node_standby, "_FORWARD_S", 0.01)
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    server.set("whose", "this job's")
    tried, thaws = [], threading.Event()

    def is_open(host: str, _port: int) -> bool:
        if host == "frozen":
            tried.append(host)
            thaws.wait()
        return host == "localhost"

    forwarder = node_standby.Forwarder("job", ("whose", "this job's"), is_open)
    for number in range(4):
        forwarder.tell([("frozen", 1), ("localhost", server.port)], ("new", number))
        told = f'["new", {number}]'.encode()
        wait_until(lambda told=told: server.check(["rankwise/job/moved"]) and server.get("rankwise/job/moved") == told)
    assert tried == ["frozen"]
    forwarder.tell([], None)
    thaws.set()


def test_who_is_a_moment_too_late_for_the_last_place_waits_outside(port: int) -> None:
    """Among those that wait for the next round torch leaves such a node, for which all others would start again and again."""
    first, late = open_handler(port, 1), open_handler(port, 1)
    assert node_entry.Call(first.next_rendezvous).is_over.wait(20)

    holder = late._state_holder
    while late._this_node not in holder.state.wait_list:
        holder.sync()
        holder.state.wait_list.add(late._this_node)
        holder.mark_dirty()
        holder.sync()
    first._state_holder._last_sync_time = -1.0
    assert first.num_nodes_waiting() == 1
    assert node_rendezvous.is_shut_out(late)

    call = node_entry.Call(late.next_rendezvous)
    node_rendezvous.wait_outside(late)
    restore = wait_until(lambda: node_rendezvous.withdraw(late), 20, "torch holds it as one too many")
    assert call.is_over.wait(20)
    restore()
    assert first.num_nodes_waiting() == 0
    first.shutdown()
