"""How hosts resolve each other's names: a wrong line in one hosts file sends ranks to another host.

**Why it matters.** The master's name is looked up on every host, in that host's `/etc/hosts` and by its name server. Where it leads to
another host's address, or to one that no host has, a rank waits there forever, or connects to a stranger. Gloo also listens at the
address of its host's own name: with the `127.0.1.1` of Debian and Ubuntu no other host finds it.

**How it is checked.** Each host looks up the names that the others have for themselves. The answers are compared with the addresses that these
hosts really have. A name that has no address is not reported: a host that can't find the rendezvous by its name does not arrive there.

**What to do.** Fix the line of `/etc/hosts` on the host that is named; the command is printed with the right address.
`getent hosts node1` shows what a rank there gets.
"""

from rankwise.doctor.probe import Probe

PROBE = Probe("names", "what the hosts' names resolve to on other hosts", "hosts", "quick", classes=("I2", "I5"))
