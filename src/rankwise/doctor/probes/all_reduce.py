"""An all-reduce by torch over all hosts: the proof that a job would get through.

**Why it matters.** The other probes look at what a job needs; this one does what it does. It also shows for which host the others
wait: one whose cores are busy arrives late at each collective.

**How it is checked.** Where torch is installed on all hosts, each starts a process that joins a process group (Gloo on the CPU; NCCL, one for each GPU, where
all have some), reduces 4 bytes and 32 MiB several times, and ends. The bandwidth is the tensor's bytes over the time of the slowest rank. Everything is
ended after a minute, or as soon as one of the hosts is lost: the all-reduce of the others would wait for it.

**What to do.** If it fails, the links and names above usually say why; its error text and failure class are shown. If it is much slower than the
streams of `speed`, look at the host for which the others waited.
"""

from rankwise.doctor.probe import Probe

PROBE = Probe("all-reduce", "an all-reduce by torch over all hosts", "hosts", "slow")
