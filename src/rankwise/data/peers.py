"""What the ranks tell each other while they load data: that they mean the same pass, and how many samples each has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from rankwise.base.errors import DataError
from rankwise.runtime.groups import group_of
from rankwise.runtime.signature import agree, locate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.runtime.context import RankContext


@final
class Peers:
    """The ranks that share the data.

    Args:
        ctx: The job; None: there is none, and nobody is asked.
        world_size: Into how many shares the data is dealt out.
        rank: Which of them is this rank's.
    """

    def __init__(self, ctx: RankContext | None, world_size: int, rank: int) -> None:
        self.ctx, self.world_size, self.rank = ctx, world_size, rank

    @property
    def are_reached(self) -> bool:
        """Whether there are others that can be told something."""
        return self.ctx is not None and self.world_size > 1

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Make sure that all ranks hold the same facts about the pass that begins.

        Args:
            facts: What can be written as JSON.

        Raises:
            CollectiveError: They don't; names the first fact that differs, and who holds what.

        Collective: every rank.
        """
        if self.ctx is not None and self.ctx.world_size > 1:
            agree(group_of(self.ctx), "data loader", site=locate(), must=facts)

    def tell(self, own: Any) -> list[Any]:
        """Tell all ranks something small about the next step; costs one small all-reduce if it is the same on all.

        Args:
            own: What can be written as JSON.

        Returns:
            What each has told, by its share of the data.

        Collective: every rank.
        """
        if self.ctx is None or self.world_size == 1:
            return [own]
        group = group_of(self.ctx)
        found = agree(group, "data loader step", site=locate(), must={}, may=own)
        return [own] * self.world_size if found is None else [found[rank] for rank in self.ctx.data_ranks]

    def give(self, value: Any, what: str) -> list[Any]:
        """Give all ranks an object of each share of the data.

        Collective: every rank.
        """
        if self.ctx is None or self.world_size == 1:
            return [value]
        given = self.ctx.control.exchange(value, what=what)
        return [given[rank] for rank in self.ctx.data_ranks]

    def error(self, message: str, hint: str) -> DataError:
        """Return an error of this rank."""
        return DataError(message, rank=self.rank, hint=hint or None)
