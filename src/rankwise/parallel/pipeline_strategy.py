"""The strategy of pipelines: each rank has some stages, forward and backward of a batch are one, and some parameters are those of several stages."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.fsdp import FSDPModule

from rankwise.base.errors import UsageError
from rankwise.parallel.dtensors import add_up, group_by_layout, share_states, to_local, to_meta, total_norm
from rankwise.parallel.pipeline_batches import has_count
from rankwise.parallel.strategy import StepLoss, Strategy, deal, share_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rankwise.parallel.pipeline_layout import Deal
    from rankwise.runtime.context import RankContext
    from rankwise.runtime.mesh import Mesh


@final
class Pipelined(Strategy):
    """A model of ``apply_pipeline``; a micro-batch of the loop is cut again, into those of the pipeline."""

    needs_equal_numbers, why_equal = True, "a pipeline"
    instead_of_loops = "pipe.step(batch), with is_last=False for all but the last batch of a step; or a Trainer"

    def __init__(self, model: Any, ctx: RankContext | None) -> None:
        super().__init__(model, ctx or model.engine.ctx)
        self._engine, self._ties = model.engine, model.ties

    @property
    def _axes(self) -> list[dist.ProcessGroup]:
        """The groups over which gradients are added up, and copies are the same."""
        mesh = self._engine.ctx.mesh()
        names = [axis for axis in ("replicate", "shard") if mesh.degrees[axis] > 1]
        return [mesh.of(name).get_group() for name in names]

    @property
    def _is_sharded(self) -> bool:
        return any(isinstance(one.submod, FSDPModule) for one in self._engine.stages)

    def forward_backward(
        self,
        group: Iterable[Any],
        loss: StepLoss,
        backward: Callable[[Tensor], None],  # noqa: ARG002 - the schedule differentiates
    ) -> None:
        """Run each micro-batch through the stages, then add up what stages and copies share.

        Collective: every rank.
        """
        for batch in deal(self, group, self.ctx):
            loss.note(self._engine.run(batch, loss.evaluate, loss.factor))
        self._finish(1.0 if self._is_sharded else 1 / self._engine.ctx.data_size)

    def step(self, batch: Any, loss: Callable[[Any, Any], Any], *, is_last: bool) -> Tensor:
        """Compute one step of a loop by hand; see ``Pipeline.step``.

        Collective: every rank.
        """
        engine = self._engine
        if engine.counted and not self._has_gradients():
            engine.counted.clear()  # of a step that was dropped: zero_grad() before its last batch
        # Where the mean is over this batch alone, its gradients are right as they are. Else they are those of sums, and
        # what they are to be divided by is known when the losses are.
        is_alone = is_last and not engine.counted and not self._axes

        def factor(value: Any) -> float:
            return 1.0 if is_alone or has_count(value) else float(engine.num_samples)

        returned = engine.run(batch, loss, factor)
        value = returned["loss"] if isinstance(returned, dict) else returned
        if is_alone and not has_count(returned):
            self._finish(1.0)
            return value.double()
        total, count = value if isinstance(value, tuple) else (value * engine.num_samples, engine.num_samples)
        found = torch.zeros(2, dtype=torch.float64, device=engine.ctx.device)
        found[0], found[1] = total, count
        for axis in self._axes:
            dist.all_reduce(found, group=axis)
        engine.counted.append(found[1])
        if is_last:
            counted = torch.stack(engine.counted).sum().clamp(min=_TINY)
            engine.counted.clear()
            self._finish((engine.ctx.data_size if self._is_sharded else 1) / counted)
        return found[0] / found[1].clamp(min=_TINY)

    def _has_gradients(self) -> bool:
        """Whether any stage has gradients: one whose parameters are frozen never has any.

        Collective: every rank of the pipeline; all have counted the same batches.
        """
        has = torch.zeros((), dtype=torch.int32, device=self._engine.ctx.device)
        has += any(one.grad is not None for one in self.model.parameters())
        dist.all_reduce(has, dist.ReduceOp.MAX, group=self._engine.group)
        return bool(has)

    def _finish(self, factor: float | Tensor) -> None:
        """Add up the gradients of shared parameters and of copies, and scale all.

        Args:
            factor: For gradients that FSDP has averaged over the ranks; else for their sum over them.
        """
        self._ties.add_up(self.model)
        copies = [] if self._is_sharded else self._axes
        if copies:
            self._fill_up(copies)
        gradients = []
        for one in self.model.parameters():
            if one.grad is not None:
                one.grad = add_up(one.grad)
                gradients.append(one.grad)
        for same in group_by_layout(to_local(gradients)):
            if copies:
                flat = _flatten_dense_tensors(same)
                for axis in copies:
                    dist.all_reduce(flat, group=axis)
                torch._foreach_copy_(same, _unflatten_dense_tensors(flat, same))
            if not isinstance(factor, float):
                torch._foreach_mul_(same, factor.to(same[0].dtype))
            elif factor != 1.0:
                torch._foreach_mul_(same, factor)

    def _fill_up(self, copies: Sequence[dist.ProcessGroup]) -> None:
        """Give zeros to what has a gradient on another copy only; what has none on any is not trained in this step, as in one process."""
        trained = [one for one in self.model.parameters() if one.requires_grad]
        has = torch.tensor([one.grad is not None for one in trained], dtype=torch.int32, device=self._engine.ctx.device)
        for axis in copies:
            dist.all_reduce(has, dist.ReduceOp.MAX, group=axis)
        for one, is_anywhere in zip(trained, has.tolist(), strict=True):
            if is_anywhere and one.grad is None:
                one.grad = torch.zeros_like(one)

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of the gradients of all stages; what several have is counted once.

        Collective: every rank.
        """
        copies = self._ties.list_copies(self.model)
        doubled = {id(one.grad) for one in self.model.parameters() if id(one) in copies}
        own = [one for one in gradients if id(one) not in doubled]
        norm = total_norm(own) if own else torch.zeros((), device=self._engine.ctx.device)
        square = norm.double().square()
        dist.all_reduce(square, group=self._engine.group)
        return square.sqrt().to(norm.dtype)

    def share_buffers(self) -> None:
        """Give all copies of a stage the buffers of the first."""
        for axis in self._axes:
            share_values(self.model.buffers(), axis)

    def forget(self) -> None:
        """Forget a step that was left by an error."""
        self._engine.counted.clear()


_TINY = torch.finfo(torch.float64).tiny


# ------------------------------------------------------------------ what stages share


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
        self,
        ctx: RankContext,
        mesh: Mesh,
        model: nn.Module,
        deal: Deal,
        homes: Sequence[int],
    ) -> None:
        self._ctx = ctx
        #: For each name of a parameter the first one that the whole model has for it.
        self.canonical = {name: names[0] for name, names in deal.names.items()}
        #: The whole model's state, without values, in its order.
        self.whole: dict[str, Any] = {name: to_meta(one) for name, one in model.state_dict().items()}
        self._ties: list[Tie] = []
        self._position = mesh.position["pipeline"]
        columns = mesh.device_mesh.mesh.reshape(mesh.degrees["pipeline"], -1).T.tolist()
        for names in dict.fromkeys(deal.names.values()):
            ranks = tuple(sorted({homes[stage] for stage in deal.holders[names[0]]}))
            if len(ranks) > 1:
                self._ties.append(Tie(names, ranks, _make_group(ctx, columns, ranks)))

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

    def spread_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[str]]:
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
        what = "taking apart the optimizer of a pipeline"
        held, groups_of = share_states(states, groups, self._ctx.control, what=what)
        if len(set(map(len, groups_of))) > 1 or "" in flat:
            raise UsageError(
                f"the optimizers of a pipeline's ranks have {list(map(len, groups_of))} groups of parameters, or parameters that are not the model's",
                rank=self._ctx.rank,
                hint="build the same groups on every rank, empty where a stage has no such parameters",
            )
        order = {name: number for number, name in enumerate(self.canonical)}
        whole = [
            sorted({name for one in groups_of for name in one[place]}, key=order.__getitem__)
            for place in range(len(groups))
        ]
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


def _make_group(ctx: RankContext, columns: Sequence[Sequence[int]], ranks: Sequence[int]) -> dist.ProcessGroup | None:
    own = None
    for column in columns:
        members = [column[one] for one in ranks]
        made = dist.new_group(members, timeout=timedelta(seconds=ctx.timeout_s))
        own = made if ctx.rank in members else own
    return own
