"""The clock: does a time server keep it right.

**Why it matters.** torch's c10d rendezvous notes when each node was last heard of, by that node's own clock. Where clocks are more than 15 s
apart, live nodes count as dead: they are dropped and rejoin forever. Logs of several hosts can't be put in order, either.

**How it is checked.** `chronyc`, `timedatectl` or `ntpq` is queried. How far the clocks of several hosts are apart is measured when they
are checked together.

**What to do.** Start a time service, and let it set the clock: `sudo timedatectl set-ntp true`, `sudo chronyc makestep`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankwise.doctor.network.master import has_several_hosts
from rankwise.doctor.probe import Probe, Reading, ok, skipped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.doctor.host import Host

#: c10d takes a node for dead after 15 s; a clock that is off by this much already has no one who keeps it.
_FAR_S = 5.0


def look(host: Host) -> Iterator[Reading]:
    """Return whether a time server keeps the clock."""
    info = _query_chrony(host) or _query_systemd(host) or _query_ntp(host)
    if info is None:
        yield skipped(
            "clock synchronization",
            "no chronyc, timedatectl or ntpq answers here; a container has its host's clock",
        )
        return
    who, is_kept, offset_s = info
    off = "" if offset_s is None else f", {abs(offset_s):.6f} s off"
    if is_kept and abs(offset_s or 0.0) < _FAR_S:
        yield ok(f"{who} synchronizes the clock{off}")
    elif not has_several_hosts(host):
        yield ok(f"by {who}, no time server synchronizes the clock{off}; a single host needs none")
    else:
        yield Reading(
            verdict="warn", what=f"by {who}, {'the clock is wrong' if is_kept else 'no time server synchronizes the clock'}{off}", class_id="I23",
            why="where clocks of hosts are more than 15 s apart, c10d drops live nodes, which rejoin forever",
            fix="sudo chronyc makestep" if who == "chronyc" else "sudo timedatectl set-ntp true",
        )  # fmt: skip


def _query_chrony(host: Host) -> tuple[str, bool, float | None] | None:
    info = host.run("chronyc", "tracking")
    status = re.search(r"Leap status\s*:\s*(.+)", info.out)
    if not info.is_good or status is None:
        return None
    off = re.search(r"System time\s*:\s*([\d.]+) seconds", info.out)
    return "chronyc", status[1].strip() != "Not synchronised", float(off[1]) if off else None


def _query_systemd(host: Host) -> tuple[str, bool, float | None] | None:
    info = host.run("timedatectl", "show", "--property=NTPSynchronized", "--value")
    word = info.out.strip()
    return ("timedatectl", word == "yes", None) if info.is_good and word in {"yes", "no"} else None


def _query_ntp(host: Host) -> tuple[str, bool, float | None] | None:
    info = host.run("ntpq", "-c", "rv")
    off = re.search(r"\boffset=(-?[\d.]+)", info.out)
    if not info.is_good or "leap" not in info.out:
        return None
    return "ntpq", "leap_alarm" not in info.out, float(off[1]) / 1000 if off else None


PROBE = Probe("clock", "the clock", "network", "quick", look, classes=("I23",))
