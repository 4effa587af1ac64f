"""The side channel of a job: ranks compare a few bytes here before they do something together.

It is a Gloo group of its own, beside the one that carries the user's data, so that a rank that is elsewhere is waited
for with a bound and then named, instead of being paired with the wrong call.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.deadline import OverdueError, call_within
from rankwise.base.errors import CollectiveError, CollectiveTimeoutError, UsageError
from rankwise.base.memory import view_memory
from rankwise.base.rank_names import name_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.base.clock import Clock

#: A rank that has waited so long leaves word at the store of where it is: those that wait in vain read it.
_REPORT_AFTER_S = 1.0
_STORE_TIMEOUT_S = 5.0
_LONGEST = 200
_MOST_SHOWN = 4
#: A wait of ours that is over, and may be taken up again; and Gloo's own, after which the work has failed.
_TIMED_OUT, _FAILED_LATE = "Operation timed out", "imed out waiting"


@final
@dataclass(frozen=True, slots=True)
class _Pending:
    """A call that has not come to its end: what the others do next is still an answer to it.

    Attributes:
        compared: What this rank compares; the same call may be made again, and goes on with the wait.
        what: What the rank was about to do.
        seen: Where the answer will be.
        work: What to wait for; None if the call can't be taken up again.
    """

    compared: str
    what: str
    seen: torch.Tensor
    work: dist.Work | None


@final
class Control:
    """Compares and exchanges small things over all ranks of one process group.

    Args:
        group: A Gloo group that nothing else uses; None if there is one rank only.
        ranks: The global rank of each member, in the group's order.
        rank: Our own global rank.
        store: Where ranks leave word of where they wait.
        timeout_s: Seconds to wait for the slowest rank.
        refusal: Why there is none, if every call is to say so.
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
        refusal: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._group, self.ranks, self._rank, self._refusal = group, tuple(ranks), rank, refusal
        self._store, self.timeout_s, self._clock = store, timeout_s, clock
        self._num_calls, self._is_closed = 0, False
        self._pending: _Pending | None = None

    def post(self, text: str, *, what: str, kind: str | None = None) -> None:
        """Begin a comparison, and return at once: ``compare`` with the same arguments must be this rank's next call, and waits.

        Args:
            text: As for ``compare``.
            what: As for ``compare``.
            kind: As for ``compare``.

        Collective: as for ``compare``.
        """
        self._check_open()
        if self._group is not None:
            self._post(f"{kind or what.partition(' ')[0]}\n{text}", what, None)

    def compare(
        self, text: str, *, what: str, kind: str | None = None, timeout_s: float | None = None
    ) -> list[str] | None:
        """Find out whether all ranks hold the same text; costs one small all-reduce when they do.

        A call that ran out of time may be made again, and goes on with the wait: the others may just be coming.

        Args:
            text: What to compare.
            what: What the ranks are about to do, for the error of one that waits in vain: "all_reduce at train.py:7".
            kind: Who can read ``text``; texts of two kinds are never given to one reader. None: the first word of
                ``what``.
            timeout_s: Seconds to wait for the slowest rank; None: as long as collectives may take.

        Returns:
            None if they do; else each rank's text, in the order of ``ranks``.

        Raises:
            CollectiveTimeoutError: Some rank did not arrive; names it.
            CollectiveError: The ranks are about to do things of different kinds; or another call of this rank had run
                out of time before, and the ranks are out of step since.

        Collective: every rank of the group must call ``compare`` or ``exchange``, in the same order.
        """
        self._check_open()
        if self._group is None:
            return None
        kind = kind or what.partition(" ")[0]
        # A digest is reduced over the ranks: equal on all of them exactly if the greatest is the smallest.
        pending = self._post(f"{kind}\n{text}", what, timeout_s)
        assert pending.work is not None  # noqa: S101 - for the type checker
        self._wait(pending.work, what, timeout_s)
        if int(pending.seen[0]) == -int(pending.seen[1]):
            return None
        answers = self.exchange((kind, what, text), what=what, timeout_s=timeout_s)
        if len({one[0] for one in answers}) > 1:
            raise self._tell_kinds([one[1] for one in answers])
        return [str(one[2]) for one in answers]

    def _post(self, compared: str, what: str, timeout_s: float | None) -> _Pending:
        pending = self._pending
        if pending is None:
            digest = int.from_bytes(hashlib.blake2b(compared.encode(), digest_size=7).digest(), "big")
            seen = torch.tensor([digest, -digest])
            assert self._group is not None  # noqa: S101 - asked before
            self._num_calls += 1
            options = dist.AllreduceOptions()
            options.timeout = timedelta(seconds=max(self.timeout_s, timeout_s or 0.0))
            options.reduceOp = dist.ReduceOp.MAX
            work = self._group.allreduce([seen], options)
            pending = self._pending = _Pending(compared, what, seen, work)
        elif pending.work is None or pending.compared != compared:
            raise self._tell_pending(what, pending)
        return pending

    def _tell_kinds(self, answers: Sequence[str]) -> CollectiveError:
        return CollectiveError(
            f"the ranks called different collectives: {self.describe(answers)}",
            rank=self._rank,
            hint="one rank took another branch, or skipped a call: all must make the same calls in the same order",
        )

    def describe(self, answers: Sequence[str]) -> str:
        """Say which ranks gave which answer; long ones are shown from where they differ."""
        groups: dict[str, list[int]] = {}
        for rank, answer in zip(self.ranks, answers, strict=True):
            groups.setdefault(answer, []).append(rank)
        same = next((at for at, signs in enumerate(zip(*groups, strict=False)) if len(set(signs)) > 1), 0)
        begin = max(0, same - 60) if max(map(len, groups)) > _LONGEST else 0
        shown = [
            f"{name_ranks(ranks)}: {'...' * (begin > 0)}{answer[begin:][:_LONGEST]}"
            for answer, ranks in list(groups.items())[:_MOST_SHOWN]
        ]
        if len(groups) > _MOST_SHOWN:
            shown.append(f"and {len(groups) - _MOST_SHOWN} others")
        return "; ".join(shown)

    def _tell_pending(self, what: str, pending: _Pending) -> CollectiveError:
        return CollectiveError(
            f"{what}: an earlier call ({pending.what}) timed out or was interrupted, and the ranks have been out of step since",
            rank=self._rank,
            hint="make the same call again, from the same line; or leave the job with ctx.close() on every rank and join again",
        )

    def exchange(self, value: Any, *, what: str, timeout_s: float | None = None) -> list[Any]:
        """Give every rank the value of each.

        Args:
            value: Anything that can be pickled; unpickled by the ranks of this job only.
            what: As for ``compare``.
            timeout_s: As for ``compare``.

        Returns:
            A value for each rank, in the order of ``ranks``.

        Raises:
            CollectiveTimeoutError: Some rank did not arrive; names it.

        Collective: as for ``compare``.
        """
        self._check_open()
        if self._group is None:
            return [value]
        self._mark(what)
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in self.ranks]
        self._num_calls += 1
        work = self._group.allgather([lengths], [torch.tensor([data.numel()])])
        self._wait(work, what, timeout_s, is_last=False)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = [torch.empty_like(padded) for _ in self.ranks]
        self._num_calls += 1
        self._wait(self._group.allgather([rows], [padded]), what, timeout_s)
        # The bytes come from processes of this very job, which run the user's code anyway.
        # Not by numpy(): torch may be installed without NumPy.
        whole = [view_memory(row.data_ptr(), int(length)) for row, length in zip(rows, lengths, strict=True)]
        return [pickle.loads(one) for one in whole]  # noqa: S301

    def broadcast(self, data: torch.Tensor, *, sender: int, what: str, timeout_s: float | None = None) -> None:
        """Give every rank the bytes of one, in place.

        Args:
            data: A tensor on the CPU, of the same shape and dtype on all ranks.
            sender: Its global rank.
            what: As for ``compare``.
            timeout_s: As for ``compare``.

        Raises:
            CollectiveTimeoutError: Some rank did not arrive; names it.

        Collective: as for ``compare``.
        """
        self._check_open()
        if self._group is None:
            return
        self._mark(what)
        self._num_calls += 1
        options = dist.BroadcastOptions()
        options.rootRank = self.ranks.index(sender)
        self._wait(self._group.broadcast([data], options), what, timeout_s)

    def _mark(self, what: str) -> None:
        """Begin what can't be taken up again half done: whatever ends it early leaves this mark."""
        if self._pending is not None:
            raise self._tell_pending(what, self._pending)
        self._pending = _Pending("", what, torch.empty(0), None)

    def close(self) -> None:
        """Let go of the group; nothing can be compared afterwards."""
        self._group, self._is_closed = None, True

    def _check_open(self) -> None:
        if not self._refusal and not self._is_closed:
            return
        text, hint = "this rank has left the job", "make the call before ctx.close(), or join again"
        if self._refusal:
            text = self._refusal
            hint = "servers and workers exchange data through rankwise.parameter_server()"
        raise UsageError(text, rank=self._rank, hint=hint)

    def _wait(self, work: dist.Work, what: str, timeout_s: float | None, *, is_last: bool = True) -> None:
        """Wait for all ranks; say where we are when it takes long, and who is missing when it takes too long."""
        bound_s = self.timeout_s if timeout_s is None else timeout_s
        report_after_s = min(_REPORT_AFTER_S, bound_s / 4)
        end, is_reported = self._clock.monotonic() + bound_s, False
        while True:
            left_s = end - self._clock.monotonic()
            step_s = left_s if is_reported else min(left_s, report_after_s)
            try:
                work.wait(timedelta(seconds=max(0.001, step_s)))
            except RuntimeError as error:
                if _FAILED_LATE in str(error):
                    self._pending = _Pending("", what, torch.empty(0), None)
                    waited_s = bound_s - max(0.0, end - self._clock.monotonic())
                    raise self._name_missing(what, waited_s) from None
                if _TIMED_OUT not in str(error):
                    self._pending = None  # the connection is lost, and every call will say so
                    raise
            else:
                if is_last:
                    self._pending = None
                return
            if not is_reported:
                self._leave_word(what)
                is_reported = True
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
                f"{what}: not all ranks had entered after {round(waited_s, 1):g} s, and the store does not show which",
                rank=self._rank,
                hint="the process that serves the store is stopped or gone: look at rank 0's host first",
            )
        pairs = zip(others, words, strict=True)
        missing = [(rank, last) for rank, (number, last) in pairs if number < self._num_calls]
        names = name_ranks([rank for rank, _ in missing]) if missing else "some rank"
        shown = (f"; rank {rank} last waited in {last}" for rank, last in missing[:_MOST_SHOWN] if last)
        return CollectiveTimeoutError(
            f"{what}: after {round(waited_s, 1):g} s not entered by {names}{''.join(shown)}",
            rank=self._rank,
            hint="every rank must make this call: look for a branch, an early return or an exception on the ranks named here",
        )
