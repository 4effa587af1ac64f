"""A probe, which looks at one thing on a host and compares it between hosts; and its result: what was found, a verdict, and the fix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias, final

if TYPE_CHECKING:
    from rankwise.doctor.host import Host


Topic = Literal["environment", "software", "gpu", "resources", "storage", "network", "hosts"]
TOPICS: tuple[Topic, ...] = ("environment", "software", "gpu", "resources", "storage", "network", "hosts")
#: ``instant``: reads some files, a millisecond. ``quick``: asks other programs or the network, some seconds at most.
#: ``slow``: more.
Speed = Literal["instant", "quick", "slow"]
Look: TypeAlias = "Callable[[Host], Iterable[Reading]]"


@final
@dataclass(frozen=True, slots=True)
class Probe:
    """One probe. Its page is the docstring of its module.

    Attributes:
        id: Its name on the command line: ``shared-memory``; its module is ``shared_memory``.
        title: What it looks at, in a few words: ``room in /dev/shm``.
        topic: The chapter it stands in.
        speed: How long it takes.
        classes: The failure classes that it explains: at such a failure a launcher asks it.
        look: Looks at one host. It never raises for what a host may lack: that is a reading, too. None: there is
            something to see only where several hosts meet (``rankwise.doctor.multi_host``).
        compare: Compares what ``look`` has put into the facts of its readings (those of one host are merged), by name
            of host, where several hosts are looked at. It tells only of what differs, and names the hosts. None: there
            is nothing to compare.
    """

    id: str
    title: str
    topic: Topic
    speed: Speed
    look: Look | None = None
    classes: tuple[str, ...] = ()
    compare: Callable[[Mapping[str, Facts]], Iterable[Reading]] | None = None


Verdict = Literal["ok", "warn", "fail", "skipped"]
#: From the best to the worst.
VERDICTS: tuple[Verdict, ...] = ("ok", "skipped", "warn", "fail")
#: What survives a journey as JSON.
Fact: TypeAlias = "str | int | float | bool | list[Fact] | dict[str, Fact] | None"
Facts: TypeAlias = "Mapping[str, Fact]"


@dataclass(frozen=True, slots=True)
class Reading:
    """What one probe tells of one thing.

    Attributes:
        verdict: ``fail`` breaks or hangs a job, ``warn`` does so in some settings or makes it slow, ``skipped`` could
            not be looked at.
        what: What was seen, as a clause without a full stop, with the values: ``/dev/shm has 64 MiB``.
        why: What comes of it, or why it was skipped; empty for ok.
        fix: The command that mends it, to be typed as it is, or several, one a line; what can't be typed stands
            behind ``#``. Empty for ok.
        class_id: The failure class it leads to (docs/reference/failure-classes.md); empty for none.
        facts: What other hosts' facts of the same probe are compared with; plain JSON.
        probe: The probe's id; set by who runs it.
        hosts: The hosts that it is about, by name; set by who runs it, or by a comparison of hosts.
    """

    verdict: Verdict
    what: str
    why: str = ""
    fix: str = ""
    class_id: str = ""
    _: KW_ONLY
    facts: Facts = field(default_factory=dict)
    probe: str = ""
    hosts: tuple[str, ...] = ()

    @property
    def is_bad(self) -> bool:
        """Whether there is something to fix."""
        return self.verdict in {"warn", "fail"}

    def of(self, probe: str, *hosts: str) -> Reading:
        """Return it with the name of its probe, and of its hosts if it names none."""
        return replace(self, probe=probe, hosts=self.hosts or hosts)

    def to_json(self) -> dict[str, Fact]:
        """Return it as plain JSON."""
        return {
            "probe": self.probe, "hosts": list(self.hosts), "verdict": self.verdict, "what": self.what, "why": self.why,
            "fix": self.fix, "class": self.class_id or None, "facts": dict(self.facts),
        }  # fmt: skip

    @staticmethod
    def from_json(info: Facts) -> Reading:
        """Read it again; ValueError: it is something else."""
        facts, hosts = info.get("facts"), info.get("hosts")
        known = next((one for one in VERDICTS if one == info.get("verdict")), None)
        if known is None or not isinstance(facts, dict) or not isinstance(hosts, list):
            raise ValueError(f"this is not a reading of the doctor: {info!r:.200}")

        def text(name: str) -> str:
            return str(info.get(name) or "")

        return Reading(
            verdict=known, what=text("what"), why=text("why"), fix=text("fix"), class_id=text("class"), facts=facts, probe=text("probe"),
            hosts=tuple(map(str, hosts)),
        )  # fmt: skip


#: Of what breaks or hangs a job; of what does so in some settings, or makes it slow: what was seen, what comes of it,
#: the fix, the failure class.
fail, warn = partial(Reading, "fail"), partial(Reading, "warn")


def ok(what: str, **facts: Fact) -> Reading:
    """Return a reading that all is well."""
    return Reading(verdict="ok", what=what, facts=facts)


def skipped(what: str, why: str) -> Reading:
    """Return a reading of what could not be looked at, and why."""
    return Reading(verdict="skipped", what=what, why=why)


def find_worst(readings: Iterable[Reading]) -> Verdict:
    """Return the worst verdict; ok where there is none."""
    return max((one.verdict for one in readings), key=VERDICTS.index, default="ok")


def first_step(fix: str) -> str:
    """Return the first command of a fix, without the remark behind it; where it has none, what is to be done, in words."""
    lines = [line for line in fix.splitlines() if line.strip()]
    # A remark that ends so leads to the command below it; another one is itself what is to be done first.
    first = next((line for line in lines if not (line.startswith("#") and line.endswith((":", "?")))), fix)
    return first.lstrip("# ").partition("  # ")[0]


def on_host(name: str, *commands: str) -> str:
    """Return commands as they stand in a fix, under the host where they are to be typed."""
    return "\n".join([f"# on {name}:", *commands])
