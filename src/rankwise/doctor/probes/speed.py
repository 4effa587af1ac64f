"""Latency, bandwidth and loss between hosts, measured pair by pair, without torch.

**Why it matters.** A ring is as fast as its slowest link: one host with a bad cable, a wrong interface or a throttled port slows each
step of all hosts. A link that loses one packet in a hundred is many times slower than its cable.

**How it is checked.** In each round every host has one partner, so that measurements do not disturb each other. A few bytes go there and back
some twenty times, then one stream runs for a fraction of a second in each direction; the kernel reports how many packets it retransmitted. Up to 32 hosts
all pairs are measured, of more hosts each with enough partners to tell a slow host from a slow link. What seems bad is measured again
before a host is blamed. The numbers are of one TCP stream: InfiniBand, several streams or GPUs reach more.

**What to do.** Look at the host that is named: `ip -s link` counts errors and drops, `ethtool` shows what speed was agreed on, `tc qdisc` whether a limit
is set. Where small messages pass and large ones do not, packets are too large for a part of the way: a smaller MTU fixes it. If all is
slow, the traffic may use a management network: `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` choose another.
"""

from rankwise.doctor.probe import Probe

PROBE = Probe("speed", "latency, bandwidth and loss between hosts", "hosts", "slow")
