"""Rank 0 first, the others after it: downloads, caches, folders."""

from __future__ import annotations

import json
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from rankwise.base.deadline import OverdueError, call_within
from rankwise.base.errors import CollectiveError, CollectiveTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.distributed as dist

_GRACE_S = 5.0


@contextmanager
def take_turns(
    store: dist.Store, key: str, *, is_first: bool, first: int, rank: int, timeout_s: float
) -> Iterator[None]:
    """Run the block on the first rank; let the others in when that is through.

    They wait at the store, so that no timeout of a process group cuts a long download short.

    Args:
        store: Of this job.
        key: A name that no other call has.
        is_first: Whether we are the first rank.
        first: Its number.
        rank: Ours.
        timeout_s: Seconds that the others wait.

    Raises:
        CollectiveError: The first rank's block raised; the error names it.
        CollectiveTimeoutError: The first rank had not finished in time.
    """
    if not is_first:
        _wait(store, key, first, rank, timeout_s)
        yield
        return
    outcome = ["ended the process or left the block by return or break"]
    try:
        yield
        outcome = []
    except BaseException as error:
        outcome = [f"{type(error).__name__}: {error}"]
        raise
    finally:
        # The others find out by themselves; what the block raised matters more.
        with suppress(OverdueError, RuntimeError):
            call_within(_GRACE_S, lambda: store.set(key, json.dumps(outcome)))


def _wait(store: dist.Store, key: str, first: int, rank: int, timeout_s: float) -> None:
    def wait() -> list[str]:
        store.wait([key], timedelta(seconds=timeout_s))
        return list(json.loads(store.get(key)))

    try:
        outcome = call_within(timeout_s + _GRACE_S, wait)
    except (OverdueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "imeout" not in str(error):
            raise CollectiveError(
                f"main_first: the job's store is gone ({str(error).splitlines()[0]})",
                rank=rank,
                hint="the process that serves it (rank 0, or the launcher) has ended: look at its output",
            ) from error
        raise CollectiveTimeoutError(
            f"main_first: rank {first} had not finished after {round(timeout_s, 1):g} s",
            rank=rank,
            hint=f"look at what rank {first} does in the block, or pass a longer timeout_s",
        ) from error
    if outcome:
        raise CollectiveError(
            f"main_first: rank {first} failed in the block: {outcome[0]}",
            rank=rank,
            hint=f"the cause is on rank {first}",
        )
