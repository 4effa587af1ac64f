"""What is known of living ranks at one moment: their collectives, stacks and processes. Plain facts, so that a hang of yesterday can be judged too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, final

from rankwise.evidence.in_rank.pipeline_stages import read_flow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.base.faults import FaultRecord
    from rankwise.evidence.in_rank.pipeline_stages import Flow
    from rankwise.evidence.reader.notes import Stack
    from rankwise.evidence.reader.replicas import Replica

#: Without a move for so long, a rank does nothing: one that computes moves within this.
STILL_S = 1.0
#: Stacks and the flight recorder's entries are fresh if they are not older than this, or than the rank's last move.
FRESH_S = 3.0
#: Who has told of a collective: Python called it; or C++ did (DDP's buckets, functional collectives), and only torch's
#: flight recorder saw it.
Source = Literal["python", "native"]
#: Where the process stands, by its own word and the kernel's.
State = Literal["not started", "running", "stopped", "disk sleep", "ended"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group, as one rank sees it.

    Attributes:
        name: torch's name of it; may differ between ranks that made their groups in different order.
        ranks: Its members, as global ranks, ascending.
        backend: "gloo", "nccl" or another.
        own: The global rank that the process has in torch.distributed; None if unknown. A script may have chosen
            another than the launcher.
    """

    name: str
    ranks: tuple[int, ...]
    backend: str = ""
    own: int | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A collective, or a message from one rank to another, that a rank has entered.

    Attributes:
        group: Name of the group.
        seq: Its number among the group's collectives on that rank, from 1; torch's own, so equal on all ranks that are
            in step. For messages: their number among those of this kind with this peer.
        name: torch.distributed's word: "all_reduce", "all_gather_into_tensor", "barrier", "send", "recv", …
        shapes: Of the tensors that this rank puts in; for ``broadcast`` and ``recv`` of what it gets.
        dtypes: Of the same: "float32".
        root: Source or destination as a global rank, where there is one.
        peer: The other rank, of a message; -1 for any.
        reduce_op: "sum", "max" …; None if unknown.
        gives: Elements that it gives to each member, in the order of ``Group.ranks``, where that may differ from member
            to member: in all_to_all, and with lists of tensors in all_gather and reduce_scatter. Empty if unknown.
        gets: Elements that it expects from each.
        site: ``file.py:LINE``, the innermost line of the user's own code; None if unknown.
        inside: Functions of torch between that line and the collective, outermost first; tells a DDP bucket
            ("backward") from a forward's broadcast ("_pre_forward"). Of very many only the outermost and the innermost
            ones. Of what rankwise's library exchanges for itself, before or instead of the user's collective: the
            function that the user called, "rankwise.all_reduce".
        module: What the module is called whose parameters FSDP gathers or whose gradients it reduces, or that waits in
            its forward: "layers.3", as ``named_modules()`` has it; "." for the outermost one. Of a message what it
            carries, as ``write_flow`` has it. None if unknown.
        source: Who told of it.
        entered_s: When, on the host's monotonic clock; None if unknown.
        is_over: Whether the rank has come out of it, or its work is done; None if unknown.
        has_raised: Whether it has come out of it by an exception.
    """

    group: str
    seq: int
    name: str
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    root: int | None = None
    peer: int | None = None
    reduce_op: str | None = None
    gives: tuple[int, ...] = ()
    gets: tuple[int, ...] = ()
    site: str | None = None
    inside: tuple[str, ...] = ()
    module: str | None = None
    source: Source = "python"
    entered_s: float | None = None
    is_over: bool | None = None
    has_raised: bool = False

    @property
    def is_message(self) -> bool:
        """Whether it has one peer, and no place among the group's collectives."""
        return self.is_send or self.name in {"recv", "irecv"}

    @property
    def is_send(self) -> bool:
        """Whether it sends a message."""
        return self.name in {"send", "isend"}

    @property
    def flow(self) -> Flow | None:
        """What it carries between two stages of a pipeline; None if it is no such message, or that is unknown."""
        return read_flow(self.module) if self.is_message else None

    @property
    def library_call(self) -> str | None:
        """The function of rankwise's library that exchanges something for itself by it; None if it is the user's, or torch's."""
        is_own = len(self.inside) == 1 and self.inside[0].startswith("rankwise.")
        return self.inside[0] if is_own else None

    @property
    def num_elements(self) -> int | None:
        """Elements that this rank puts in; None if unknown."""
        if not self.shapes:
            return None
        total = 0
        for shape in self.shapes:
            size = 1
            for length in shape:
                size *= length
            total += size
        return total


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a rank has recorded of itself, as its parent reads it; also after its death.

    Attributes:
        ops: The last ones, oldest first, from the ring and the flight recorder together, each once.
        groups: By name.
        has_joined: Whether a default process group was made, now or before.
        has_left: Whether it was destroyed.
        has_come: Whether the rank has reached init_process_group, through which it may not be yet.
        steps: Optimizer steps.
        step_s: When the last one was, monotonic; None before the first.
        dumped_s: When the flight recorder was read last, monotonic; None if never.
        stacks: By the name of the thread, the main thread's as "MainThread"; of the last time they were asked for.
        stacks_s: When that was.
        handled: Exceptions that threads were handling then, by the name of the thread: in an ``except``, a ``finally``
            or an ``__exit__``. Their tracebacks have no text of lines. None: not known.
        replicas: Checksums of its models that are trained as replicas (evidence.replicas).
        missing: What this rank, or its torch, can't show, in words.
    """

    ops: tuple[Op, ...] = ()
    groups: Mapping[str, Group] = field(default_factory=dict)
    has_joined: bool = False
    has_left: bool = False
    has_come: bool = False
    steps: int = 0
    step_s: float | None = None
    dumped_s: float | None = None
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    stacks_s: float | None = None
    handled: Mapping[str, FaultRecord] | None = None
    replicas: tuple[Replica, ...] = ()
    missing: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A process that a rank has started, or that one of these has, such as a worker of a DataLoader.

    Attributes:
        name: What the kernel calls it.
        state: The kernel's letter: R, S, D, T, Z.
        ticks: CPU time that it has used, in clock ticks.
        still_s: For how long it has used next to none.
        stack: Its main thread's, without the lines at which it was forked; None if it was not asked, or can't be read.
    """

    pid: int
    name: str
    state: str
    ticks: int = 0
    still_s: float = 0.0
    stack: Stack | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """All that is known of one rank at one moment.

    Attributes:
        code: Its exit code, or minus the signal, if it has ended.
        ended_s: When, monotonic.
        fault: The exception that ended it.
        finished_s: When its script was through.
        left_at: ``file.py:LINE`` of the script's at which it called os._exit; None if it did not.
        evidence: What it has recorded; None if it records nothing.
        stack: Its main thread's, or that of the thread for which the main one waits (evidence.threads), taken at this
            moment; None if it did not answer or was not asked; without frames if it has nobody to answer yet: before
            init_process_group.
        still_s: For how long nothing in it has moved: no record, no step, and next to no CPU time.
        cpu_share: Of one core, over the last seconds; above 1 with several threads.
        children: What it has started and not yet waited for.
        reads_terminal: Whether it waits for somebody to type: a debugger.
        awaits: What its main thread waits for by the kernel's word, as "waiting for process 4711 (ffmpeg)"; empty if
            that tells nothing.
    """

    rank: int
    pid: int = 0
    state: State = "running"
    code: int | None = None
    ended_s: float | None = None
    fault: FaultRecord | None = None
    finished_s: float | None = None
    left_at: str | None = None
    evidence: Evidence | None = None
    stack: Stack | None = None
    still_s: float = 0.0
    cpu_share: float | None = None
    children: tuple[Child, ...] = ()
    reads_terminal: bool = False
    awaits: str = ""

    @property
    def ops(self) -> tuple[Op, ...]:
        """What it is known to have entered, oldest first."""
        return self.evidence.ops if self.evidence is not None else ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """All ranks of a job at one moment.

    Attributes:
        ranks: Those that can be seen from here, ascending; of other nodes nothing is known.
        world_size: Of the job.
        now_s: The moment, on the host's monotonic clock.
        is_whole: Whether all ranks of the job can be seen.
        has_agent_store: Whether the launcher serves the ranks' store, so that none of them does
            (TORCHELASTIC_USE_AGENT_STORE).
        sources: Text of the user's files that stand in stacks and sites, by path (evidence.source); without it fewer
            faults can be named.
    """

    ranks: tuple[RankFacts, ...]
    world_size: int
    now_s: float
    is_whole: bool = True
    has_agent_store: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)

    def find(self, rank: int) -> RankFacts | None:
        """Return what is known of a rank; None if it can't be seen from here."""
        return next((facts for facts in self.ranks if facts.rank == rank), None)
