"""How much memory a training needs on each rank, computed before it runs, and which way to spread the model fits at the least cost.

    with torch.device("meta"):
        model = build_model()
    print(plan(model, num_ranks=8, memory="80GB", batch=tokens))

Nothing is allocated: the model may lie on the meta device. ``plan_measure`` finds what the model holds, ``plan_compose`` what
of it each rank holds, for each composition of the axes replicate, shard and tensor, for pipelines of stages, and for one process with
several devices; here one of them is chosen.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from rankwise.base.errors import UsageError
from rankwise.parallel.memory import parse_size, show_size
from rankwise.parallel.plan_compose import Composition, Job, compose
from rankwise.parallel.plan_measure import Facts, OptimizerFactory, measure
from rankwise.parallel.plan_trace import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


PRECISIONS = ("fp32", "bf16", "fp16", "bf16-params")
#: What a process holds beside tensors: the CUDA context, NCCL's buffers, the workspaces of cuBLAS: about 1 GiB. And of
#: what the allocator holds, a twentieth lies in pieces that fit nothing.
_RESERVE_BYTES, _RESERVE_PART = 2**30, 0.05
#: No more ranks are tried when none of those asked for fit.
_MOST_RANKS = 2**15


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What ``plan`` has found; ``print`` it.

    Attributes:
        num_parameters: Numbers in the model; ``num_trained``: those with a gradient.
        num_ranks: Ranks, one GPU each.
        memory_bytes: Of a GPU; None if none was given.
        reserve_bytes: What of it is left free.
        blocks: Names of the blocks that FSDP gathers and checkpointing recomputes.
        compositions: From the cheapest to the most expensive; all that were considered. Each has its ``name``, the
            sizes of its axes ``replicate``, ``shard``, ``tensor`` and ``pipeline``, ``schedule`` and ``microbatches``
            of a pipeline, ``devices`` of a placed model, ``shards_optimizer`` (ZeRO-1), ``checkpointing``,
            ``precision``, ``fits``, and ``memory`` with ``parameters``, ``buffers``, ``gradients``, ``optimizer``,
            ``communication``, ``activations`` and their ``total``, in bytes, of the rank that holds most. Of a
            pipeline, and of a placed model, ``parts`` has the same for each stage, or device.
        proposal: The cheapest that fits; None if none does, or no memory was given.
        why: The reason, in one sentence.
        ranks_needed: If none fits: with how many ranks one would; None if with none.
        notes: What was not counted.
    """

    num_parameters: int
    num_trained: int
    num_ranks: int
    memory_bytes: int | None
    reserve_bytes: int
    blocks: tuple[str, ...]
    compositions: tuple[Composition, ...]
    proposal: Composition | None
    why: str
    ranks_needed: int | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return all of it as plain values, with the total of each composition."""
        found = asdict(self)
        for shown, one in zip(found["compositions"], self.compositions, strict=True):
            shown["memory"]["total"] = one.memory.total
            for part, held in zip(shown["parts"], one.parts, strict=True):
                part["total"] = held.total
        chosen = self.proposal
        return found | {"proposal": None if chosen is None else self.compositions.index(chosen)}

    def __str__(self) -> str:
        rows = [
            f"{show_size(one.memory.total):>10}  {one}, {one.precision}"
            + ("" if one.fits is not False else "  (does not fit)")
            for one in self.compositions
        ]
        return "\n".join([*rows, self.why, *self.notes])


def plan(  # noqa: PLR0913 - most calls give four
    model: nn.Module,
    *,
    num_ranks: int,
    memory: str | int | None = "80GB",
    reserve: str | int | None = None,
    optimizer: str | OptimizerFactory = "adamw",
    precision: str | None = None,
    batch: Any = None,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    micro_batch: int | None = None,
    ranks_per_node: int = 8,
    schedule: str = "1f1b",
    microbatches: int | None = None,
) -> Plan:
    """Compute how much memory each rank needs, for each way to spread the model, and propose the cheapest that fits.

    No process group is needed, no GPU, and no memory: build the model under ``with torch.device("meta"):``.

    Cheapest means least communication: DistributedDataParallel, then ZeRO-1 (``ZeroRedundancyOptimizer``; Rajbhandari
        et
    al., arXiv:1910.02054), HSDP and FSDP (``fully_shard``; Zhao et al., arXiv:2304.11277), then the same four with
    activation checkpointing, then tensor parallelism within a node times FSDP; then what lets ranks wait: pipelines
    (``apply_pipeline``), beside copies or FSDP, and one process with several devices (``place``), which work one after
    the other.

    Args:
        model: What is trained, not wrapped; not changed.
        num_ranks: How many ranks, one GPU each.
        memory: Of one GPU: bytes, or a text such as "80GB"; GB means 2**30, as on the boxes of GPUs. None: only count.
        reserve: What of it is to stay free; None: 1 GiB for CUDA and NCCL and a twentieth for fragmentation.
        optimizer: "adamw", "sgd", "momentum", another class of ``torch.optim`` by its name, or what makes an optimizer
            of parameters. Its states are those that one step of it makes.
        precision: "fp32"; "bf16" or "fp16": weights in fp32, computing under autocast, or by FSDP's mixed precision;
            "bf16-params": all in bf16. None: "bf16", and "bf16-params" for what does not fit otherwise.
        batch: What the model is called with: a tensor, a tuple of arguments, or a mapping of them; its values don't
            matter. None: activations are not counted.
        loss: From model and batch to the loss, so that what it keeps is counted, too; the batch is then what it takes.
        micro_batch: Samples in one forward pass of a rank; None: as many as the batch has.
        ranks_per_node: Tensor parallelism stays within them, HSDP shards among them, and one process has no more
            devices.
        schedule: Of pipelines: "1f1b" keeps as many micro-batches in flight as stages follow, "gpipe" all. The others
            keep no more than gpipe.
        microbatches: Of one step of a pipeline, each of ``micro_batch`` samples; None: twice the number of stages, as
            ``apply_pipeline`` has it.

    Returns:
        All compositions with their bytes, the proposal, and why.

    Raises:
        UsageError: An invalid number or word; an optimizer that can't take these parameters.
        ModelError: The model has no parameters, or its forward pass can't be followed without values.
    """
    numbers = {
        "num_ranks": num_ranks,
        "ranks_per_node": ranks_per_node,
        "micro_batch": micro_batch,
        "microbatches": microbatches,
    }
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise UsageError(f"{name}={value} is below 1")
    if schedule not in {"1f1b", "gpipe"}:
        raise UsageError(
            f"schedule={schedule!r} can't be planned", hint="'1f1b' or 'gpipe': the others keep no more than gpipe does"
        )
    if precision is not None and precision not in PRECISIONS:
        raise UsageError(f"there is no precision {precision!r}; there are {', '.join(PRECISIONS)}")
    memory_bytes = None if memory is None else parse_size(memory)
    reserve_bytes = _choose_reserve(memory_bytes, reserve)
    work = Work(batch=batch, loss=loss, micro_batch=micro_batch)
    facts = {
        name: measure(model, precision=name, optimizer=optimizer, work=work)
        for name in ([precision] if precision is not None else _choose_precisions(model))
    }
    limit = None if memory_bytes is None else memory_bytes - reserve_bytes
    job = Job(
        num_ranks=num_ranks, ranks_per_node=ranks_per_node, limit=limit, schedule=schedule, microbatches=microbatches
    )
    found = tuple(compose(facts, job))
    proposal = next((one for one in found if one.fits), None)
    needed = None if limit is None or proposal else _find_ranks_needed(facts, job)
    first = next(iter(facts.values()))
    counts = [(math.prod(one.shape), one.is_trained) for one in first.weights]
    return Plan(
        num_parameters=sum(count for count, _ in counts), num_trained=sum(count for count, is_trained in counts if is_trained),
        num_ranks=num_ranks, memory_bytes=memory_bytes, reserve_bytes=reserve_bytes, blocks=first.blocks, compositions=found, proposal=proposal,
        why=_explain(found, proposal, num_ranks, limit, needed), ranks_needed=needed and needed[0], notes=tuple(_note(first, batch)),
    )  # fmt: skip


def _choose_reserve(memory_bytes: int | None, reserve: str | int | None) -> int:
    if memory_bytes is None:
        return 0
    chosen = (
        _RESERVE_BYTES + int(memory_bytes * _RESERVE_PART)
        if reserve is None
        else 0
        if reserve in {0, "0"}
        else parse_size(reserve)
    )
    if chosen >= memory_bytes:
        raise UsageError(
            f"a reserve of {show_size(chosen)} leaves nothing of a memory of {show_size(memory_bytes)}",
            hint="give a smaller reserve, or a larger memory",
        )
    return chosen


def _choose_precisions(model: nn.Module) -> Sequence[str]:
    """Return those to look at: a model that is built in half precision has no fp32 weights to keep."""
    dtypes = {one.dtype for one in model.parameters() if one.is_floating_point()}
    is_half = bool(dtypes) and dtypes <= {torch.bfloat16, torch.float16}
    return ("bf16-params",) if is_half else ("bf16", "bf16-params")


# ----------------------------------------------------------------- what to take


def _find_ranks_needed(facts: Mapping[str, Facts], job: Job) -> tuple[int, Composition] | None:
    """Return with how many ranks something fits in which none waits, and what: doubled until it does, then in whole nodes."""

    def find(number: int) -> Composition | None:
        fitting = (one for one in compose(facts, replace(job, num_ranks=number)) if one.fits)
        return next((one for one in fitting if one.pipeline == one.devices == 1), None)

    low, high = job.num_ranks, job.num_ranks * 2
    while (found := find(high)) is None:
        low, high = high, high * 2
        if high > _MOST_RANKS:
            return None
    step = job.ranks_per_node if high > job.ranks_per_node else 1
    while high - low > step:
        middle = -(-(low + high) // 2 // step) * step
        if not low < middle < high:
            break
        better = find(middle)
        low, high, found = (low, middle, better) if better else (middle, high, found)
    return high, found


def _explain(
    found: Sequence[Composition],
    proposal: Composition | None,
    num_ranks: int,
    limit: int | None,
    needed: tuple[int, Composition] | None,
) -> str:
    least = min(found, key=lambda one: one.memory.total)
    if limit is None:
        return f"no memory was given to compare with: the least is {_describe_need(least)} per rank, by {least}, {least.precision}"
    where = f"each of {num_ranks} ranks" if num_ranks > 1 else "the GPU"
    free = f"the {show_size(limit)} that are free on {where}"
    if proposal is not None:
        need = f"{_describe_need(proposal)} of {free}{_describe_waiting(proposal)}"
        text = f"{proposal}, {proposal.precision}, needs {need}"
        cheaper = [one for one in found[: found.index(proposal)] if one.precision == proposal.precision]
        if cheaper:
            best = min(cheaper, key=lambda one: one.memory.total)
            what = "what costs less" if len(cheaper) > 1 else "what communicates less"
            return f"{text}; of {what}, {best} comes closest and needs {_describe_need(best)}"
        if found[0].precision != proposal.precision:
            return f"{text}; with weights in fp32 nothing fits, and in bf16 small updates of large weights are lost"
        return f"{text}, and nothing communicates less"
    text = f"nothing fits into {free}: the least, {least}, {least.precision}, needs {_describe_need(least)}"
    if needed is not None:
        return f"{text}; {needed[0]} ranks would do, with {needed[1]}, {needed[1].precision}"
    held = least.memory
    rest = (held.activations or 0) + held.communication
    return f"{text}; more ranks don't help, as {show_size(rest)} of it are activations and gathered parameters, which every rank holds: take a smaller micro-batch"


def _describe_waiting(one: Composition) -> str:
    """Return how much of a step ranks wait, where the composition lets them: of even stages (Huang et al., arXiv:1811.06965)."""
    if one.devices > 1:
        return ", and its devices work one after the other"
    if one.microbatches is None:
        return ""
    return f", and each rank waits {(one.pipeline - 1) / (one.microbatches + one.pipeline - 1):.0%} of a step, while the pipeline fills and drains"


def _describe_need(one: Composition) -> str:
    return show_size(one.memory.total) + (" and its activations" if one.memory.activations is None else "")


def _note(facts: Facts, batch: Any) -> Iterator[str]:
    if batch is None:
        yield "activations are not counted, and tensor parallelism is not considered: no example batch was given"
    elif not facts.tensor_degrees:
        yield "no pairs of nn.Linear layers were found, one reading what the other has written: tensor parallelism is not considered"
    if batch is not None and facts.row is not None and not facts.row.is_traced:
        yield "the blocks are not called once each: pipelines and placement are not considered"
    if not facts.blocks:
        yield "no repeated blocks were found (of one class in a ModuleList or Sequential): FSDP gathers the whole model, and nothing is checkpointed"
