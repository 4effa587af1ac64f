"""What hosts take each other's names for: a wrong line in one hosts file sends ranks to another host.

**Why it matters.** The master's name is looked up on every host, by whatever that host's `/etc/hosts` and name server say. Where it leads to
another host's address, or to one that nobody has, a rank waits there for ever, or talks to a stranger. Gloo, besides, listens at the
address of its host's own name: with the `127.0.1.1` of Debian and Ubuntu no other host finds it.

**How it is looked at.** Each host looks up the names that the others have for themselves, and the master's. The answers are compared with
the addresses that these hosts really have. A name that has no address counts only if the ranks meet at it.

**What to do.** Mend the line of `/etc/hosts` on the host that is named; the command is printed with the right address.
`getent hosts node1` shows what a rank there gets.
"""

from __future__ import annotations

from rankwise.doctor.probe import Probe

PROBE = Probe(
    id="names",
    title="what the hosts' names lead to on other hosts",
    topic="hosts",
    speed="quick",
    classes=("I2", "I3", "I5"),
)
