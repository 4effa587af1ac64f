"""The side channel of a job: ranks compare a few bytes here before they do something together.

It is a Gloo group of its own, beside the one that carries the user's data, so that a rank that is elsewhere is waited
for with a bound and then named, instead of being paired with the wrong call.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.deadline import OverdueError, call_within
from rankwise.base.errors import CollectiveTimeoutError, UsageError
from rankwise.evidence.roll import name_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.base.clock import Clock

#: A rank that has waited so long leaves word at the store of where it is: those that wait in vain read it.
_PATIENCE_S = 1.0
_STORE_TIMEOUT_S = 5.0
_MOST_SHOWN = 4
_TIMED_OUT = "Operation timed out"


@final
class Control:
    """Compares and exchanges small things over all ranks of one process group.

    Args:
        group: A Gloo group that nothing else uses; None if there is one rank only.
        ranks: The global rank of each member, in the group's order.
        rank: Our own global rank.
        store: Where ranks leave word of where they wait.
        timeout_s: Seconds to wait for the slowest rank.
        clock: Where time comes from.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        ranks: Sequence[int],
        rank: int,
        store: dist.Store,
        timeout_s: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._group, self.ranks, self._rank = group, tuple(ranks), rank
        self._store, self.timeout_s, self._clock = store, timeout_s, clock
        self._num_calls, self._is_closed = 0, False

    def compare(self, text: str, *, what: str, timeout_s: float | None = None) -> list[str] | None:
        """Find out whether all ranks hold the same text; costs one small all-reduce when they do.

        Args:
            text: What to compare.
            what: What the ranks are about to do, for the error of one that waits in vain: "all_reduce at train.py:7".
            timeout_s: Seconds to wait for the slowest rank; None: as long as collectives may take.

        Returns:
            None if they do; else each rank's text, in the order of ``ranks``.

        Raises:
            CollectiveTimeoutError: Some rank did not come; names it.

        Collective: every rank of the group must call ``compare`` or ``exchange``, in the same order.
        """
        self._check_open()
        if self._group is None:
            return None
        # Equal on all ranks exactly if the greatest is the smallest: one reduction tells both.
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        seen = torch.tensor([digest, -digest])
        work = self._group.allreduce([seen], _max())
        self._wait(work, what, timeout_s)
        if int(seen[0]) == -int(seen[1]):
            return None
        return [str(told) for told in self.exchange(text, what=what, timeout_s=timeout_s)]

    def exchange(self, value: Any, *, what: str, timeout_s: float | None = None) -> list[Any]:
        """Give every rank the value of each.

        Args:
            value: Anything that can be pickled; unpickled by the ranks of this job only.
            what: As for ``compare``.
            timeout_s: As for ``compare``.

        Returns:
            A value for each rank, in the order of ``ranks``.

        Raises:
            CollectiveTimeoutError: Some rank did not come; names it.

        Collective: as for ``compare``.
        """
        self._check_open()
        if self._group is None:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in self.ranks]
        self._wait(self._group.allgather([lengths], [torch.tensor([data.numel()])]), what, timeout_s)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = [torch.empty_like(padded) for _ in self.ranks]
        self._wait(self._group.allgather([rows], [padded]), what, timeout_s)
        # The bytes come from processes of this very job, which run the user's code anyway.
        # Not by numpy(): torch may be installed without NumPy.
        whole = [
            ctypes.string_at(row.data_ptr(), int(length)) for row, length in zip(rows, lengths, strict=True)
        ]
        return [pickle.loads(one) for one in whole]  # noqa: S301

    def close(self) -> None:
        """Let go of the group; nothing can be compared afterwards."""
        self._group, self._is_closed = None, True

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError(
                "this rank has left the job",
                rank=self._rank,
                hint="make the call before ctx.close(), or join again",
            )

    def _wait(self, work: dist.Work, what: str, timeout_s: float | None) -> None:
        """Wait for all ranks; say where we are when it takes long, and who is missing when it takes too long."""
        bound_s = self.timeout_s if timeout_s is None else timeout_s
        self._num_calls += 1
        patience_s = min(_PATIENCE_S, bound_s / 4)
        end, told = self._clock.monotonic() + bound_s, False
        while True:
            left_s = end - self._clock.monotonic()
            try:
                work.wait(timedelta(seconds=max(0.001, min(left_s, patience_s) if not told else left_s)))
            except RuntimeError as error:
                if _TIMED_OUT not in str(error):
                    raise
            else:
                return
            if not told:
                self._leave_word(what)
                told = True
            if self._clock.monotonic() >= end:
                raise self._name_missing(what, bound_s)

    def _leave_word(self, what: str) -> None:
        word = json.dumps([self._num_calls, what])
        try:
            call_within(_STORE_TIMEOUT_S, lambda: self._store.set(f"at/{self._rank}", word))
        except (OverdueError, RuntimeError):
            return  # whoever reads will count us as missing, and say so of the store too

    def _read_word(self, rank: int) -> tuple[int, str]:
        key = f"at/{rank}"
        if not self._store.check([key]):
            return 0, ""
        number, what = json.loads(self._store.get(key))
        return int(number), str(what)

    def _name_missing(self, what: str, waited_s: float) -> CollectiveTimeoutError:
        others = [rank for rank in self.ranks if rank != self._rank]
        try:
            words = call_within(_STORE_TIMEOUT_S, lambda: [self._read_word(rank) for rank in others])
        except (OverdueError, RuntimeError):
            return CollectiveTimeoutError(
                f"{what}: not all ranks had entered after {round(waited_s, 1):g} s, and the store does not tell which",
                rank=self._rank,
                hint="the process that serves the store is stopped or gone: look at rank 0's host first",
            )
        missing = [
            (rank, word) for rank, word in zip(others, words, strict=True) if word[0] < self._num_calls
        ]
        names = name_ranks([rank for rank, _ in missing]) if missing else "some rank"
        last = "".join(
            f"; rank {rank} last waited in {word[1]}" for rank, word in missing[:_MOST_SHOWN] if word[1]
        )
        return CollectiveTimeoutError(
            f"{what}: after {round(waited_s, 1):g} s not entered by {names}{last}",
            rank=self._rank,
            hint="every rank must make this call: look for a branch, an early return or an exception on the ranks named here",
        )


def _max() -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    return options
