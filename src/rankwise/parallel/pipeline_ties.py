"""What the stages of a pipeline know of the whole model: names, and the parameters that several of them have."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from rankwise.base.errors import UsageError
from rankwise.parallel.dtensors import share_states, to_local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

    from rankwise.parallel.pipeline_layout import Deal
    from rankwise.runtime.context import RankContext
    from rankwise.runtime.mesh import Mesh


@final
@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter of several stages: all of its names, of which the first counts, and which ranks of the pipeline have it."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None


@final
class Ties:
    """The whole model's names, and the parameters that stages share.

    Collective: every rank.
    """

    def __init__(
        self, ctx: RankContext, mesh: Mesh, model: nn.Module, deal: Deal, place: Callable[[int], int],
    ) -> None:  # fmt: skip
        self._ctx = ctx
        names: dict[int, list[str]] = {}
        for name, one in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(one), []).append(name)
        #: For each name of a parameter the first one that the whole model has for it.
        self.canonical = {name: of_one[0] for of_one in names.values() for name in of_one}
        #: The whole model's state, without values, in its order.
        self.whole: dict[str, Any] = {
            name: torch.empty(one.shape, dtype=one.dtype, device="meta")
            if isinstance(one, torch.Tensor)
            else one
            for name, one in model.state_dict().items()
        }
        self._ties: list[Tie] = []
        self._position = mesh.position["pipeline"]
        columns = mesh.device_mesh.mesh.reshape(mesh.degrees["pipeline"], -1).T.tolist()
        for of_one in names.values():
            ranks = tuple(sorted({place(stage) for stage in deal.holders[of_one[0]]}))
            if len(ranks) > 1:
                self._ties.append(Tie(tuple(of_one), ranks, _make_group(ctx, columns, ranks)))

    def list_held(self, model: nn.Module) -> Iterator[tuple[Tie, Tensor]]:
        """Yield the ties that this rank has a part in, and its own parameter of each."""
        own = dict(model.named_parameters(remove_duplicate=False))
        for tie in self._ties:
            if self._position in tie.ranks:
                yield tie, next(own[name] for name in tie.names if name in own)

    def add_up(self, model: nn.Module) -> None:
        """Give each stage that has a shared parameter the gradient of all of them.

        Collective: every rank of the pipeline.
        """
        for tie, one in self.list_held(model):
            if one.requires_grad:
                if one.grad is None:
                    one.grad = torch.zeros_like(one)
                dist.all_reduce(to_local([one.grad])[0], group=tie.group)

    def spread_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the state that an optimizer of the whole model would have, with stand-ins; and the names of its parameters.

        Raises:
            UsageError: The ranks' optimizers have other groups.

        Collective: every rank.
        """
        names = {id(one): self.canonical[name] for name, one in model.named_parameters()}
        own = optimizer.state_dict()
        groups = [[names.get(id(one), "") for one in group["params"]] for group in optimizer.param_groups]
        flat = [name for group in groups for name in group]
        states = {flat[number]: state for number, state in own["state"].items()}
        held, groups_of = share_states(
            states, groups, self._ctx.control, what="taking apart the optimizer of a pipeline"
        )
        if len(set(map(len, groups_of))) > 1 or "" in flat:
            raise UsageError(
                f"the optimizers of a pipeline's ranks have {list(map(len, groups_of))} groups of parameters, or parameters that are not the model's",
                rank=self._ctx.rank,
                hint="build the same groups on every rank, empty where a stage has no such parameters",
            )
        order = {name: number for number, name in enumerate(self.canonical)}
        whole = [sorted({name for one in groups_of for name in one[place]}, key=order.__getitem__) for place in range(len(groups))]  # fmt: skip
        listed = [name for group in whole for name in group]
        state = {number: held[name] for number, name in enumerate(listed) if name in held}
        numbers = iter(range(len(listed)))
        param_groups = [
            {**group, "params": [next(numbers) for _ in names]}
            for group, names in zip(own["param_groups"], whole, strict=True)
        ]
        return {"state": state, "param_groups": param_groups}, listed

    def list_copies(self, model: nn.Module) -> set[int]:
        """Return the ids of this rank's parameters that another stage counts."""
        return {id(one) for tie, one in self.list_held(model) if tie.ranks[0] != self._position}


def _make_group(ctx: RankContext, columns: Sequence[Sequence[int]], ranks: Sequence[int]) -> dist.ProcessGroup | None:  # fmt: skip
    own = None
    for column in columns:
        members = [column[one] for one in ranks]
        made = dist.new_group(members, timeout=timedelta(seconds=ctx.timeout_s))
        own = made if ctx.rank in members else own
    return own
