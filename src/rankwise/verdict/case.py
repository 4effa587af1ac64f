"""What a verdict is judged from, and what it says: plain facts, so that yesterday's job can be judged too."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

from rankwise.base.rank_names import name_ranks

if TYPE_CHECKING:
    from rankwise.base.faults import FaultRecord
    from rankwise.evidence.reader.notes import Problem, Stack
    from rankwise.evidence.reader.scene import Op, RankFacts, Scene
    from rankwise.verdict.finding import JobFinding, Waiting

Kind = Literal["ok", "failure", "hang", "mismatch", "requeue"]
#: How a rank that is not to blame ended.
Fate = Literal[
    "finished", "left for a requeue", "lost its peer", "failed the same way", "failed later",
    "terminated by rankwise", "timed out",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        code: Exit code, or minus the signal that killed it; None if it was never started.
        ended_s: When it was gone, on the host's monotonic clock.
        stopped_s: When we told it to stop; None if it went by itself.
        was_noticed: Whether we passed a signal on to it, and it takes that for a notice: how it ends is its own doing.
        asks_requeue: Whether it left with exit code 75, and has said that this is to mean a requeue.
        fault: The exception that ended it, if it was one.
        finished_s: When its script was through, if it was.
        crash: Its stack when it crashed.
        left_at: ``file.py:LINE`` of the script's at which it called os._exit; None if it did not.
        stack: Its stack at the moment when the first rank had failed, if it still lived then.
        problem: What it found to be wrong with the ranks that it was to meet in a process group.
        expired: The timer of its own (torch.distributed.elastic.timer) for which torch's watchdog has killed it.
        last_words: The end of its standard error.
        log: Where all of that stands.
    """

    rank: int
    local_rank: int
    pid: int = 0
    code: int | None = None
    ended_s: float = 0.0
    stopped_s: float | None = None
    was_noticed: bool = False
    asks_requeue: bool = False
    fault: FaultRecord | None = None
    finished_s: float | None = None
    crash: Stack | None = None
    left_at: str | None = None
    stack: Stack | None = None
    problem: Problem | None = None
    expired: str = ""
    last_words: str = ""
    log: str | None = None

    @property
    def left_s(self) -> float | None:
        """When it left by itself: at its exception, or at its end; None if we stopped it before."""
        moment = self.ended_s
        if self.fault is not None and self.fault.monotonic_s is not None:
            moment = self.fault.monotonic_s
        return None if self.stopped_s is not None and moment >= self.stopped_s else moment

    @property
    def error(self) -> str:
        """The text that tells most of its end."""
        return self.fault.message if self.fault else self.last_words

    @property
    def where(self) -> str | None:
        """``file.py:LINE`` of its end, or of what it did when another failed."""
        if self.fault and self.fault.where:
            return self.fault.where
        if self.left_at and not self.crash:
            return self.left_at
        stack = self.crash or self.stack
        return stack.where if stack else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """A node of the job that was lost while its ranks ran.

    Attributes:
        node: Its rank among the nodes.
        host: Its name.
        base_rank: Its first rank; ``num_ranks``: how many it had, 0 where nobody that is left has heard it.
        why: How it is known.
    """

    node: int
    host: str
    base_rank: int
    num_ranks: int
    why: str

    def describe(self) -> str:
        """Return it with its ranks, and how its loss is known."""
        ranks = range(self.base_rank, self.base_rank + self.num_ranks)
        place = f"{self.host}, {name_ranks(ranks)}" if ranks else self.host
        return f"node {self.node} (host {place}) is lost: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One attempt of one job on one host, after its end.

    Attributes:
        started_s: When the attempt began, on the host's monotonic clock.
        oom_kills: How often the kernel killed for memory meanwhile.
        shm_free_bytes: What was left in /dev/shm; None if there is no such place.
        interrupted: The signal that the user or the scheduler sent to us.
        left_behind: Whether the ranks still living were waiting, idle, for those that had left.
        store_code: Exit code of the store's process, if it ended before the ranks; ``store_words``: what it said.
        supervisor_lost: Whether the supervisor was killed, and all ranks with it.
        scene: All ranks as they were before the first of them was stopped: when one had failed, or a hang was decided.
        findings: What was said of them while they ran, the first first.
        decided: What the nodes of a job of several have agreed on, the cause first: it is the verdict on each of them.
        hung: Whether we stopped the ranks because they hung.
        elsewhere: What has failed on another node that has ended the attempt for all; empty if none has.
            ``elsewhere_code`` is its exit code.
        min_nodes: With how many nodes the job can go on.
        strict: Whether a silent mismatch makes the job fail.
        lost_nodes: Nodes of the job that were lost, for which we have ended the ranks, or without which these had
            failed.
        given_up: Why the other nodes have gone on without this one; empty if they haven't.
    """

    ranks: tuple[RankEnd, ...]
    world_size: int
    num_nodes: int = 1
    attempt: int = 0
    started_s: float = 0.0
    oom_kills: int = 0
    shm_free_bytes: int | None = None
    interrupted: int | None = None
    left_behind: bool = False
    store_code: int | None = None
    store_words: str = ""
    supervisor_lost: bool = False
    scene: Scene | None = None
    findings: tuple[JobFinding, ...] = ()
    decided: tuple[JobFinding, ...] = ()
    hung: bool = False
    elsewhere: str = ""
    elsewhere_code: int = 1
    min_nodes: int = 1
    strict: bool = False
    lost_nodes: tuple[LostNode, ...] = ()
    given_up: str = ""

    def list_ops(self, rank: int) -> tuple[Op, ...]:
        """Return what a rank had entered before the first of them was stopped, as far as it is known."""
        facts = self.scene.find(rank) if self.scene is not None else None
        return facts.ops if facts is not None else ()


def end_of(facts: RankFacts, now_s: float) -> RankEnd:
    """Return the end of a rank that was only looked at; one that still ran counts as stopped at that moment."""
    return RankEnd(
        rank=facts.rank,
        local_rank=facts.rank,
        pid=facts.pid,
        code=facts.code,
        ended_s=now_s if facts.ended_s is None else facts.ended_s,
        stopped_s=now_s if facts.code is None else None,
        fault=facts.fault,
        finished_s=facts.finished_s,
        left_at=facts.left_at,
        stack=facts.stack,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Casualty:
    """A rank that ended because of another."""

    rank: int
    fate: Fate
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What happened.

    Attributes:
        culprits: The ranks to look at first; empty when it was none of them.
        first: The one of them that came first, whose traceback this is; not in the report.
        class_id: The failure class (docs/reference/failure-classes.md); None if it is none of them for sure.
        rule: The rule that saw it, by the name of its page in docs/rules; None if it was judged by how the ranks ended.
        message: What happened, in a sentence.
        reason: What the exit code or signal means.
        traceback: The culprit's.
        exit_code: What the launcher exits with.
        notes: Facts beside the matter that the user should know.
        stopped_by: The signal that ended the job, if it came from outside.
    """

    kind: Kind
    culprits: tuple[int, ...] = ()
    class_id: str | None = None
    rule: str | None = None
    where: str | None = None
    waiting: tuple[Waiting, ...] = ()
    message: str = ""
    reason: str = ""
    fix: str = ""
    traceback: str = ""
    last_words: str = ""
    casualties: tuple[Casualty, ...] = ()
    exits: dict[int, int | None] = field(default_factory=dict)
    logs: dict[int, str] = field(default_factory=dict)
    exit_code: int = 0
    notes: tuple[str, ...] = ()
    stopped_by: str | None = None
    first: int | None = None

    @property
    def lacks_cause(self) -> bool:
        """Whether ranks have lost a peer, and none of this node has failed by itself."""
        codes = [self.exits.get(rank) for rank in self.culprits]
        return self.kind == "failure" and self.stopped_by is None and all(code == 0 for code in codes)

    def to_json(self) -> dict[str, object]:
        """Return the report as ``--report`` writes it."""
        body = asdict(self)
        body["class"] = body.pop("class_id")
        del body["first"]
        return body
