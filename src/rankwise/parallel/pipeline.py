"""Cut a model into stages, one or two on each rank, through which micro-batches flow (GPipe: Huang et al., arXiv:1811.06965)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rankwise.base.errors import RankwiseError, UsageError
from rankwise.parallel.costs import measure_costs
from rankwise.parallel.dtensors import to_local
from rankwise.parallel.materialise import Materialiser
from rankwise.parallel.model_check import check_same_model, find_complaint
from rankwise.parallel.names import find_owner
from rankwise.parallel.partition import balance
from rankwise.parallel.pipeline_batches import ask
from rankwise.parallel.pipeline_engine import Engine, find_kind, find_misfit
from rankwise.parallel.pipeline_layout import Calls, Deal, Layout, deal, find_layout, list_bounds, prune
from rankwise.parallel.pipeline_module import StageModule
from rankwise.parallel.pipeline_plan import Shapes
from rankwise.parallel.pipeline_profile import PipelineProfile, Recorder
from rankwise.parallel.pipeline_stage import Stage
from rankwise.parallel.pipeline_strategy import Pipelined, Ties
from rankwise.parallel.pipeline_trace import find_calls
from rankwise.parallel.plan_trace import read_call
from rankwise.parallel.strategy import move_tensors, share_values
from rankwise.runtime.context import RankContext, current
from rankwise.runtime.mesh import DATA_AXES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rankwise.parallel.blocks import Blocks

    Loss = Callable[[Any, Any], Any] | None


class Pipeline(nn.Module):  # type: ignore[misc]
    """A model of which this rank has some stages; made by ``apply_pipeline``.

    It is the model itself, less what other ranks have: names of parameters are those of the whole model. A call
        computes a forward pass
    over all stages, without gradients, and returns the output on each. Training goes by ``step``, or a Trainer.
    """

    #: For evaluations: ranks whose samples have run out take part with batches of none.
    forward_is_collective = True

    @property
    def engine(self) -> Engine:
        """The stages of this rank."""
        return self.__dict__["_rankwise_engine"]  # type: ignore[no-any-return]

    @property
    def ties(self) -> Ties:
        """The parameters that several stages share."""
        return self.__dict__["_rankwise_ties"]  # type: ignore[no-any-return]

    @property
    def stage_modules(self) -> list[StageModule]:
        """The modules of this rank's stages, which hold its parameters under other names."""
        return [one.submod for one in self.engine.stages]

    @property
    def canonical_names(self) -> dict[str, str]:
        """For each parameter's name the first one that the whole model has for it."""
        return self.ties.canonical

    @property
    def whole_names(self) -> list[str]:
        """The names of the whole model's state."""
        return list(self.ties.whole)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the whole model's state for a checkpoint: tensors on the meta device stand for those of other stages."""
        own = self.state_dict()
        whole: Any = OrderedDict((name, own.get(name, form)) for name, form in self.ties.whole.items())
        whole._metadata = own._metadata  # by which a checkpoint knows a module's
        return whole  # type: ignore[no-any-return]

    def spread_optimizer(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[str]]:
        """Return an optimizer's state by the numbers that the whole model's would have, and its parameters' names, in that order.

        Args:
            optimizer: Of this rank's parameters.

        Collective: every rank.
        """
        return self.ties.spread_optimizer(self, optimizer)

    def compute_in(self, dtype: torch.dtype | None) -> None:
        """Set the dtype in which FSDP lets the stages compute.

        Args:
            dtype: Of the gathered parameters; None: their own.
        """
        self.engine.shapes.compute_in(dtype)
        for stage in self.stage_modules:
            stage.dtype = dtype

    def make_strategy(self, ctx: RankContext | None) -> Pipelined:
        """Return how a Trainer runs it.

        Args:
            ctx: The job; None: that of the stages.
        """
        return Pipelined(self, ctx)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the whole model returns, on every stage.

        Args:
            *args: As for the model.
            **kwargs: As for the model.

        Returns:
            What the model returns.

        Raises:
            UsageError: Gradients are asked for.

        Collective: every rank of the pipeline, with the same inputs.
        """
        if torch.is_grad_enabled() and self.training:
            raise UsageError(
                "a pipeline's forward has no gradients: forward and backward of its micro-batches go together",
                rank=self.engine.ctx.rank,
                hint="loss = pipe.step(batch, loss=...), or a Trainer; to evaluate: pipe.eval() and torch.no_grad()",
            )
        with torch.no_grad():
            return self.engine.infer((args, kwargs))

    def step(self, batch: Any, loss: Callable[[Any, Any], Any] | None = None, *, is_last: bool = True) -> torch.Tensor:
        """Compute the gradients of one step: of the mean loss over the samples of all ranks.

        Args:
            batch: This rank's share, the same on all stages: nested tensors, whose dim 0 are the samples. Any number of
                them.
            loss: Takes the model and a batch; returns the mean loss over its samples, or ``(sum, count)``. None: the
                one that ``apply_pipeline`` was given.
            is_last: False: gradients are added up, and the next step continues with them.

        Returns:
            The loss, a scalar without a gradient: the mean over the samples, or counts, of all ranks; the same on each.

        Raises:
            UsageError: There is no loss function, or the batch can't be cut.
            CollectiveError: The stages have different batches.

        Collective: every rank.
        """
        loss = loss or self.__dict__["_rankwise_loss"]
        if loss is None:
            raise UsageError(
                "pipe.step(batch) without a loss function",
                rank=self.engine.ctx.rank,
                hint="apply_pipeline(..., loss=lambda model, batch: ...), or pipe.step(batch, loss)",
            )
        return Pipelined(self, None).step(batch, loss, is_last=is_last)

    @contextmanager
    def profile(self) -> Iterator[PipelineProfile]:
        """Measure what the stages take in the steps of a ``with`` block, by ``step`` or a Trainer; run a few steps before it.

        Returns:
            Filled at the block's end, the same on all ranks: ``print(profile)`` shows each stage's forward, backward
            and waiting, the bubble beside the schedule's own, and proposals. The last 100 steps count.

        Collective: every rank of the pipeline; each step begins with a barrier, and the block's end gathers.
        """
        engine = self.engine
        blocks = self.__dict__["_rankwise_blocks"]
        profile = PipelineProfile(engine.kind.name, engine.microbatches, engine.column, blocks)
        engine.recorder = recorder = Recorder(engine.ctx.device)
        try:
            yield profile
        finally:
            engine.recorder = None
        profile._take(recorder.gather(engine.group), engine.num_samples)


def apply_pipeline(  # noqa: PLR0913 - most calls give two
    model: nn.Module | Sequence[nn.Module],
    *,
    schedule: str = "1f1b",
    microbatches: int | None = None,
    blocks: Blocks = "auto",
    cut: Sequence[str] | Sequence[int] | None = None,
    example: Any = None,
    stages_per_rank: int | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    init_weights: Callable[[nn.Module], Any] | bool | None = None,
    seed: int = 0,
    ctx: RankContext | None = None,
    wait_s: float | None = None,
) -> Pipeline:
    """Cut a model into stages over the mesh's pipeline axis: each rank keeps its own, and a batch flows through them in micro-batches.

    Any ``nn.Sequential``, list of modules, or model whose forward calls blocks one after the other: what it computes
    around them goes to the first and last stage. All ranks start from rank 0's weights. Weights that stages share
    (embedding and head) stay equal.

    Without a mesh, over all ranks; with ``init(mesh={"pipeline": 2, "replicate": 2})`` each pipeline has a share of the
    data. Call ``apply_tensor_parallel`` before it, ``apply_checkpointing`` and ``apply_fsdp`` after it. Build the
    optimizer last.

    Args:
        model: The whole model, the same on every rank, on any device; or on the meta device. Changed in place: it keeps
            this rank's stages.
        schedule: "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"; or
            torch's name.
        microbatches: Micro-batches of a batch; None: twice the number of stages. A batch with fewer samples has fewer,
            or runs by GPipe.
        blocks: Between which parts it may be cut; as for ``apply_fsdp``. Of a Sequential "auto" are its layers.
        cut: The names of the blocks with which the second and the following stages begin; or how many blocks each has.
            None: by ``example``; without one equally many.
        example: A micro-batch, as ``loss`` takes it (without a loss: what the model is called with): rank 0 measures
            what each block takes, and the stages are cut so that the slowest is as fast as can be.
        stages_per_rank: For the interleaved schedules; None: 2.
        loss: For ``step``: takes the model and a batch, returns the mean loss over its samples or ``(sum, count)``.
        init_weights: As for ``apply_fsdp``.
        seed: As for ``apply_fsdp``.
        ctx: The job; None: the one that ``init()`` joined.
        wait_s: Seconds to wait for the slowest rank to arrive; None: 60, or the job's timeout if that is less.

    Returns:
        The model, as a ``Pipeline``.

    Raises:
        ModelError: The model differs between ranks, or a stage has no parameters; the same error on every rank.
        UsageError: A schedule that doesn't fit the stages or micro-batches, or a mesh without a pipeline.
        CollectiveTimeoutError: A rank did not arrive; names it.

    Collective: every rank.
    """
    ctx = ctx or current()
    if not isinstance(model, nn.Module):
        model = nn.Sequential(*model)
    mesh = ctx.mesh() if ctx.has_mesh else ctx.mesh(pipeline=-1)
    num_ranks = mesh.degrees["pipeline"]
    kind = find_kind(schedule, rank=ctx.rank)
    per_rank = kind.stages_per_rank if stages_per_rank is None else stages_per_rank
    num_stages = num_ranks * per_rank
    microbatches = 2 * num_stages if microbatches is None else microbatches
    _check(ctx, num_ranks, microbatches)
    misfit = find_misfit(kind, microbatches, num_ranks, per_rank)
    if misfit is not None:
        raise UsageError(f"{misfit[0]}", rank=ctx.rank, hint=misfit[1])
    layout, shapes, dealt, bounds = cut_model(
        model, ctx, num_stages, blocks=blocks, cut=cut, example=example, loss=loss
    )
    maker = Materialiser(model, ctx.device, init_weights, seed)
    # One rank's model on the meta device, another's with values: the first one's weights would be sent to a rank that
    # receives none.
    num_meta = sum(one.is_meta for one in (*model.parameters(), *model.buffers()))
    settings = {"schedule": kind.name, "microbatches": microbatches, "bounds": bounds, "seed": seed}
    check_same_model(
        model,
        {**settings, "the number of tensors on the meta device": num_meta},
        ctx=ctx,
        wait_s=wait_s,
        complaint=_find_complaint(model)
        or maker.find_complaint(model)
        or _find_bare(model, dealt, layout.blocks, bounds),
        call="apply_pipeline",
    )
    column = mesh.of("pipeline")
    homes = [kind.place(number, num_ranks) for number in range(num_stages)]
    own = [number for number, home in enumerate(homes) if home == mesh.position["pipeline"]]
    ties = Ties(ctx, mesh, model, dealt, homes)
    axes = [axis for axis in ("pipeline", *DATA_AXES) if mesh.degrees[axis] > 1]
    _share_weights(model, [mesh.of(axis).get_group() for axis in axes], ctx)
    prune(model, layout, dealt, own)
    maker.fill(model.named_modules())
    move_tensors((*model.parameters(), *model.buffers()), ctx.device)
    group = column.get_group()
    modules = [StageModule(model, shapes.model, layout, dealt, number) for number in own]
    for one in modules:
        one.has_halves = kind.has_halves
    stages = [Stage(one, one.number, num_stages, ctx.device, group) for one in modules]
    engine = Engine(ctx, model, kind, stages, shapes, deal=dealt, microbatches=microbatches, group=group)
    model.__class__ = type(f"Pipelined{type(model).__name__}", (Pipeline, type(model)), {})
    names = [layout.blocks[begin:end] for begin, end in pairwise(bounds)]
    kept = {"engine": engine, "ties": ties, "loss": loss, "blocks": names}
    model.__dict__.update({f"_rankwise_{name}": one for name, one in kept.items()})
    return cast("Pipeline", model)


def _check(ctx: RankContext, num_ranks: int, microbatches: Any) -> None:
    if num_ranks < 2:
        raise UsageError(
            "apply_pipeline on a mesh without a pipeline axis: one rank would have all stages",
            rank=ctx.rank,
            hint="init(mesh={'pipeline': 2, ...}), or leave the mesh out: then all ranks form one pipeline",
        )
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise UsageError(f"microbatches={microbatches!r}", rank=ctx.rank, hint="a whole number, 1 or more")


def _find_complaint(model: nn.Module) -> str | None:
    if isinstance(model, Pipeline):
        return "the model was passed to apply_pipeline already"
    if any(isinstance(one, FSDPModule) for one in model.modules()):
        return "the model was passed to fully_shard or apply_fsdp already: cut it into stages first, apply_fsdp(apply_pipeline(model))"
    return find_complaint(model, takes_meta=True, call="apply_pipeline")


def _find_bare(model: nn.Module, dealt: Deal, blocks: Sequence[str], bounds: Sequence[int]) -> str | None:
    """Say which stage has no parameters: it has nothing to train, and no optimizer can be built for it."""
    trained = {name for name, one in model.named_parameters(remove_duplicate=False) if one.requires_grad}
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if not any(number in holders for name, holders in dealt.holders.items() if name in trained):
            return f"stage {number} ({', '.join(blocks[begin:end][:3])}) has no parameters that are trained: cut elsewhere, cut=[...] names the blocks that begin a stage"
    return None


def _share_weights(model: nn.Module, groups: Sequence[dist.ProcessGroup], ctx: RankContext) -> None:
    """Give all ranks the first one's values, a module at a time."""
    for module in model.modules():
        held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        local = [one.detach() for one in to_local(held) if not one.is_meta]
        there = [one.to(ctx.device) for one in local]
        for group in groups:
            share_values(there, group)
        for one, shared in zip(local, there, strict=True):
            if one.device != shared.device:
                one.copy_(shared)


# ---------------- where the stages begin; with an example, by what each block was measured to take


def cut_model(
    model: nn.Module, ctx: RankContext, num_stages: int, *, blocks: Blocks, cut: Any, example: Any, loss: Loss
) -> tuple[Layout, Shapes, Deal, list[int]]:
    """Find where the stages begin, and what each has: by an example, of which rank 0 follows the forward and measures the blocks.

    Raises:
        UsageError: It can't be cut so, followed or measured; the same on every rank.

    Collective: every rank, if there is an example.
    """
    layout = find_layout(model, blocks, least=num_stages, rank=ctx.rank)
    shapes = Shapes(model, layout, ctx.device)
    calls = None
    if example is not None:
        calls = _ask_main(ctx, lambda: _follow(model, shapes, example, loss), "rank 0 follows the forward")
        layout = layout.follow(calls)
    else:
        layout = _follow_own_inputs(model, shapes, layout, ctx.device)
    bounds = list_bounds(layout.blocks, num_stages, cut, rank=ctx.rank)
    if cut is None and example is not None:
        bounds = _ask_main(
            ctx, lambda: _measure(model, layout, num_stages, example, loss), "rank 0 measures the blocks"
        )
    return layout, shapes, deal(model, layout, bounds, calls), bounds


def _ask_main(ctx: RankContext, work: Callable[[], Any], what: str) -> Any:
    """Return what rank 0 has found out, on every rank; or raise its error."""
    word: Any = None
    if ctx.is_main:
        try:
            word = "found", work()
        except RankwiseError as error:
            word = "failed", error.message, error.hint
    kind, *details = ctx.control.exchange(word, what=f"apply_pipeline ({what})")[0]
    if kind == "failed":
        raise UsageError(details[0], rank=0, hint=details[1])
    return details[0]


def _follow(model: nn.Module, shapes: Shapes, example: Any, loss: Loss) -> Calls:
    """Return what the forward of a model calls, in order."""
    args, kwargs = read_call(example) if loss is None else ask(model, example, loss)[0]
    return find_calls(shapes.trace(args, kwargs, training=True)[0])


def _follow_own_inputs(model: nn.Module, shapes: Shapes, layout: Layout, device: torch.device) -> Layout:
    """Return the layout in the order of the model's forward, if it says itself what it may be called with, as those of transformers do."""
    inputs = getattr(model, "dummy_inputs", None)
    if not isinstance(inputs, Mapping) or not all(isinstance(one, torch.Tensor) for one in inputs.values()):
        return layout
    try:
        there = {name: one.to(device) for name, one in inputs.items()}
        return layout.follow(find_calls(shapes.trace((), there, training=True)[0]))
    except Exception:  # noqa: BLE001 - its own inputs may not be those of every model of its kind: nothing is lost
        return layout


def _measure(model: nn.Module, layout: Layout, num_stages: int, example: Any, loss: Loss) -> list[int]:
    """Return with which block each stage begins, and at the end their number; what stands around the blocks counts with the one before it."""

    def take_loss(model: nn.Module, batch: Any) -> Any:
        assert loss is not None  # noqa: S101 - else this is not used
        value = loss(model, batch)
        value = value["loss"] if isinstance(value, dict) else value
        return value[0] if isinstance(value, tuple) else value

    blocks = list(layout.blocks)
    costs = dict.fromkeys(blocks, 0.0)
    for unit in measure_costs(model, example, loss=None if loss is None else take_loss, blocks=blocks):
        around = find_owner(unit.name, layout.around)
        number = 0 if around is None else layout.around[around]
        costs[find_owner(unit.name, costs) or blocks[max(number, 1) - 1]] += unit.time
    return [*balance(list(costs.values()), num_stages), len(blocks)]
