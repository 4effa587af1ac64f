"""Split the layers of a model over ranks that work on the same samples (tensor parallelism; Shoeybi et al., arXiv:1909.08053)."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rankwise.base.errors import ModelError, UsageError
from rankwise.base.log import get_logger
from rankwise.parallel.dtensors import add_up, noting_replaced
from rankwise.parallel.model_check import check_same_model
from rankwise.parallel.strategy import share_values
from rankwise.parallel.tensor_checks import Heads, check_model, check_splits, find_heads, find_shared, leave_whole
from rankwise.parallel.tensor_experts import ExpertsParallel
from rankwise.parallel.tensor_plans import (
    Split,
    adapt,
    find_ready_plan,
    read_transformers_plan,
    resolve_plan,
)
from rankwise.parallel.tensor_sequence import SEQUENCE_DIM, SequenceLayout, install_sequence, plan_sequence
from rankwise.runtime.context import RankContext, current

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh


_LOGGER = get_logger(__name__)
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What is to be done to a model, all of it checked."""

    splits: list[Split]
    whole: dict[str, str]
    heads: list[Heads]
    sequence: SequenceLayout | None


def apply_tensor_parallel(
    model: nn.Module,
    plan: Mapping[str, ParallelStyle | str] | None = None,
    *,
    sequence_parallel: bool = False,
    ctx: RankContext | None = None,
) -> nn.Module:
    """Split the layers of a model over the ranks of the mesh axis "tensor", each of which sees the same samples.

    All ranks start from the weights of the axis' first rank. Build the optimizer afterwards: split parameters become
    DTensors. Everything that the plan does not name is not split, and has the same gradient on every rank, as long as
    the ranks of the axis draw the same random numbers: with dropout, create the mesh first, and ``ctx.seed(seed)``
        seeds
    them alike.

    A plan maps patterns of module names (``*`` is one part of a name, ``**`` any number of them) to styles of
    ``torch.distributed.tensor.parallel``, or to their names:

    - "colwise": each rank has some of the outputs (of heads, of hidden units); a "rowwise" layer must follow.

    - "rowwise": each rank has some of the inputs, and the results are summed.

    - "colwise_gather": as "colwise", and every rank gets all outputs: a head, or a fused projection of attention.

    - "rowwise_split": as "rowwise", from an input that is not split.

    - "rowwise_embed": each rank has some of the rows of an ``nn.Embedding``.

    - "experts": each rank has some of the experts of a mixture, a module as transformers 5 has them: parameters whose
      first dim counts ``num_experts``, and ``forward(hidden_states, top_k_index, top_k_weights)``.

    - "sequence": with ``sequence_parallel``, not split, on a part of the sequence; norms get it automatically.

    - "replicate": not split, and the same work on every rank; only states that this is intended.

    - "replicate_sum": not split, and gradients are summed over the ranks: a norm that each rank applies to its own
      heads.

    For torch's ``loss_parallel``, which leaves the logits split over the vocabulary, give the head torch's style
    itself: ``ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)``.

    transformers' words ("colwise_rep", "embedding_rowwise", "replicated_with_grad_allreduce" ...) are understood too. Of
    transformers' own plan for a model, a part with a style that is not known here stays whole on every rank, and a
    warning names it.

    Attention is split by heads. Its module may count them in ``num_heads``, ``num_attention_heads``, ``n_head``,
    ``n_heads``, ``num_key_value_heads``, ``n_kv_heads`` and the like, or ``all_head_size`` and ``inner_dim``
    (``tensor_checks.py`` has the list): these attributes are divided by the number of ranks, so that
    ``view(B, S, self.num_heads, self.head_dim)`` fits what a rank holds, as ``view(B, S, -1, self.head_dim)`` does.
    A forward that computes with the model's whole width in between (``C // self.n_head`` with C of its input, or
    ``view(B, S, C)`` before the output projection) fails at that line, with a hint: use -1.
    transformers' Llama, Qwen, Gemma, Phi-3, BERT, DistilBERT, OPT, CLIP and ViT work as they are, and so do GPT-2
    (transformers' and nanoGPT's) and timm's
    ViT: their fused query-key-value layer is split, and its outputs are gathered, so that each rank computes all heads
        of attention.

    Args:
        model: On the CPU or on the rank's device; changed in place.
        plan: Which modules are split how; None: transformers' own plan for the model, or one by the names of layers
            (Llama, GPT-2, BERT, ViT, DistilBERT). In a ready plan, a vocabulary that can't be split
            evenly is not split.
        sequence_parallel: Between the first and the last block, split activations, shape (batch, sequence, features),
            along the sequence where layers are not split.
        ctx: The job; None: the one that ``init()`` joined.

    Returns:
        The same model; with one rank on the axis unchanged but for its device.

    Raises:
        UsageError: The plan does not suit the model, sizes or heads can't be divided, or there is no ready plan; names
            modules and numbers. Or the model has dropout, and the ranks' random numbers differ. The same error on every
            rank, and nothing is changed.
        ModelError: The model differs between ranks, is wrapped or split already, or has no values.
        CollectiveTimeoutError: A rank did not arrive; names it.

    Collective: every rank of the job, for the same models in the same order.
    """
    ctx = ctx or current()
    mesh = (ctx.mesh() if ctx.has_mesh else ctx.mesh(tensor=-1)).of("tensor")
    work, refusal = None, None
    try:
        work = _plan(model, plan, mesh.size(), sequence_parallel=sequence_parallel)
    except (UsageError, ModelError) as error:
        refusal = error
    settings = {
        "plan": None if plan is None else {str(name): str(style) for name, style in plan.items()},
        "sequence_parallel": sequence_parallel,
        "ranks on the axis 'tensor'": mesh.size(),
    }
    try:
        check_same_model(
            model,
            settings,
            ctx=ctx,
            complaint=None if refusal is None else refusal.message,
            call="apply_tensor_parallel",
        )
    except ModelError as raised:
        # The same on all ranks: then it is the error that each of them has, with its type and its hint.
        if refusal is not None and raised.message == refusal.message:
            raise refusal from None
        raise
    if mesh.size() > 1:
        _check_random_state(model, mesh, ctx.device)
    model.to(ctx.device)
    if work is not None and mesh.size() > 1:
        share_values([*model.parameters(), *model.buffers()], mesh.get_group())
        with noting_replaced(model):
            _split(model, work, mesh)
        if work.whole and ctx.is_main:
            parts = "".join(f"\n  {name}: {reason}" for name, reason in work.whole.items())
            _LOGGER.warning(f"parts of the model that each rank holds and computes as a whole:{parts}")
    return model


# ---------------------------------------------------------------- before anything is changed


def _plan(model: nn.Module, plan: Mapping[str, Any] | None, degree: int, *, sequence_parallel: bool) -> _Work:
    check_model(model)
    own, whole = read_transformers_plan(model, degree) if plan is None else ({}, {})
    splits = resolve_plan(model, find_ready_plan(model, degree) if plan is None else plan)
    if plan is None:
        splits, beside = leave_whole(model, splits)
        whole |= beside
    check_splits(model, splits, degree, trusts_fused=bool(own))
    heads = find_heads(model, splits, degree)
    named = next((split.name for split in splits if split.word == "sequence" and split.style is None), None)
    if named is not None and not sequence_parallel:
        raise UsageError(
            f"the plan gives {named!r} the style 'sequence', but activations are not split along the sequence",
            hint="sequence_parallel=True splits them",
        )
    sequence = plan_sequence(model, splits) if sequence_parallel else None
    return _Work(splits=splits, whole=whole, heads=heads, sequence=sequence)


def _check_random_state(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Refuse dropout by other random numbers on each rank: what is whole would drift apart without a word."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    digest = hashlib.blake2b(bytes(torch.cat(states).tolist()), digest_size=7).digest()
    own = torch.tensor([int.from_bytes(digest, "big")], device=device)
    of_ranks = [torch.empty_like(own) for _ in range(mesh.size())]
    dist.all_gather(of_ranks, own, group=mesh.get_group())
    dropping = [name for name, one in model.named_modules() if isinstance(one, _DROPOUT) and one.p > 0]
    if dropping and len({int(state) for state in of_ranks}) > 1:
        raise UsageError(
            f"the model has dropout ({dropping[0]!r}), and the ranks on the axis 'tensor' would draw different random numbers: what they share would diverge",
            hint="seed them alike before: create the mesh first, init(mesh={'tensor': ...}), and call ctx.seed(seed)",
        )


# ---------------------------------------------------------------------------- the change itself


def _split(model: nn.Module, work: _Work, mesh: DeviceMesh) -> None:
    shared = find_shared(model)
    layout = work.sequence
    for split in [*work.splits, *(layout.norms if layout else ())]:
        if split.word == "replicate_sum":
            _sum_gradients(split.module, mesh)
        style = adapt(split.style or _build_style(split, work), split.module)
        if style is None:
            continue
        _parallelize(split.module, mesh, style)
    for (_, first, first_own), *others in shared:
        for _, module, own in others:
            module.register_parameter(own, getattr(first, first_own))
    for heads in work.heads:
        for name, number in heads.counts.items():
            setattr(heads.module, name, number // mesh.size())
        explain = partial(_explain_reshape, heads.name, mesh.size())
        heads.module.register_forward_hook(explain, always_call=True)
    if layout is not None:
        install_sequence(layout, mesh)


def _build_style(split: Split, work: _Work) -> ParallelStyle | None:
    layout, word, part = work.sequence, split.word, Shard(SEQUENCE_DIM)
    if word == "sequence":
        return SequenceParallel(sequence_dim=SEQUENCE_DIM, use_local_output=True)
    if word == "colwise":
        is_flat = layout is not None and id(split.module) in layout.flat
        return ColwiseParallel(input_layouts=part if is_flat else Replicate())
    if word == "experts":
        return ExpertsParallel()
    if word == "colwise_gather":
        return ColwiseParallel(output_layouts=Replicate())
    if word.startswith("rowwise"):
        is_inside = layout is not None and id(split.module) in layout.inside
        is_split = word == "rowwise" and not isinstance(split.module, nn.Embedding)
        return RowwiseParallel(
            input_layouts=Shard(-1) if is_split else Replicate(),
            output_layouts=part if is_inside else Replicate(),
        )
    return None


def _parallelize(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    # All ranks hold the same values by now: each cuts its own share, and nothing is sent.
    parallelize_module(module, mesh, style, src_data_rank=None)
    for name, parameter in module.named_parameters():
        # What is frozen now may be trained later, and takes no hook as it is.
        if parameter.is_floating_point():
            parameter.requires_grad_().register_post_accumulate_grad_hook(_settle)
        parameter.requires_grad_(trained[name])  # SequenceParallel forgets it
    module.register_forward_hook(_let_change)


def _let_change(_: nn.Module, __: Any, output: Any) -> Any:
    return output if isinstance(output, DTensor) or not isinstance(output, torch.Tensor) else _Changeable.apply(output)


@final
class _Changeable(torch.autograd.Function):  # type: ignore[misc]
    """The same tensor, that may be changed in place (``y = self.down(x); y += residual``): what DTensor gives is a view, which autograd refuses."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _settle(parameter: torch.Tensor) -> None:
    """Add up the parts of a gradient that each rank has of its part of the sequence.

    DTensor would let the optimizer do that. But on torch 2.8 ``mul_``, which an optimizer with momentum calls, counts
    each part as the whole, and on 2.11 torch's functions on lists still do.
    """
    if parameter.grad is not None:
        parameter.grad = add_up(parameter.grad)


def _sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    for parameter in filter(torch.is_floating_point, module.parameters()):
        is_trained = parameter.requires_grad
        parameter.requires_grad_().register_hook(partial(_sum_over, mesh))
        parameter.requires_grad_(is_trained)  # what is frozen now may be trained later


def _sum_over(mesh: DeviceMesh, gradient: torch.Tensor) -> torch.Tensor:
    total = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=mesh.get_group())
    return total


def _explain_reshape(name: str, degree: int, module: nn.Module, *_: Any) -> None:
    """Add to torch's error what it can't know: this rank holds a part of the heads."""
    error = sys.exc_info()[1]
    if isinstance(error, RuntimeError) and "is invalid for input of size" in str(error):
        error.args = (
            f"{error}\n[rankwise] {name!r} ({type(module).__name__}) is split over {degree} ranks: its projections output 1/{degree} of the heads,"
            " so its forward must reshape by view(B, S, -1, head_dim), and by view(B, S, -1) before the output projection",
        )
