"""Waits for ranks that are not there say so long before they end: for whom, where, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed as dist

from clocks import FakeClock
from rankwise.base.errors import CollectiveError, RendezvousError
from rankwise.parallel.servers import setup
from rankwise.runtime.stores import Place, open_store
from rankwise.tf.mirroring import Noted
from rankwise.tf.parameter_servers import make_untrained_equal

if TYPE_CHECKING:
    from rankwise.runtime.context import RankContext


def test_a_rank_says_that_it_waits_for_who_serves_the_store() -> None:
    """Once, after ten seconds; the error comes when the bound is over."""
    said: list[str] = []
    place = Place(kind="tcp", host="127.0.0.1", port=1)
    with pytest.raises(RendezvousError, match=r"rank 0 was not found at 127\.0\.0\.1:1 within 60 s"):
        open_store(place, rank=2, world_size=3, timeout_s=60, clock=FakeClock(), notice=said.append)
    assert said == ["[rank 2] waiting for rank 0 at 127.0.0.1:1: Connection refused; for 50 s more"]


def test_a_server_says_that_it_waits_for_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A parameter server whose second worker never comes names it, and the bound."""
    monkeypatch.setattr(setup, "SYSTEM_CLOCK", FakeClock())
    store: Any = SimpleNamespace(check=lambda keys: keys != ["role/3"])
    ctx = SimpleNamespace(rank=0, world_size=4, role="ps", store=store)
    with pytest.raises(RendezvousError, match="rank 3 did not arrive within 120 s to create"):
        setup.count_servers(cast("RankContext", ctx), None, coordinator=True)
    assert (
        capsys.readouterr().err
        == "rankwise: [rank 0] waiting for rank 3 to create the parameter server; for 110 s more\n"
    )


def test_what_rank_0_has_not_made_under_a_scope_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has a buffer and rank 0 has none: an error about the models, and not after two minutes one about a rank that is late."""
    monkeypatch.setattr(setup, "SYSTEM_CLOCK", FakeClock())
    store, noted = dist.HashStore(), Noted()
    noted.tensors["0 BatchNorm1d.running_mean"] = torch.zeros(2)
    ranks: list[Any] = [SimpleNamespace(rank=rank, store=store, _count=lambda _: 0) for rank in range(2)]
    make_untrained_equal(Noted(), ranks[0])
    with pytest.raises(CollectiveError, match=r"1 buffers and frozen parameters .* but others on rank 0"):
        make_untrained_equal(noted, ranks[1])


def test_a_worker_whose_store_is_gone_says_where_to_look() -> None:
    """Rank 0 gives up a moment earlier and takes the store with it: the error says so, and where to look."""

    def check(_keys: list[str]) -> bool:
        raise dist.DistNetworkError("Failed to recv, got 0 bytes")

    store: Any = SimpleNamespace(check=check, wait=lambda *_: check([]))
    ctx: Any = SimpleNamespace(rank=1, world_size=3, role="chief", store=store, _count=lambda _: 0)
    noted = Noted()
    noted.tensors["0 BatchNorm1d.running_mean"] = torch.zeros(2)
    for call in (
        lambda: setup.count_servers(ctx, None, coordinator=True),
        lambda: make_untrained_equal(noted, ctx),
    ):
        with pytest.raises(
            RendezvousError,
            match=r"(?s)the job's store failed: Failed to recv.*\n  -> the process that serves it \(the launcher, or rank 0\)",
        ):
            call()
