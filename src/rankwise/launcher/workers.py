"""The seam between the agent and the processes it runs: start, signal, hear of the end, sweep.

``SupervisedWorkers`` puts the supervisor between us and the ranks (Linux); ``DirectWorkers`` is what is left where the
kernel offers neither parent-death signals nor the adoption of orphans (macOS, Windows).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

#: How the store's process is called, with the attempt's number, beside the ranks, whose tag is "LOCAL_RANK.ATTEMPT".
STORE_TAG = "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One process to start.

    Attributes:
        env: What differs from our own environment; None removes a variable.
        stdio: Descriptors for standard input, output and error.
        extra_fds: Further descriptors: the number in the new process, and ours.
        deaf: Whether it ignores the signals that end jobs from its first instruction on.
        forks: How the warm server may stand in for it: ``script`` for a rank, whose command is the server's own;
            ``main`` for a program of ours, a file with a function of that name; empty for never.
    """

    argv: tuple[str, ...]
    env: dict[str, str | None] = field(default_factory=dict)
    stdio: tuple[int, int, int] = (0, 1, 2)
    extra_fds: tuple[tuple[int, int], ...] = ()
    deaf: bool = False
    forks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A process runs."""

    tag: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotStarted:
    """A process could not be started at all."""

    tag: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A process is gone: ``code`` is its exit code, or minus the signal that killed it."""

    tag: str
    code: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorLost:
    """The supervisor died; the kernel has killed all that it had started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """The warm server is ready: it has imported so many modules in so many seconds."""

    num_modules: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cooled:
    """What the user should know of the warm server.

    Attributes:
        kind: ``cold``: ranks are started cold from now on; ``lost``: these are, as somebody killed the server, and the
            next attempt gets another one; ``gone``: it was killed when nobody needed it; ``warning``: it could
            not preload a module.
    """

    reason: str
    kind: Literal["cold", "lost", "gone", "warning"] = "cold"


Change = Started | NotStarted | Ended | SupervisorLost | Warmed | Cooled


class Workers(Protocol):
    """Runs processes under tags."""

    @property
    def supervisor_pid(self) -> int:
        """The process below which all that is started here lives, itself or its parent's."""

    def warm_up(self, command: Command) -> bool:
        """Start the warm server, from which later commands are forked; False where there can be none."""

    def retire(self) -> None:
        """End the warm server: no further command will be forked."""

    def start(self, tag: str, command: Command) -> None:
        """Start a process; ``Started`` or ``NotStarted`` follows."""

    def wait_change(self, timeout_s: float) -> list[Change]:
        """Return what happened; wait at most ``timeout_s`` for something, less if a signal comes in."""

    def signal(self, tag: str, number: int, *, tree: bool = False) -> None:
        """Send a signal to a process, with ``tree`` to its whole process group."""

    def sweep(self, grace_s: float, *, session: int = 0) -> None:
        """End what dead ranks left behind, or only the one of a session: SIGTERM, ``grace_s``, SIGKILL; it lasts until all are gone."""

    def leave(self) -> int:
        """End what is ours, leave alone what the script left running on purpose; return how much that is."""

    def close(self) -> None:
        """End everything at once."""
