"""A collective failed as members had ended without it, the exception was caught, and the job ended as if all were well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.verdict.finding import JobFinding
from rankwise.verdict.group_sequences import find_family
from rankwise.verdict.handlers import leaves_its_loop
from rankwise.verdict.wording import name_op, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.group_sequences import GroupSequence
    from rankwise.verdict.scene_view import SceneView

RULE = "went_on_without"


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the findings of it: only of a job that is over, and in which no rank failed, so that nothing else would tell."""
    if not view.scene.is_whole or any(facts.code != 0 for facts in view.scene.ranks):
        return
    for sequence in view.sequences:
        if (failed := _find_failed(sequence, view)) is not None:
            yield _make_finding(sequence, *failed)


def _find_failed(sequence: GroupSequence, view: SceneView) -> tuple[Op, tuple[int, ...], tuple[int, ...]] | None:
    """Return the first collective that raised on all who came to it, with them and those who never came."""
    if any(sequence.lives.values()):
        return None  # the group was made anew: whoever does that has dealt with the failure
    raised = [op for known in sequence.ops.values() for op in known.values() if op.has_raised]
    for op in sorted(raised, key=lambda one: one.seq):
        came, gone = sequence.split_at(op.seq)
        # A barrier carries nothing that could be missed, and at the end of a program it is often meant to be allowed to
        # fail.
        is_lost = find_family(op) not in {None, "barrier"} and op.source == "python"
        if not is_lost or not gone or not all(sequence.is_behind(rank, op.seq) for rank in gone):
            continue
        if all(sequence.ops[rank][op.seq].has_raised for rank in came):
            sites = {sequence.ops[rank][op.seq].site for rank in came}
            if all(leaves_its_loop(view.scene.sources, site) for site in sites):
                return None  # what has failed is not used: that the others left was the sign to end
            return op, came, gone
    return None


def _make_finding(sequence: GroupSequence, op: Op, came: tuple[int, ...], gone: tuple[int, ...]) -> JobFinding:
    culprits = gone if len(gone) <= len(came) else came
    lasts = map(sequence.last_op, culprits)
    where = next((one.site for one in lasts if one is not None and one.site), op.site)
    counts = sorted({sequence.last(rank) for rank in gone})
    return JobFinding(
        kind="mismatch", certainty="suspicion", rule=RULE, culprits=culprits, where=where, is_stuck=False, doing="ended",
        key=f"went on without {name_ranks(gone, None)} {sequence.key} #{op.seq}",
        message=f"{name_ranks(gone)} ended after {' or '.join(map(str, counts))} collectives of their group; {name_ranks(came)} called one more, "
        f"{name_op(op)} at {shorten(op.site)}: it failed because of that, the exception was caught, and they continued without its result",
        fix=f"all ranks must reach {shorten(op.site)} equally often: let an exception caught around it end the rank, "
        "or agree to skip the step on all ranks (all_reduce the flag first)",
    )  # fmt: skip
