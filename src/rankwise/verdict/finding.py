"""What can be told of ranks that still run: who keeps the others waiting, or does not do what they do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

Certainty = Literal["proof", "suspicion"]
#: What a culprit is doing meanwhile. "debugged": somebody reads its state in a debugger, and it is never a hang.
Doing = Literal[
    "asleep", "busy", "compiling", "debugged", "ended", "in a collective", "loading data", "saving", "stopped", "unknown"
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A rank that was waiting when the first one left."""

    rank: int
    where: str | None
    op: str | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinding:
    """One cause, as the facts of one moment show it.

    Attributes:
        kind: "hang": ranks wait for what does not come. "mismatch": their collectives do not correspond.
            "failure": they lost one that has left before them.
        certainty: "proof": no course of events makes this right again. "suspicion": it may end well.
        rule: Name of its page in docs/rules.
        culprits: The ranks that deviate, ascending.
        class_id: The failure class (docs/reference/failure-classes.md); None if the facts do not decide it.
        where: ``file.py:LINE`` of the first culprit.
        waiting: Who waits, where, in what.
        message: Who deviates, at which line, and who waits for it, in one sentence.
        fix: What to do, in terms of the user's own lines.
        is_stuck: Whether the ranks can never go on; False for collectives that were paired wrongly and went through.
        key: Equal for the same finding at a later moment, so that it is said once.
        doing: What the culprits do meanwhile.
        since_s: When the first of the waiting ranks began to wait, on the host's monotonic clock; None if unknown.
    """

    kind: Literal["failure", "hang", "mismatch"]
    certainty: Certainty
    rule: str
    culprits: tuple[int, ...]
    message: str
    key: str
    class_id: str | None = None
    where: str | None = None
    waiting: tuple[Waiting, ...] = ()
    fix: str = ""
    is_stuck: bool = True
    doing: Doing = "unknown"
    since_s: float | None = None

    @property
    def is_proof(self) -> bool:
        """Whether no course of events makes this right again."""
        return self.certainty == "proof"

    @property
    def is_drift(self) -> bool:
        """Whether it is about models that are not the same, and explains neither a hang nor a failure."""
        return self.rule in {"drift", "never_wrapped"}

    @property
    def is_local(self) -> bool:
        """Whether each rank waits for something of its own, and keeps no other one waiting: it may be meant."""
        return self.rule == "local_wait"
