"""The port of the rendezvous: is it free, and will it stay so.

**Why it matters.** Where another process listens at `MASTER_PORT`, the store can't: `EADDRINUSE`, `address already in use`. Often it is
the last job, which has not ended. A port in the ephemeral range (`net.ipv4.ip_local_port_range`) is
sometimes taken by chance.

**How it is checked.** The kernel's tables of sockets and its settings are read; nothing is opened. Only the host of the rendezvous
needs the port.

**What to do.** Leave `--master-port` and `MASTER_PORT` out on one host: the launcher picks a free one. On several, use another one on all
of them, or end the process that holds it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from rankwise.doctor.host import Host
from rankwise.doctor.limits.processes import find_port_user
from rankwise.doctor.network.interfaces import find_master
from rankwise.doctor.probe import Probe, Reading, fail, ok, skipped, warn
from rankwise.doctor.variables.places import DEFAULT_PORT

_USUAL_RANGE = (32768, 60999)


def look(host: Host) -> Iterator[Reading]:
    low, high = read_range(host)
    port = find_master(host)[1] or (DEFAULT_PORT if host.job.num_nodes > 1 else None)
    if host.job.is_master is False:
        yield skipped("the master's port", "the ranks rendezvous on another host")
    elif port is None:
        yield ok(f"no port given, so the launcher takes a free one from {low} to {high}")
    elif "TORCHELASTIC_RUN_ID" in host.env:
        yield ok(f"MASTER_PORT {port} was chosen by the launcher of this process")
    else:
        yield _judge_given(host, port, low, high)


def read_range(host: Host) -> tuple[int, int]:
    """Return the first and the last port that the system gives out by itself."""
    words = host.read("/proc/sys/net/ipv4/ip_local_port_range").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else _USUAL_RANGE


def _judge_given(host: Host, port: int, low: int, high: int) -> Reading:
    holder, pid = find_port_user(host, port)
    # The doctor itself meets at that port, and may be there already.
    is_ours = pid == str(os.getpid()) or (
        "rankwise" in holder and "doctor" in host.read(f"/proc/{pid}/cmdline").split("\0")
    )
    least = host.read("/proc/sys/net/ipv4/ip_unprivileged_port_start") or "1024"
    if holder and not is_ours:
        return fail(
            f"the rendezvous port {port} is held by {holder}",
            "rank 0 can't open its store there: `EADDRINUSE`, `address already in use`; or the ranks join another job",
            f"kill {pid}  # if it is left over" if pid else f"export MASTER_PORT={_find_free(host, port)}  # on all hosts", "I9"
        )  # fmt: skip
    if port < int(least) and getattr(os, "geteuid", lambda: 0)() != 0:
        return fail(
            f"the rendezvous port {port} is below {least}", "only root may open it: `Permission denied`",
            f"export MASTER_PORT={DEFAULT_PORT}  # on all hosts"
        )  # fmt: skip
    if low <= port <= high and host.job.num_nodes > 1:
        return warn(
            f"the rendezvous port {port} is in the ephemeral range ({low} to {high})",
            "any program may be assigned it, and then the job fails to start: `EADDRINUSE`",
            f"export MASTER_PORT={_find_free(host, DEFAULT_PORT)}  # on all hosts", "I9"
        )  # fmt: skip
    return ok(f"the rendezvous port {port} is free")


def _find_free(host: Host, port: int) -> int:
    return next((one for one in range(port, min(port + 1000, 65535)) if not find_port_user(host, one)[0]), DEFAULT_PORT)


PROBE = Probe("ports", "the master port", "network", "instant", look, classes=("I9",))
