"""The norm of the whole model's gradient, which servers need to clip an average: each knows only the norm of its own shard."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import CollectiveError
from rankwise.parallel.servers.listener import wrapping_store_errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch.distributed as dist

    from rankwise.base.clock import Clock


@final
class NormExchange:
    """Sums the shards' squared norms through the store: one request each way for an update.

    Args:
        store: The servers' corner of the store.
        shards: Numbers of all shards that have parameters.
        timeout_s: Seconds to wait for the others.
        clock: Source of time.
    """

    def __init__(
        self, store: dist.Store, shards: Iterable[int], *, timeout_s: float, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._store, self._shards = store, tuple(shards)
        self._timeout_s, self._clock, self._lock = timeout_s, clock, threading.Lock()

    def __call__(self, shard: int, version: int, square: float) -> float:
        """Tell one shard's squared norm of a version, and return the norm of all.

        Raises:
            CollectiveError: Some server did not tell its own in time; names the shards.
            RendezvousError: The store is gone.
        """
        keys = {one: f"norm/{version}/{one}" for one in self._shards}
        with self._lock, wrapping_store_errors():
            self._store.set(keys[shard], repr(square))
        end = self._clock.monotonic() + self._timeout_s
        while True:
            with self._lock, wrapping_store_errors():
                absent = [one for one, key in keys.items() if not self._store.check([key])]
                if not absent:
                    total = sum(float(self._store.get(key)) for key in keys.values())
                    with suppress(RuntimeError):  # a file store deletes nothing
                        self._store.delete_key(f"norm/{version - 2}/{shard}")
                    return float(total**0.5)
            if self._clock.monotonic() > end:
                raise CollectiveError(
                    f"shard {shard} waited {self._timeout_s:g} s for the gradient norm of version {version} of shards {absent}",
                    hint="their servers have stopped, or have other workers: look at their output",
                )
            self._clock.sleep(0.0005)
