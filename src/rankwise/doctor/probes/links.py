"""Every pair of hosts, in both directions, on ports like those that Gloo and NCCL will use.

**Why it matters.** Ranks connect to each other at ports that the kernel picks. A firewall that lets in only the master's
port lets `init_process_group` succeed; then the first collective hangs, or fails with `Connection reset by peer` or `connectFullMesh failed`.

**How it is checked.** Each host listens on several ports that its kernel picks, at the address that Gloo will use there and, where it is
another one, at NCCL's. Every other host connects, and whatever answers sends its name. This shows whether a connection is
dropped (a firewall), refused (a firewall that rejects, or nothing there), or answered by another host; and whether all ways into a host fail, all
out of it, or a single one. If a host's own routing table has no route to an address, no firewall is blamed: the fix is another
interface, or a route. Hosts on which Gloo takes IPv6 while it takes IPv4 on others are named, too: it connects no ranks of both.

**What to do.** Let the hosts of the job reach each other on all TCP ports, or at least on those of `/proc/sys/net/ipv4/ip_local_port_range`. The
host and the network that it is to let in are printed. If two hosts answer at one address, it belongs to a bridge of
containers that each of them has: set `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` to the interface that they share.
"""

from rankwise.doctor.probe import Probe

PROBE = Probe("links", "every way between two hosts", "hosts", "slow", classes=("I7", "I8", "I22"))
