"""Whether all hosts reach the job's rendezvous, and which are lost on the way.

**Why it matters.** A rank that does not arrive holds up all others in `init_process_group`, which prints nothing until its timeout: on Gloo
30 minutes. A host that dies later leaves them in their next collective.

**How it is checked.** Each host connects to the address and port of the master, as its ranks would. The first one waits for them, names
those that are still missing every few seconds, and rejects hosts that claim a node rank that has already arrived. From then on a host
that does not answer for some seconds, or whose connection ends, counts as lost, and the others continue without it. A
host whose answer is invalid is lost in the same way.

**Who can take part.** Anybody who reaches the port while the doctor waits there: nothing is encrypted, and what hosts report of themselves is trusted,
including the commands that would fix them. Nothing that another host sends is run, and its texts are stripped of terminal escapes; but look at a command before you type it. `--token-file FILE`, with the same secret token on all hosts, keeps strangers out;
`--hosts` makes one up.

**What to do.** Look at the host that is named: is it up, was the same command started there, does `timeout 3 bash -c '</dev/tcp/node0/29500'`
work there while the doctor waits? If a connection is refused, nothing listens at that address: the name leads elsewhere, or the first host was
not started. If it is dropped, a firewall is in between.
"""

from rankwise.doctor.probe import Probe

PROBE = Probe(
    "rendezvous",
    "whether all hosts reach the master's address",
    "hosts",
    "slow",
    classes=("I1", "I2", "I4", "I10", "I11", "I12"),
)
