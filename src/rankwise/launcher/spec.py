"""What to launch, checked once and never changed: the command line as facts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Flag
from typing import TYPE_CHECKING, Literal

from rankwise.base.environ import is_on
from rankwise.base.errors import UsageError
from rankwise.base.roles import list_roles

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rankwise.base.roles import Role

OnHang = Literal["stop", "report", "restart"]
#: What a hang may lead to.
ON_HANG: tuple[OnHang, ...] = ("stop", "report", "restart")


def may_watch(env: Mapping[str, str]) -> bool:
    """Tell whether RANKWISE_WATCH leaves the watch for hangs on.

    Args:
        env: The environment.

    Raises:
        UsageError: It says neither yes nor no: whoever wants it off must not get it by a slip of the pen.
    """
    value = env.get("RANKWISE_WATCH", "").strip().lower()
    may = is_on("RANKWISE_WATCH", default=True, env=env)
    # The last is of a job script that asks for a way of recording that is gone.
    if may and value not in {"", "1", "yes", "true", "on", "dispatcher"}:
        raise UsageError(f"RANKWISE_WATCH={value!r} is not one of 1, yes, true, on, 0, no, false, off")
    return may


class Std(Flag):
    """Which of a rank's streams: none, output, error or both (torchrun's 0, 1, 2, 3)."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What each rank runs.

    Attributes:
        script: Path of the script, name of the module, or path of a program.
        args: The script's own arguments.
        how: ``script`` (python script), ``module`` (python -m), ``program`` (no Python in front) or
            ``run_path`` (the script is run by ``runpy.run_path``).
        imports: What the warm server imports for it; empty: what its text tells.
        first_path: The folder in front of its sys.path, where that is not the script's.
        flags: What Python is started with, beside ours.
    """

    script: str
    args: tuple[str, ...] = ()
    how: str = "script"
    imports: tuple[str, ...] = ()
    first_path: Path | None = None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousConfig:
    """Where the nodes of a job meet; a job of one node needs none of it.

    Attributes:
        backend: ``static``, ``c10d`` or another backend that torch knows.
        endpoint: ``host:port``.
        run_id: Name of the job, the same on all nodes.
        conf: Further settings of the backend, as given by ``--rdzv-conf``.
    """

    backend: str = "static"
    endpoint: str = ""
    run_id: str = "none"
    conf: tuple[tuple[str, str], ...] = ()
    local_addr: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """Where the ranks' output goes.

    Attributes:
        folder: Where log folders are made; None for a temporary one.
        redirects: Streams that go to files, by local rank; the key None is for all others.
        tee: Streams that go to files and to the console as well.
        shown_ranks: Local ranks whose output reaches the console; None for all.
        prefix: Template of a teed line's prefix, with ``${role_name}``, ``${rank}``, ``${local_rank}``.
    """

    folder: Path | None = None
    redirects: dict[int | None, Std] = field(default_factory=dict)
    tee: dict[int | None, Std] = field(default_factory=dict)
    shown_ranks: frozenset[int] | None = None
    out_filters: tuple[str, ...] = ()
    err_filters: tuple[str, ...] = ()
    prefix: str = "[${role_name}${local_rank}]:"

    @property
    def is_off(self) -> bool:
        """Whether the user wants no files at all (``--log-dir /dev/null``)."""
        return str(self.folder) == os.devnull

    @property
    def shares_stdout(self) -> bool:
        """Whether ranks may write to our own standard output, where we don't see it."""
        by_rank = {*self.redirects, *self.tee, None}
        named = (
            self.tee.get(one, self.tee.get(None, Std.NONE))
            | self.redirects.get(one, self.redirects.get(None, Std.NONE))
            for one in by_rank
        )
        return any(Std.OUT not in files for files in named)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One launch, as the user asked for it.

    Attributes:
        nproc_per_node: Ranks on this node: a number, or ``gpu``, ``cpu``, ``auto``, ``xpu`` for the helper to count.
        master_addr: Address that the ranks are told; None lets the rendezvous choose.
        master_port: Port of the store; None for a free one.
        shutdown_timeout_s: Seconds between SIGTERM and SIGKILL.
        signals: Names of the signals that end the job.
        report: File for the report as JSON; None for none.
        hang_timeout_s: Seconds that ranks may wait for others while nothing moves; infinite for ever, None for the
            default.
        on_hang: What a hang leads to: ``stop``, ``report`` or ``restart``; None for what is proved only, and on Gloo
            only.
        strict: Whether collectives that were paired wrongly make a job fail that has ended well, and whether a script
            in which the check finds errors is not started.
        check: Whether the script's text is checked beside the start.
        by_variable: Flags that were chosen by a PET_* variable, as ``--master-addr``.
        cold: Start every rank as a fresh interpreter.
        resident: Fork the ranks off a server that outlives the run; None: as RANKWISE_RESIDENT says.
        preload: Modules that the user wants imported before the ranks are forked.
        join_every_s: How often nodes may join, at most.
        watch: Judge whether ranks that live still get on.
        variables: What the ranks' environment has beyond ours; None takes a variable out.
        role_counts: How many ranks have each role, in the order of the ranks; empty: all have ``role``.
    """

    program: Program
    nproc_per_node: str = "1"
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    rendezvous: RendezvousConfig = field(default_factory=RendezvousConfig)
    role: str = "default"
    max_restarts: int = 0
    monitor_interval_s: float = 0.1
    shutdown_timeout_s: float = 30.0
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    logs: Logs = field(default_factory=Logs)
    numa_binding: str | None = None
    virtual_local_rank: bool = False
    report: Path | None = None
    hang_timeout_s: float | None = None
    on_hang: OnHang | None = None
    strict: bool = False
    check: bool = True
    by_variable: frozenset[str] = frozenset()
    cold: bool = False
    resident: bool | None = None
    preload: tuple[str, ...] = ()
    join_every_s: float = 0.0
    watch: bool = True
    variables: tuple[tuple[str, str | None], ...] = ()
    role_counts: tuple[tuple[str, int], ...] = ()

    @property
    def roles(self) -> tuple[Role, ...]:
        """Each rank's role; empty where all have the same."""
        return list_roles(self.role_counts)

    def find_role(self, rank: int) -> Role | None:
        """Return the role of a global rank; None where all have the same."""
        return self.roles[rank] if rank < len(self.roles) else None

    @property
    def num_ranks(self) -> int | None:
        """The number of ranks on this node, if it was given as one."""
        return int(self.nproc_per_node) if self.nproc_per_node.isdecimal() else None

    @property
    def is_one_node(self) -> bool:
        """Whether the job can only ever be this node."""
        return self.max_nodes == 1 and self.rendezvous.backend in {"static", "c10d"}
