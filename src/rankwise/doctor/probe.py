"""A probe: one thing that is looked at on a host, and compared between hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rankwise.doctor.host import Host
    from rankwise.doctor.reading import Facts, Reading

Topic = Literal["environment", "software", "gpu", "resources", "storage", "network", "hosts"]
TOPICS: tuple[Topic, ...] = ("environment", "software", "gpu", "resources", "storage", "network", "hosts")
#: ``instant``: reads some files, a millisecond. ``quick``: asks other programs or the network, some seconds at most. ``slow``: more.
Speed = Literal["instant", "quick", "slow"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One probe. Its page is the docstring of its module.

    Attributes:
        id: Its name on the command line: ``shared-memory``; its module is ``shared_memory``.
        title: What it looks at, in a few words: ``room in /dev/shm``.
        topic: The chapter it stands in.
        speed: How long it takes.
        classes: The failure classes that it explains: at such a failure a launcher asks it.
        look: Looks at one host. It never raises for what a host may lack: that is a reading, too. None: there is something to
            see only where several hosts meet (``rankwise.doctor.rendezvous``).
        compare: Compares what ``look`` has put into the facts of its readings (those of one host are merged), by name of host, where
            several hosts are looked at. It tells only of what differs, and names the hosts. None: there is nothing to compare.
    """

    id: str
    title: str
    topic: Topic
    speed: Speed
    look: Callable[[Host], Iterable[Reading]] | None = None
    classes: tuple[str, ...] = ()
    compare: Callable[[Mapping[str, Facts]], Iterable[Reading]] | None = None
