"""One shard of the parameters on its server: versions, gradients that wait for others, and the update rule; no transport.

Clocked modes (sync, stale): gradients of one clock are averaged over the workers and make one version (bulk-synchronous, and with
``staleness=k`` a pipeline of k clocks: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
NIPS 2013). Asynchronous: each gradient makes a version (Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012). Backup workers:
Chen et al., arXiv:1604.00981.
"""

from __future__ import annotations

import io
import threading
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
from torch import Tensor, nn

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import CollectiveError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


Result = TypeVar("Result")


@final
@dataclass(slots=True)
class Gradient:
    """What a worker has pushed.

    Attributes:
        worker: Its rank.
        clock: Which of its steps it is for.
        seen: The version that it was computed with.
        weight: Its part in the average.
        buffer: Of dense parameters all pieces' gradients, as the shard's layout has them; of a table those of some
            rows.
        missing: Pieces that have none.
        rows: Of a table, which rows, counted within the shard.
        incarnation: Which process of this rank has pushed it: a late message of one that has died is not taken.
    """

    worker: int
    clock: int
    seen: int
    weight: float
    buffer: Tensor
    missing: frozenset[int] = frozenset()
    rows: Tensor | None = None
    incarnation: int = 1


@final
@dataclass(slots=True)
class Counts:
    """What a shard has done: one number for each gradient that arrived.

    Attributes:
        applied: Gradients that are in the parameters.
        dropped: Gradients that came too late: from workers that were not waited for, or from a process whose successor
            was there.
        staleness: How many gradients were so many versions old when they were applied.
        expelled: Workers that were waited for in vain.
    """

    applied: int = 0
    dropped: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    expelled: list[int] = field(default_factory=list)


class Held(ABC):
    """What a shard holds, and the optimizer over it; called with the shard's lock."""

    def __init__(self, parameters: list[nn.Parameter], make_optimizer: Any, rules: Rules) -> None:
        self.parameters, self.rules = parameters, rules
        self.optimizer: torch.optim.Optimizer | None = make_optimizer(parameters) if parameters else None
        self.scheduler = rules.scheduler(self.optimizer) if rules.scheduler and self.optimizer else None

    @abstractmethod
    def update(self, gradients: list[Gradient], total: float) -> None:
        """Make one step with the average of some gradients, whose weights sum up to ``total``."""

    def release(self, gradient: Gradient) -> None:  # noqa: B027 - as a rule there is nothing to do
        """Take back a gradient's buffer, if it can be used again."""

    def list_values(self) -> list[Tensor]:
        """Return the parameters' values, as ``torch.save`` takes them."""
        return [one.detach() for one in self.parameters]

    def state(self) -> dict[str, Any]:
        """Return values and states, as ``torch.save`` takes them."""
        states = self.optimizer.state_dict() if self.optimizer is not None else {}
        schedule = self.scheduler.state_dict() if self.scheduler is not None else None
        return {"optimizer": states, "scheduler": schedule, "values": self.list_values()}

    def step(self) -> None:
        """Update the parameters by the gradients that they have, and drop these."""
        assert self.optimizer is not None  # noqa: S101 - there are parameters
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        for parameter in self.parameters:
            parameter.grad = None


@final
class Shard:
    """One part of the parameters, and who takes part in its updates."""

    def __init__(self, name: int | str, held: Held, rules: Rules, workers: Iterable[int]) -> None:
        self.name, self.held, self.rules, self.version, self.counts = name, held, rules, 0, Counts()
        self.on_update: Callable[[Shard], None] | None = None
        self.changed = threading.Condition()
        self._members: dict[int, int] = dict.fromkeys(workers, 0)  # the clock from which each is waited for
        self._last: dict[int, int] = {}
        self._incarnations: dict[int, int] = {}
        self._waiting: dict[int, dict[int, Gradient]] = {}

    # -------------------------------------------------------------- who takes part

    def begin(self, version: int) -> None:
        """Count versions from another one than 0; before anybody joins."""
        self.version, self._members = version, dict.fromkeys(self._members, version)

    def join(self, worker: int, incarnation: int = 1) -> int:
        """Count a worker in, and return the clock of the gradient that is expected of it next.

        Its incarnation is which process of this rank it is, from 1; the same one may come back after its link, or the
        server, was lost.

        Raises:
            CollectiveError: A later process of this rank has joined before.
        """
        with self.changed:
            known = self._incarnations.get(worker)
            if known is not None and incarnation < known:
                raise CollectiveError(
                    f"worker {worker} was given up, and started again: this is its process {incarnation}, and {known} is here",
                    hint="it was frozen, or cut off, for long",
                )
            if incarnation != known:
                self._last.pop(worker, None)
                self._forget_waiting(worker)
            self._incarnations[worker] = incarnation
            if worker not in self._members or (known is not None and incarnation != known):
                self._members[worker] = self.version
            next_clock = self._last.get(worker, -1) + 1
            return next_clock if self.rules.is_async else max(next_clock, self.version)

    def _forget_waiting(self, worker: int) -> None:
        """Drop what a process has pushed for versions to come that has died: its successor makes these steps."""
        for waiting in self._waiting.values():
            if (gradient := waiting.pop(worker, None)) is not None:
                self.counts.dropped += 1
                self.held.release(gradient)

    def leave(self, worker: int) -> None:
        """Count a worker out: nobody waits for it any more. What it has pushed before stays."""
        with self.changed:
            self._members.pop(worker, None)
            self._advance()
            self.changed.notify_all()

    def has(self, worker: int) -> bool:
        """Whether a worker takes part."""
        return worker in self._members

    @property
    def missing(self) -> list[int]:
        """The workers whose gradients the next version waits for."""
        have = self._waiting.get(self.version, {})
        expected = (one for one, since in self._members.items() if since <= self.version)
        return sorted(one for one in expected if one not in have)

    # ------------------------------------------------------------- pull and push

    def read(self, at_least: int, take: Callable[[], Result]) -> tuple[int, Result]:
        """Wait until a version is there, and return it with what ``take`` returns of it.

        Whoever is not there after ``timeout_s`` is left out, so that the others continue.
        """
        with self.changed:
            end = SYSTEM_CLOCK.monotonic() + self.rules.timeout_s
            while not self.rules.is_async and self.version < at_least:
                left_s = end - SYSTEM_CLOCK.monotonic()
                if left_s <= 0:
                    for worker in self.missing:
                        self.counts.expelled.append(worker)
                        self._members.pop(worker)
                    self._advance()
                    end = SYSTEM_CLOCK.monotonic() + self.rules.timeout_s
                else:
                    self.changed.wait(left_s)
            return self.version, take()

    def push(self, gradient: Gradient) -> bool:
        """Take a gradient; return whether it is, or will be, in the parameters.

        Raises:
            CollectiveError: The worker has been left out, or this step's gradient of it is here already.
        """
        with self.changed:
            if gradient.incarnation < self._incarnations.get(gradient.worker, gradient.incarnation):
                self.counts.dropped += 1
                self.held.release(gradient)
                return False
            if gradient.worker not in self._members:
                raise CollectiveError(
                    f"worker {gradient.worker} was left out: the others had waited {self.rules.timeout_s:g} s for it",
                    hint="it may join again; raise timeout_s if its steps take that long",
                )
            if gradient.clock <= self._last.get(gradient.worker, -1):
                raise CollectiveError(
                    f"worker {gradient.worker} pushes the gradient of its step {gradient.clock} a second time",
                    hint="call pull() before each push()",
                )
            self._last[gradient.worker] = gradient.clock
            if self.rules.is_async:
                self._apply([gradient])
            elif gradient.clock < self.version:
                self.counts.dropped += 1
                self.held.release(gradient)
                return False
            else:
                self._waiting.setdefault(gradient.clock, {})[gradient.worker] = gradient
                self._advance()
            self.changed.notify_all()
            return True

    # ------------------------------------------------------------------- copies

    def state(self) -> dict[str, Any]:
        """Return all that another process needs to continue from here, as ``torch.save`` takes it; the lock is held."""
        counts = self.counts
        return {
            **self.held.state(), "version": self.version, "last": dict(self._last), "incarnations": dict(self._incarnations),
            "counts": [counts.applied, counts.dropped, dict(counts.staleness), list(counts.expelled)],
        }  # fmt: skip

    def pack(self) -> Tensor:
        """Return values, states and version as bytes; the lock is held."""
        return pack({**self.held.state(), "version": self.version})

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from such a state, before anybody joins."""
        with torch.no_grad():
            for parameter, value in zip(self.held.parameters, state["values"], strict=True):
                parameter.copy_(value)
        if self.held.optimizer is not None:
            self.held.optimizer.load_state_dict(state["optimizer"])
        if self.held.scheduler is not None:
            self.held.scheduler.load_state_dict(state["scheduler"])
        self.begin(state["version"])
        self._incarnations = state["incarnations"]
        # What waited for others is lost, and is asked for again.
        self._last = dict(state["last"])
        if not self.rules.is_async:
            self._last = {one: min(last, self.version - 1) for one, last in self._last.items()}
        applied, dropped, staleness, expelled = state["counts"]
        self.counts = Counts(applied, dropped, Counter(staleness), expelled)

    # ------------------------------------------------------------------ updates

    def _advance(self) -> None:
        """Make versions as long as their gradients are here."""
        while not self.rules.is_async:
            have, missing = self._waiting.get(self.version, {}), self.missing
            # A worker that is not waited for must leave one at least.
            if not have or len(missing) > self.rules.backup_workers:
                return
            self._apply([have[worker] for worker in sorted(have)])
            self._waiting.pop(self.version - 1)

    def _apply(self, gradients: list[Gradient]) -> None:
        """Make one version of some gradients; in the order of the ranks, so that the sum is the same in each run."""
        for one in gradients:
            self.counts.staleness[self.version - one.seen] += 1
        self.counts.applied += len(gradients)
        # Alone, a gradient has no average; and of no samples, no part.
        total = gradients[0].weight if self.rules.is_async else sum(one.weight for one in gradients)
        if total > 0:
            self.held.update(gradients, total)
        for one in gradients:
            self.held.release(one)
        self.version += 1
        if self.on_update is not None:
            self.on_update(self)


def pack(state: Any) -> Tensor:
    """Return a state as bytes that ``torch.load`` reads with ``weights_only``; shape (N,), uint8."""
    held = io.BytesIO()
    torch.save(state, held)
    return torch.frombuffer(bytearray(held.getbuffer()), dtype=torch.uint8)


# ------------------------------------------------------------------ what the caller of parameter_server chooses,
# checked once


MODES = ("sync", "async", "stale")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What servers and workers do, as given to ``parameter_server``; ``staleness`` is 0 in modes that have none."""

    mode: str
    staleness: int
    backup_workers: int
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    table_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], Any] | None
    clip_norm: float | None
    timeout_s: float
    recovery_folder: str | Path | None = None
    save_every: int = 100

    @property
    def is_async(self) -> bool:
        """Whether each gradient is applied when it arrives."""
        return self.mode == "async"

    @property
    def reads_in_place(self) -> bool:
        """Whether no update can come between a worker's pull and its push, so that the buffer itself may be sent."""
        return self.mode == "sync" and self.backup_workers == 0


def check_rules(
    rules: Rules, staleness: Any, *, num_servers: int, num_workers: int, coordinator: bool, has_tables: bool, rank: int
) -> None:
    """Refuse what makes no sense together; ``staleness`` is as it was given."""
    mode, norm, backup = rules.mode, rules.clip_norm, rules.backup_workers
    clips_together = norm is not None and not rules.is_async
    is_lag = isinstance(staleness, int) and not isinstance(staleness, bool) and staleness >= 0
    cases = (
        (mode not in MODES, f"mode={mode!r} is not one of {', '.join(MODES)}", 'mode="sync" equals one process'),
        (mode != "stale" and staleness is not None, f"staleness={staleness} with mode={mode!r}", 'pass mode="stale", or no staleness'),
        (mode == "stale" and not is_lag, f"mode='stale' with staleness={staleness!r}",
         "pass by how many updates a worker may be ahead: staleness=2; 0 equals sync"),
        (backup and mode != "sync", f"backup_workers={backup} with mode={mode!r}", 'only mode="sync" waits for all workers'),
        (not 0 <= backup < num_workers, f"backup_workers={backup} of {num_workers} workers",
         "at least one worker must be waited for: 0 to workers - 1"),
        (norm is not None and not norm > 0, f"clip_norm={norm} is not a norm above 0", "None: gradients are not clipped"),
        (coordinator and not rules.is_async, f"coordinator=True with mode={mode!r}",
         'scheduled functions reach workers unevenly: mode="async"'),
        (not rules.timeout_s > 0, f"timeout_s={rules.timeout_s} is not a number of seconds above 0", "None: that of init()"),
        (clips_together and (has_tables or num_servers > 1),
         f"clip_norm={norm} with mode={mode!r} and {'served embeddings' if has_tables else f'{num_servers} servers'}: no server knows the norm of the whole gradient",
         'servers=1, or mode="async", which clips on the workers; or leave out clip_norm'),
        (rules.save_every < 1, f"save_every={rules.save_every} is not a number of updates", "1 or more: a copy after each so many"),
    )  # fmt: skip
    for is_wrong, what, hint in cases:
        if is_wrong:
            raise UsageError(what, rank=rank, hint=hint)
