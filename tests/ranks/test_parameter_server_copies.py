"""Copies of what servers hold: of which run they are, what happens where they can't be written or read, and servers that workers upset."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankwise
from rankwise.parallel.servers.dense import DenseValues
from rankwise.parallel.servers.layout import spread
from rankwise.parallel.servers.link import Kind, Link, Message
from rankwise.parallel.servers.listener import Listener, connect
from rankwise.parallel.servers.recovery import Recovery
from rankwise.parallel.servers.serving import Server
from rankwise.parallel.servers.shard import Rules, Shard

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

BOUND_S = 30.0


def make_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def make_shard(number: int, workers: Iterable[int], mode: str = "async") -> Shard:
    (layout,) = spread(nn.Linear(2, 1), 1)
    rules = Rules(
        mode=mode, staleness=0, backup_workers=0, optimizer=make_sgd, table_optimizer=make_sgd, scheduler=None, clip_norm=None, timeout_s=BOUND_S,
    )  # fmt: skip
    return Shard(number, DenseValues(layout, rules), rules, workers)


def make_recovery(folder: Path, run: str) -> Recovery:
    recovery = Recovery(folder, 1, make_shard)
    recovery.begin(run)
    return recovery


def test_copies_of_another_run_are_kept_and_not_gone_on_from(tmp_path: Path) -> None:
    """A new run renames what it finds; a copy that another run has written meanwhile is refused, and so is a damaged one."""
    former, now = make_recovery(tmp_path, "a"), make_recovery(tmp_path, "b")
    shard = make_shard(0, [1])
    shard.begin(7)
    former.save(0, shard)
    with pytest.raises(rankwise.CollectiveError, match="of another run"):
        now.load(0, [1])
    now.set_aside(0)
    now.save(0, make_shard(0, [1]))
    assert now.load(0, [1]).version == 0
    assert torch.load(tmp_path / "shard-0.previous.pt")["version"] == 7
    (tmp_path / "shard-0.pt").write_bytes(b"no copy")
    with pytest.raises(rankwise.CollectiveError, match="shard 0 can't be read"):
        now.load(0, [1])


def fill_up(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def serve(server: Server, errors: list[Exception]) -> threading.Thread:
    def run() -> None:
        try:
            server.serve()
        except Exception as error:  # noqa: BLE001 - judged by the test
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    server.open([1, 2])
    thread.start()
    return thread


def make_server(store: dist.Store, mode: str = "async", workers: Iterable[int] = (1,)) -> Server:
    return Server(
        0, {0: make_shard(0, workers, mode)}, layout_digest="same", workers=workers, store=store,
        listener=Listener(store, "0", rank=0, host=""), timeout_s=BOUND_S,
    )  # fmt: skip


def join(store: dist.Store, worker: int) -> Link:
    link = connect(store, "0", peer="server 0", rank=worker, timeout_s=BOUND_S)
    link.send(Message(Kind.HELLO, note={"worker": worker, "incarnation": 1, "digest": "same"}), timeout_s=BOUND_S)
    assert link.receive(timeout_s=BOUND_S).kind == Kind.HELLO
    return link


def push(link: Link) -> None:
    size = spread(nn.Linear(2, 1), 1)[0].size_bytes
    link.send(Message(Kind.PUSH, body=torch.zeros(size, dtype=torch.uint8)), timeout_s=BOUND_S)


def test_a_copy_that_can_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Server and worker say which file and that there is no space, and nothing of the update rule; nothing half written stays."""
    store, errors = dist.HashStore(), list[Exception]()
    server = make_server(store)
    server.recovery = Recovery(tmp_path, 1, make_shard)
    thread = serve(server, errors)
    link = join(store, 1)
    monkeypatch.setattr("os.fsync", fill_up)
    push(link)
    link.send(Message(Kind.STATS), timeout_s=BOUND_S)
    answer = link.receive(timeout_s=BOUND_S)
    thread.join(BOUND_S)
    link.close()
    assert answer.kind == Kind.REFUSED
    assert "the copy of shard 0 can't be written" in (answer.note or {})["error"]
    assert "update rule" not in (answer.note or {})["error"]
    assert isinstance(errors[0], rankwise.CheckpointError)
    assert "shm-size" in (errors[0].hint or "")
    assert [one.name for one in tmp_path.iterdir()] == ["shard-0.pt"]


def test_a_copy_that_is_larger_than_what_is_free_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system in the host's memory is not filled up to find out."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 4}))
    with pytest.raises(rankwise.CheckpointError, match=r"needs .* MB, and .* has .* MB free"):
        make_recovery(tmp_path, "a").save(0, make_shard(0, [1]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_update_that_fails_when_a_worker_leaves_ends_the_server(is_lost: bool) -> None:
    """The last one that was waited for ends, or is lost, and the rule raises: serve() raises it, and does not wait for ever."""
    store, errors = dist.HashStore(), list[Exception]()
    server = make_server(store, "sync", (1, 2))
    thread = serve(server, errors)
    links = [join(store, worker) for worker in (1, 2)]
    push(links[0])
    links[0].send(Message(Kind.STATS), timeout_s=BOUND_S)
    assert links[0].receive(timeout_s=BOUND_S).kind == Kind.ANSWER

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    server.shards[0].held.update = fail  # type: ignore[method-assign, assignment]
    if not is_lost:
        links[1].send(Message(Kind.BYE), timeout_s=BOUND_S)
    links[1].close()
    thread.join(BOUND_S)
    for link in links:
        link.close()
    assert isinstance(errors[0], ZeroDivisionError)


def test_whoever_greets_wrongly_is_sent_away() -> None:
    """A greeting without a worker's number, or with what is no number, ends its own link; the server serves on."""
    store, errors = dist.HashStore(), list[Exception]()
    thread = serve(make_server(store), errors)
    for note in ({"worker": "x"}, {}):
        link = connect(store, "0", peer="server 0", rank=1, timeout_s=BOUND_S)
        link.send(Message(Kind.HELLO, note=note), timeout_s=BOUND_S)
        with pytest.raises(rankwise.CollectiveError, match="is gone"):
            link.receive(timeout_s=BOUND_S)
        link.close()
    link = join(store, 1)
    link.send(Message(Kind.BYE), timeout_s=BOUND_S)
    thread.join(BOUND_S)
    link.close()
    assert errors == []
