"""By how much the hosts' clocks differ.

**Why it matters.** The `c10d` rendezvous of torch compares the time of day of different hosts: a node whose heartbeat seems older than 15 seconds
counts as dead, is dropped, and joins again, over and over. Logs of several hosts can't be put in order, and files seem to come from the future.

**How it is checked.** Each host sends the first one its time, several times; the exchange with the
shortest round trip counts, and half of that is the possible error. More than a second is a warning, more than five seconds fails.

**What to do.** On the host that is named: `sudo chronyc makestep`, or `sudo timedatectl set-ntp true`. A container or a virtual machine has the clock of
its host.
"""

from rankwise.doctor.probe import Probe

PROBE = Probe("clocks", "by how much the hosts' clocks differ", "hosts", "quick", classes=("I23",))
