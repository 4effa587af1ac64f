"""What a shard holds of a model's dense parameters: one flat buffer, the optimizer over it, and the norm by which it is clipped."""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from copy import deepcopy
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import CollectiveError
from rankwise.parallel.servers.shard import Gradient, Held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch.distributed as dist

    from rankwise.parallel.servers.layout import ShardLayout
    from rankwise.parallel.servers.shard import Rules


@final
class DenseValues(Held):
    """Parameters of one shard.

    Given the shard's number, a version and its squared norm, ``total_norm`` returns the whole model's norm, for
    clipping.
    """

    def __init__(
        self, layout: ShardLayout, rules: Rules, total_norm: Callable[[int, int, float], float] | None = None
    ) -> None:
        self.layout, self._total_norm = layout, total_norm
        self.buffer = layout.allocate()
        super().__init__([nn.Parameter(view) for view in layout.view(self.buffer)], rules.optimizer, rules)
        self._snapshot: Tensor | None = None
        self._free: list[Tensor] = []

    def take_buffer(self) -> Tensor:
        """Return a buffer for a gradient; an update gives it back."""
        return self._free.pop() if self._free else self.layout.allocate()

    def release(self, gradient: Gradient) -> None:
        """Take a gradient's buffer back."""
        self._free.append(gradient.buffer)

    def read(self) -> Tensor:
        """Return the parameters' bytes, which stay as they are until they are sent."""
        if self.rules.reads_in_place:
            return self.buffer
        if self._snapshot is None:
            self._snapshot = self.buffer.clone()
        return self._snapshot

    def update(self, gradients: list[Gradient], total: float, version: int) -> None:
        """Make one step with the average of some gradients, whose weights sum up to ``total``."""
        if not self.parameters:
            return
        first = gradients[0].buffer
        average = self.layout.view_segments(first)
        if (share := gradients[0].weight / total) != 1:  # a pass over all of it
            for part in average:
                part.mul_(share)
        for other in gradients[1:]:
            for part, addend in zip(average, self.layout.view_segments(other.buffer), strict=True):
                part.add_(addend, alpha=other.weight / total)
        missing = frozenset.intersection(*(one.missing for one in gradients))
        for place, (parameter, view) in enumerate(zip(self.parameters, self.layout.view(first), strict=True)):
            parameter.grad = None if place in missing else view
        self._clip(average, version)
        self.step()
        self._snapshot = None

    def _clip(self, average: list[Tensor], version: int) -> None:
        """Scale a gradient down, if the whole model's norm is above the bound and the servers know it."""
        bound = self.rules.clip_norm
        if bound is None or self._total_norm is None:
            return
        own = sum(float(part.double().square().sum()) for part in average)
        # As torch's clip_grad_norm_.
        factor = bound / (self._total_norm(self.layout.number, version, own) + 1e-6)
        if factor < 1:
            torch._foreach_mul_(average, factor)

    def resume(self, states: Mapping[str, Mapping[str, Any]], num_updates: int) -> None:
        """Continue from an optimizer's state of whole parameters, by name, and from where the schedule was."""
        if self.optimizer is None:
            return
        for parameter, piece in zip(self.parameters, self.layout.pieces, strict=True):
            if piece.name in states:
                self.optimizer.state[parameter] = {
                    # What is no number for each element is kept whole.
                    key: piece.take(value.detach().cpu()).clone() if isinstance(value, Tensor) and value.dim() else deepcopy(value)
                    for key, value in states[piece.name].items()
                }  # fmt: skip
        if self.scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of steps without the optimizer's
                for _ in range(num_updates):
                    self.scheduler.step()

    def list_values(self) -> list[Tensor]:
        """Return clones of the values: ``torch.save`` takes no two dtypes of one buffer."""
        return [one.clone() for one in super().list_values()]


@final
class NormExchange:
    """Sums the shards' squared norms through the store: one request each way for an update."""

    def __init__(self, store: dist.Store, shards: Iterable[int], *, timeout_s: float) -> None:
        self._store, self._shards = store, tuple(shards)
        self._timeout_s, self._lock = timeout_s, threading.Lock()

    def __call__(self, shard: int, version: int, square: float) -> float:
        """Send one shard's squared norm of a version, and return the norm of all.

        Raises:
            CollectiveError: Some server did not send its own in time; names the shards.
            RendezvousError: The store is gone.
        """
        keys = {one: f"norm/{version}/{one}" for one in self._shards}
        with self._lock:
            self._store.set(keys[shard], repr(square))
        end = SYSTEM_CLOCK.monotonic() + self._timeout_s
        while True:
            with self._lock:
                absent = [one for one, key in keys.items() if not self._store.check([key])]
                if not absent:
                    total = sum(float(self._store.get(key)) for key in keys.values())
                    with suppress(RuntimeError):  # a file store deletes nothing
                        self._store.delete_key(f"norm/{version - 2}/{shard}")
                    return float(total**0.5)
            if SYSTEM_CLOCK.monotonic() > end:
                raise CollectiveError(
                    f"shard {shard} waited {self._timeout_s:g} s for the gradient norm of version {version} of shards {absent}",
                    hint="their servers have stopped, or have other workers: look at their output",
                )
            SYSTEM_CLOCK.sleep(0.0005)
