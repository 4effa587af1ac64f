"""The handshake: every rank says who it is before the first collective; absentees, doubles and odd ones are named."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import HandshakeError
from rankwise.evidence.in_rank.rendezvous_registry import Record, RendezvousRegistry, conclude, judge

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from rankwise.base.clock import Clock

#: After so long the first to come says for whom it waits.
_NOTICE_S = 10.0
#: Those that came later give the first so much longer to tell who is absent.
_GRACE_S = 5.0
#: Where this process serves the store, it stays so long for those that have not read the verdict yet.
_FAREWELL_S = 3.0
#: How often the first to come looks: a twentieth of what it has waited already, within these bounds.
_MIN_POLL_S, _MAX_POLL_S = 0.0005, 0.1
#: Clocks that differ by more make logs of two hosts hard to read, and torch's c10d rendezvous drop living nodes.
_CLOCK_SKEW_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeResult:
    """What a handshake found out.

    Attributes:
        ranks_by_node: The ranks of each host, where some rank could not tell its place; else None.
        num_nodes: How many hosts.
        clock_skew_s: How far this host's clock is ahead of that of whoever judged, if that is far.
        doubts: What differs between the ranks and was let pass.
    """

    ranks_by_node: list[list[int]] | None
    num_nodes: int
    clock_skew_s: float | None
    doubts: tuple[str, ...]


def shake_hands(
    store: dist.Store,
    record: Record,
    *,
    timeout_s: float,
    strict: bool,
    serves: bool,
    clock: Clock,
    notice: Callable[[str], None],
) -> HandshakeResult:
    """Tell the others who this rank is, and hear that all are there and fit together.

    Args:
        store: The job's store, under a prefix of this rendezvous's own.
        record: Who this rank is, from ``describe_process``.
        timeout_s: Seconds from the first rank's arrival to the last one's.
        strict: Whether other versions and other scripts on some ranks are errors; else they are doubts.
        serves: Whether this process serves the store.
        clock: Where time comes from.
        notice: Told, on the first rank to come, for whom it waits when that takes long.

    Returns:
        What was found out.

    Raises:
        HandshakeError: The ranks are not all there, or don't fit together; the same text on all that came.

    Collective: every rank of the job must call this.
    """
    registry = RendezvousRegistry(store, record)
    start = clock.monotonic()
    problems = registry.enter()
    if problems or registry.is_full:
        # A rank that is wrong in itself is told so even where the others have begun without it.
        verdict = registry.publish(conclude(registry.read(), None, clock.time()))
        if problems and not verdict["problems"]:
            verdict = {**verdict, "problems": problems}
    else:
        verdict = _wait(registry, start + timeout_s, timeout_s, clock, notice)
    grave = [problem for problem in verdict["problems"] if strict or problem["kind"] != "different"]
    if grave:
        _let_all_hear(registry, grave[0]["kind"], clock, serves=serves)
        raise HandshakeError(grave[0]["text"], rank=record["rank"], hint=grave[0]["hint"])
    skew_s = clock.time() - verdict["time_s"]
    return HandshakeResult(
        ranks_by_node=verdict["nodes"],
        num_nodes=verdict["num_nodes"],
        clock_skew_s=skew_s if abs(skew_s) > _CLOCK_SKEW_S else None,
        doubts=tuple(problem["text"] for problem in verdict["problems"]),
    )


def _let_all_hear(registry: RendezvousRegistry, kind: str, clock: Clock, *, serves: bool) -> None:
    """Keep the store until the others have read the verdict too, those included that are just coming."""
    # The server may be gone, and stores have errors of their own: the verdict matters more.
    with suppress(Exception):
        num_heard, num_came = registry.count_readers(1)
        num_awaited = 0 if kind in {"absent", "gone"} else int(registry.record["world_size"])
        end = clock.monotonic() + _FAREWELL_S
        while serves and num_heard < max(num_came, num_awaited) and clock.monotonic() < end:
            clock.sleep(_MAX_POLL_S / 10)
            num_heard, num_came = registry.count_readers(0)
        if serves:
            clock.sleep(_MAX_POLL_S)  # the last of them is still being answered


def _wait(
    registry: RendezvousRegistry, end: float, timeout_s: float, clock: Clock, notice: Callable[[str], None]
) -> dict[str, Any]:
    """Wait for the last to come; when that takes too long, say who is missing."""
    if registry.seat == 1:
        verdict = _look_out(registry, end, clock, notice)
    else:
        # The first to come tells when the time is over: only if it is gone by then, this times out (and torch warns).
        verdict = registry.wait_verdict(timedelta(seconds=max(0.001, end + _GRACE_S - clock.monotonic())))
    return verdict or registry.publish(conclude(registry.read(), timeout_s, clock.time()))


def _look_out(
    registry: RendezvousRegistry, end: float, clock: Clock, notice: Callable[[str], None]
) -> dict[str, Any] | None:
    """Look for the verdict until the time is over, as the first to come, and say for whom we wait.

    A wait of torch's that times out prints two lines of warnings of its own.
    """
    start, is_reported = clock.monotonic(), False
    while (now := clock.monotonic()) < end:
        if (verdict := registry.find_verdict()) is not None:
            return verdict
        if not is_reported and now - start > _NOTICE_S:
            is_reported = True
            absent = judge(registry.read(), now - start)
            if absent:
                notice(f"{absent[0]['text']}; waiting for {end - now:.0f} s more")
        clock.sleep(min(max(_MIN_POLL_S, (now - start) / 20), _MAX_POLL_S))
    return None
