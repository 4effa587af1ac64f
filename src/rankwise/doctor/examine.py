"""Examines one host: all probes at once, each within its time. No secret leaves it, whatever a probe has said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Event, Thread
from typing import TYPE_CHECKING

from rankwise.doctor.probe import Fact, Facts, Look, Probe, Reading, Speed, skipped
from rankwise.doctor.variables.masking import make_mask, mask_reading

if TYPE_CHECKING:
    from rankwise.doctor.host import Host

#: So long a probe may take; what is late is told as skipped.
BOUND_S: dict[Speed, float] = {"instant": 5.0, "quick": 20.0, "slow": 120.0}


def examine(host: Host, probes: Sequence[Probe], *, most_s: float = float("inf")) -> list[Reading]:
    """Look at one host by some probes, within ``most_s`` in all, whatever their own bounds are.

    Returns:
        Their readings, with the names of probe and host, in the order of the probes. A probe that fails, or takes too
        long (a disk that does not answer blocks whoever asks it), is a reading, too. Secrets are masked, those in what
        hosts compare (facts) by checksums.
    """
    begin_s = host.clock.monotonic()
    running = [(one, *_begin(host, one.id, one.look)) for one in probes if one.look is not None]
    found: list[Reading] = []
    for probe, is_done, readings in running:
        bound_s = min(BOUND_S[probe.speed], most_s)
        is_late = not is_done.wait(max(0.0, begin_s + bound_s - host.clock.monotonic()))
        why = "a disk, a driver or a name server does not answer; check it by hand"
        late = [skipped(f"{probe.title}: no answer within {bound_s:g} s", why)]
        found += [one.of(probe.id, host.name) for one in (late if is_late else readings)]
    mask = make_mask(host.env)
    return [mask_reading(one, mask) for one in found]


def collect_facts(readings: Sequence[Reading]) -> dict[str, dict[str, Fact]]:
    """Return the facts of one host's readings by probe, those of one probe merged."""
    found: dict[str, dict[str, Fact]] = {}
    for one in readings:
        found.setdefault(one.probe, {}).update(one.facts)
    return found


def compare_hosts(probes: Sequence[Probe], facts: Mapping[str, Mapping[str, Facts]]) -> list[Reading]:
    """Compare the facts of several hosts (by host, then by probe): what differs, with the names of probe and hosts."""
    found: list[Reading] = []
    for probe in probes:
        info = {host: by_probe[probe.id] for host, by_probe in facts.items() if by_probe.get(probe.id)}
        if probe.compare is not None and len(info) > 1:
            try:
                found += [one.of(probe.id, *info) for one in probe.compare(info)]
            except Exception as error:  # noqa: BLE001 - a host may have sent anything: that costs one comparison, and not the result
                why = f"their results can't be compared: {type(error).__name__}: {error}"
                found.append(skipped("the hosts were not compared", why).of(probe.id, *info))
    mask = make_mask({})
    return [mask_reading(one, mask) for one in found]


def _begin(host: Host, name: str, look: Look) -> tuple[Event, list[Reading]]:
    """Begin to look, in a thread that nobody waits for at the end: a probe that hangs in the kernel must not keep us.

    The readings are there once it is done.
    """
    is_done, readings = Event(), list[Reading]()

    def run() -> None:
        try:
            readings.extend([*look(host)])
        except Exception as error:  # noqa: BLE001 - one broken probe must not cost the others' readings
            readings.append(_report_broken(error))
        is_done.set()

    Thread(target=run, name=f"rankwise-probe-{name}", daemon=True).start()
    return is_done, readings


def _report_broken(error: Exception) -> Reading:
    import traceback  # noqa: PLC0415 - hardly ever needed

    place = traceback.extract_tb(error.__traceback__)[-1]
    info = f"{type(error).__name__}: {error} at {place.filename.rpartition('/')[2]}:{place.lineno}"
    return skipped("the probe itself failed", f"{info}; this is a bug in rankwise, please report it")
