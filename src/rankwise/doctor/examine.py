"""Examines one host: all probes at once, each within its time."""

from __future__ import annotations

import sys
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from threading import Thread
from typing import TYPE_CHECKING

from rankwise.doctor.reading import Reading, skipped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.doctor.host import Host
    from rankwise.doctor.probe import Probe, Speed
    from rankwise.doctor.reading import Fact, Facts

#: So long a probe may take; what is late is told as skipped.
BOUND_S: dict[Speed, float] = {"instant": 5.0, "quick": 20.0, "slow": 120.0}


def examine(host: Host, probes: Sequence[Probe]) -> list[Reading]:
    """Look at one host by some probes.

    Args:
        host: The host.
        probes: What to look at.

    Returns:
        Their readings, with the names of probe and host, in the order of the probes. A probe that fails, or takes too long (a disk
        that does not answer blocks whoever asks it), is a reading, too.
    """
    begin_s = host.clock.monotonic()
    # Threads that nobody waits for at the end: one that hangs in the kernel must not keep us.
    asked: list[Future[list[Reading]]] = [_start(host, one) for one in probes]
    found: list[Reading] = []
    for probe, future in zip(probes, asked, strict=True):
        left_s = max(0.0, begin_s + BOUND_S[probe.speed] - host.clock.monotonic())
        try:
            readings = future.result(timeout=left_s)
        except FutureTimeoutError:
            readings = [_tell_late(probe)]
        found += [one.of(probe.id, host.name) for one in readings]
    return found


def collect_facts(readings: Sequence[Reading]) -> dict[str, dict[str, Fact]]:
    """Return the facts of one host's readings by probe, those of one probe merged."""
    found: dict[str, dict[str, Fact]] = {}
    for one in readings:
        found.setdefault(one.probe, {}).update(one.facts)
    return found


def compare_hosts(probes: Sequence[Probe], facts: Mapping[str, Mapping[str, Facts]]) -> list[Reading]:
    """Compare what several hosts have told.

    Args:
        probes: Those that were asked.
        facts: By host, then by probe.

    Returns:
        What differs, with the names of probe and hosts.
    """
    found: list[Reading] = []
    for probe in probes:
        told = {host: by_probe[probe.id] for host, by_probe in facts.items() if by_probe.get(probe.id)}
        if probe.compare is not None and len(told) > 1:
            found += [one.of(probe.id, *told) for one in probe.compare(told)]
    return found


def _start(host: Host, probe: Probe) -> Future[list[Reading]]:
    future: Future[list[Reading]] = Future()

    def run() -> None:
        try:
            future.set_result(list(probe.look(host)))
        except Exception as error:  # noqa: BLE001 - one broken probe must not cost the others' readings
            future.set_result([_tell_broken(probe, error)])

    Thread(target=run, name=f"rankwise-probe-{probe.id}", daemon=True).start()
    return future


def _tell_late(probe: Probe) -> Reading:
    bound = f"no answer within {BOUND_S[probe.speed]:.0f} s"
    return skipped(
        f"{probe.title}: {bound}",
        "a disk, a driver or a name server does not answer; try again, or look at it by hand",
    )


def _tell_broken(probe: Probe, error: Exception) -> Reading:
    place = ""
    trace = sys.exc_info()[2]
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None:
        place = f" ({trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno})"
    return skipped(
        f"{probe.title}: the probe failed", f"{type(error).__name__}: {error}{place}; this is a mistake of rankwise's own: please report it"
    )  # fmt: skip
