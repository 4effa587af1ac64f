"""What each of several hosts must know before it starts: where the coordinator is, and how many hosts there are."""

from __future__ import annotations

from dataclasses import dataclass

from rankwise.base.errors import RendezvousError
from rankwise.doctor.reading import Reading
from rankwise.doctor.rendezvous.wire import SILENCE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a host knows of the rendezvous.

    Attributes:
        endpoint_host: Where the hosts meet: a name or an address of one of them.
        endpoint_port: The port there.
        num_hosts: How many are to come; None if nobody has said it.
        node_rank: Which of them this one is, from 0; None if nobody has said it.
        is_coordinator: Whether the rendezvous is at this host; None: it is if the endpoint's address is its own.
        expected: Names of the hosts that are to come; may be empty.
        arrival_timeout_s: How long to wait for them.
        seconds_per_link: How long each way between two hosts may be measured.
        measure: Whether to measure.
        all_reduce: Whether to let torch reduce over all hosts.
        token: What this rendezvous calls itself: two meetings at one port do not mix.
        listen_address: Where to listen, and from where to connect, in the place of Gloo's and NCCL's addresses: for many hosts
            that are played by one. Their names mean nothing then, and are not looked up.
    """

    endpoint_host: str
    endpoint_port: int
    num_hosts: int | None = None
    node_rank: int | None = None
    is_coordinator: bool | None = None
    expected: tuple[str, ...] = ()
    arrival_timeout_s: float = 30.0
    seconds_per_link: float = 0.25
    measure: bool = True
    all_reduce: bool = False
    token: str = ""
    listen_address: str = ""

    @property
    def silence_s(self) -> float:
        """After so long a silence the other side is taken for dead. Hosts that are all played by one wait for its cores."""
        return 60.0 if self.listen_address else SILENCE_S

    @property
    def endpoint(self) -> str:
        """The endpoint as it is written: ``node0:29500``."""
        host = f"[{self.endpoint_host}]" if ":" in self.endpoint_host else self.endpoint_host
        return f"{host}:{self.endpoint_port}"


class JoinError(RendezvousError):
    """This host could not take part in the rendezvous, or lost it.

    Args:
        message: What happened.
        hint: What to do about it.
        class_id: The failure class that a job would meet here; empty for none.
        fix: Commands that mend it, as in a reading; without, the hint is told as a comment.
    """

    def __init__(self, message: str, *, hint: str, class_id: str = "", fix: str = "") -> None:
        super().__init__(message, hint=hint)
        self.class_id = class_id
        self.fix = fix or f"# {hint}" * bool(hint)

    def to_reading(self) -> Reading:
        """Return it as a reading of ``meeting``."""
        return Reading(
            verdict="fail", what=self.message, fix=self.fix or (f"# {self.hint}" if self.hint else ""), class_id=self.class_id, probe="meeting",
            why="the ranks of this host would not find those of the others, and all would wait in init_process_group until their timeout",
        )  # fmt: skip
