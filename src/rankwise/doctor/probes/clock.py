"""The clock: does a time server keep it right.

**Why it matters.** torch's c10d rendezvous notes when each node was last heard of, by that node's own clock. Where clocks are more than 15 s
apart, live nodes count as dead: they are dropped and rejoin forever. Logs of several hosts can't be put in order, either.

**How it is checked.** `chronyc`, `timedatectl` or `ntpq` is queried. How far the clocks of several hosts are apart is measured when they
are checked together.

**What to do.** Start a time service, and let it set the clock: `sudo timedatectl set-ntp true`, `sudo chronyc makestep`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rankwise.doctor.host import Host
from rankwise.doctor.probe import Probe, Reading, ok, skipped, warn

#: c10d takes a node for dead after 15 s; a clock that is off by this much already has no one who keeps it.
_FAR_S = 5.0


def look(host: Host) -> Iterator[Reading]:
    who, is_kept, offset_s = _query(host)
    if not who:
        why = "no chronyc, timedatectl or ntpq answers here; a container has its host's clock"
        yield skipped("clock synchronization", why)
        return
    off = "" if offset_s is None else f", {abs(offset_s):.6f} s off"
    if is_kept and abs(offset_s or 0.0) < _FAR_S:
        yield ok(f"{who} synchronizes the clock{off}")
    elif host.job.num_nodes < 2:
        yield ok(f"by {who}, no time server synchronizes the clock{off}; a single host needs none")
    else:
        yield warn(
            f"by {who}, {'the clock is wrong' if is_kept else 'no time server synchronizes the clock'}{off}",
            "where clocks of hosts are more than 15 s apart, c10d drops live nodes, which rejoin forever",
            "sudo chronyc makestep" if who == "chronyc" else "sudo timedatectl set-ntp true", "I23"
        )  # fmt: skip


def _query(host: Host) -> tuple[str, bool, float | None]:
    """Return which program answers, whether a time server keeps the clock, and by how much it is off, if that is known."""
    for who, words, sign, wrong, offset, unit_s in (
        ("chronyc", ("tracking",), r"Leap status\s*:", r"Leap status\s*:\s*Not synchronised", r"System time\s*:\s*([\d.]+) seconds", 1.0),
        ("timedatectl", ("show", "--property=NTPSynchronized", "--value"), r"^(yes|no)$", r"^no$", "", 1.0),
        ("ntpq", ("-c", "rv"), "leap", "leap_alarm", r"\boffset=(-?[\d.]+)", 1e-3),
    ):  # fmt: skip
        ran = host.run(who, *words)
        if ran.is_good and re.search(sign, ran.out.strip()):
            off = re.search(offset, ran.out) if offset else None
            return who, not re.search(wrong, ran.out.strip()), float(off[1]) * unit_s if off else None
    return "", False, None


PROBE = Probe("clock", "the clock", "network", "quick", look, classes=("I23",))
