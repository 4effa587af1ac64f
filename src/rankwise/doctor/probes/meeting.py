"""Whether all hosts reach the place where the job would meet, and who is lost on the way.

**Why it matters.** A rank that does not come holds up all others in `init_process_group`, which says nothing until its time-out: on Gloo
30 minutes. A host that dies later leaves them in their next collective.

**How it is looked at.** Each host goes to the address and port of the master, as its ranks would. The first one waits for them, names
those that are still missing every few seconds, and sends away who says that it is a node that is here already. From then on a host
that does not answer for some seconds, or whose connection ends, counts as lost, and the others go on without it. Who answers what makes no
sense is lost in the same way.

**Who can take part.** Whoever reaches the port while the doctor waits there: nothing is encrypted, and hosts are believed what they tell
of themselves, the commands that would mend them included. Nothing that another host tells is run, and its texts are stripped of what a
terminal would obey; but look at a command before you type it. `--token-file FILE`, with the same secret word on all hosts, keeps strangers out;
`--hosts` makes one up.

**What to do.** Look at the host that is named: is it up, was the same command started there, does `timeout 3 bash -c '</dev/tcp/node0/29500'`
work there while the doctor waits? If a connection is refused, nobody listens at that address: the name leads elsewhere, or the first host was
not started. If it is dropped, a firewall stands in between.
"""

from __future__ import annotations

from rankwise.doctor.probe import Probe

PROBE = Probe(
    id="meeting",
    title="whether all hosts reach the master's address",
    topic="hosts",
    speed="slow",
    classes=("I1", "I2", "I4", "I10", "I11", "I12"),
)
