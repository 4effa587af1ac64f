"""Numbers of a rank that don't fit each other: what torchrun says of the node, and of a job on one host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.doctor.reading import Reading
from rankwise.doctor.variables.places import number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rankwise.base.identity import Identity

_WHY = "one of them is left over, or was set by hand: if it is RANK, two processes claim one rank, and the others wait for one that never arrives"


def check_numbers(env: Mapping[str, str], outer: Identity | None) -> Iterator[Reading]:
    """Yield a warning if the numbers don't fit each other; others than torchrun may order ranks as they like.

    Args:
        env: The environment.
        outer: What the launcher of processes says, if there is one.
    """
    rank, world, local, ranks = (
        number(env, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    if rank is None or world is None or ranks is None or not 0 <= rank < world:
        return
    # LOCAL_RANK=0 is told to ranks that see but one GPU, by torchrun itself with --virtual-local-rank.
    if not local or not local < ranks <= world:
        return
    if outer is not None and (outer.rank, outer.world_size, outer.local_rank) == (rank, world, local):
        return
    node, nodes = number(env, "GROUP_RANK"), number(env, "GROUP_WORLD_SIZE")
    if ranks == world:
        # Scripts of one's own may order the ranks of a host as they like; torchrun counts them one way.
        if rank != local and ("TORCHELASTIC_RUN_ID" in env or node is not None):
            yield Reading(
                verdict="warn", what=f"RANK={rank} and LOCAL_RANK={local}, and all ranks are on this host (LOCAL_WORLD_SIZE={ranks}, WORLD_SIZE={world})",
                why=_WHY, fix=_REMEDY, class_id="I10",
            )  # fmt: skip
    elif (
        node is not None
        and nodes is not None
        and 0 <= node < nodes
        and not _fits(rank - local, ranks, world, node, nodes)
    ):
        if rank == local * nodes + node:
            return  # dealt out node by node, one after another
        yield Reading(
            verdict="warn", what=f"RANK={rank}, and LOCAL_RANK={local} of LOCAL_WORLD_SIZE={ranks} on node GROUP_RANK={node} of {nodes} can't be that one of {world}",
            why=_WHY, fix=_REMEDY, class_id="I10",
        )  # fmt: skip


_REMEDY = "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE  # and start it with a launcher, which sets all of them"


def _fits(first: int, ranks: int, world: int, node: int, nodes: int) -> bool:
    """Return whether a node's first rank leaves room for at least one rank on each node before and after it; torchrun counts node by node."""
    before, after = first, world - first - ranks
    return before >= node and after >= nodes - 1 - node and (before == 0 or node > 0) and (after == 0 or node < nodes - 1)  # fmt: skip
