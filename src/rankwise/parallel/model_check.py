"""See that all ranks are about to spread the same model, and name the parameters that differ before torch hangs on them."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from rankwise.base.errors import CollectiveTimeoutError, ModelError
from rankwise.base.memory import view_memory
from rankwise.base.rank_names import name_ranks
from rankwise.parallel.names import quote
from rankwise.parallel.placement_hooks import placement_of
from rankwise.runtime.context import RankContext, current
from rankwise.runtime.signature import locate, show_site

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


#: A rank that does not wrap its model is named after this time, where collectives may take half an hour.
_WAIT_S = 60.0
#: So many differences are spelled out; one is usually the reason of all.
_MOST_NAMED = 4
_SHARD = "["
_ORDER_HINT = (
    "DDP pairs parameters by their order: build the model in the same order on every rank (no sets, no threads)"
)


def check_same_model(
    model: nn.Module,
    settings: Mapping[str, object],
    *,
    ctx: RankContext,
    wait_s: float | None = None,
    complaint: str | None = None,
    call: str = "apply_ddp",
    among: Sequence[int] | None = None,
) -> None:
    """Compare names, shapes, dtypes and ``requires_grad`` of all parameters and buffers over the ranks.

    Values are not compared: all ranks get those of rank 0 afterwards.

    Args:
        model: The model that is about to be wrapped.
        settings: What else must be equal: the options of the wrap.
        ctx: The job.
        wait_s: As for ``apply_ddp``.
        complaint: What this rank has found wrong with its model already: all ranks raise it.
        call: Who asks.
        among: The ranks that must have the same; None: all.

    Raises:
        ModelError: The models or settings differ, or some rank has a complaint; the same error on all ranks.
        CollectiveTimeoutError: A rank did not arrive; names it.
        CollectiveError: A rank called something else.

    Collective: every rank of the job.
    """
    control, settings = ctx.control, {**settings, "device": ctx.device.type}
    shown = {name: str(one) for name, one in sorted(settings.items())}
    text = json.dumps({"complaint": complaint or "", "settings": shown, "tensors": list(_describe(model))})
    try:
        answers = control.compare(
            text,
            what=f"{call} at {show_site(locate())} (do all ranks have the same model?)",
            timeout_s=min(_WAIT_S, ctx.timeout_s) if wait_s is None else wait_s,
        )
    except CollectiveTimeoutError as error:
        more = f"a rank that is only slow gets more time with {call}(..., wait_s=600)"
        hint = f"{error.hint}; {more}" if error.hint else more
        raise CollectiveTimeoutError(error.message, rank=error.rank, hint=hint) from None
    if answers is None:
        if complaint:
            raise ModelError(complaint)
        return
    of_rank = {rank: json.loads(one) for rank, one in zip(control.ranks, answers, strict=True)}
    if among is not None:
        of_rank = {rank: one for rank, one in of_rank.items() if rank in among or one["complaint"]}
        if all(one == next(iter(of_rank.values())) for one in of_rank.values()) and not complaint:
            return
    _raise_difference(of_rank, call)


def _describe(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if name not in ignored:
                yield kind, name, _describe_tensor(tensor)


def _describe_tensor(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "not initialised"
    dtype = str(tensor.dtype).removeprefix("torch.")
    grad = f", requires_grad={tensor.requires_grad}" if isinstance(tensor, nn.Parameter) else ""
    # Torch compares strides as well: a model in channels_last on some ranks only fails inside it.
    is_plain = tensor.layout != torch.strided or tensor.is_contiguous()
    strides = "" if is_plain else f", strides {tuple(tensor.stride())}"
    return f"shape {tuple(tensor.shape)}, {dtype}{grad}{strides}"


def _raise_difference(of_rank: Mapping[int, Mapping[str, Any]], call: str) -> None:
    complaints = {rank: one["complaint"] for rank, one in of_rank.items() if one["complaint"]}
    if complaints:
        holders = _group_ranks(complaints)
        raise ModelError("; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in holders.items()))
    settings = [
        f"{name} is {'; '.join(f'{value} on {name_ranks(who)}' for value, who in held.items())}"
        for name in next(iter(of_rank.values()))["settings"]
        if len(held := _group_ranks({rank: str(one["settings"].get(name)) for rank, one in of_rank.items()})) > 1
    ]
    if settings:
        raise ModelError(
            f"{call} was called with different options: {'. '.join(settings)}",
            hint="give every rank the same options",
        )
    tensors = {rank: {(kind, name): what for kind, name, what in one["tensors"]} for rank, one in of_rank.items()}
    names = list(dict.fromkeys(name for held in tensors.values() for name in held))
    differing = [text for name in names if (text := _describe_difference(name, tensors))]
    if differing:
        more = f"; and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""
        raise ModelError(
            f"the ranks hold different models: {'; '.join(differing[:_MOST_NAMED])}{more}"
            f" ({len(differing)} of {len(names)} parameters and buffers)",
            hint="build the model from the same code and configuration on every rank, and freeze the same parameters",
        )
    first = next(rows for rows in zip(*tensors.values(), strict=True) if len(set(rows)) > 1)
    held = _group_ranks(dict(zip(tensors, (" ".join(name) for name in first), strict=True)))
    message = "; ".join(f"{name_ranks(ranks)}: {name}" for name, ranks in held.items())
    raise ModelError(
        f"the ranks hold the same parameters in a different order: the first that differ are {message}",
        hint=_ORDER_HINT,
    )


def _describe_difference(key: tuple[str, str], tensors: Mapping[int, Mapping[tuple[str, str], str]]) -> str | None:
    kind, name = key
    held = _group_ranks({rank: mine.get(key, "") for rank, mine in tensors.items()})
    if len(held) == 1:
        return None
    without = held.pop("", None)
    if without and len(held) == 1:
        what, ranks = next(iter(held.items()))
        return (
            f"{name_ranks(without)} {_has(without)} no {kind} {name!r} ({what}); {name_ranks(ranks)} {_has(ranks)} it"
        )
    text = "; ".join(f"{what} on {name_ranks(ranks)}" for what, ranks in held.items())
    return f"{kind} {name!r}: {text}" + (f"; absent on {name_ranks(without)}" if without else "")


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _group_ranks(of_rank: Mapping[int, str]) -> dict[str, list[int]]:
    held: dict[str, list[int]] = {}
    for rank, text in of_rank.items():
        held.setdefault(text, []).append(rank)
    return held


def find_complaint(model: nn.Module, *, takes_meta: bool = False, call: str = "apply_ddp") -> str | None:
    """Say in one sentence what keeps a model from being spread and trained, and what to do; None if nothing does."""
    if (complaint := find_unusable(model, takes_meta=takes_meta, call=call)) is not None:
        return complaint
    if not any(parameter.requires_grad for parameter in model.parameters()):
        number = sum(1 for _ in model.parameters())
        frozen = f"all {number} parameters are frozen (requires_grad=False)"
        what = frozen if number else "the model has no parameters"
        return f"{what}, so there is nothing to average: use it without {call}, or unfreeze what is to be trained first"
    return _find_spread(model, call)


def find_unusable(model: nn.Module, *, takes_meta: bool = False, call: str) -> str | None:
    """Say whether a model is wrapped already or has tensors without values, other than those on the meta device that get theirs afterwards."""
    wrapped = [name for name, module in model.named_modules() if isinstance(module, DistributedDataParallel)]
    if wrapped:
        where = "the model" if wrapped[0] == "" else f"its part {wrapped[0]!r}"
        return f"{where} is wrapped in DistributedDataParallel already: pass what is inside, `ddp.module`"
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        return f"{_quote_be(lazy)} not initialised yet: run one forward on every rank before {call}"
    meta = [name for name, tensor in tensors if tensor.is_meta and not takes_meta]
    if meta:
        return f"{_quote_be(meta)} on the meta device, without values: load the weights, or call `model.to_empty(device=...)`, before {call}"
    return None


def _find_spread(model: nn.Module, call: str) -> str | None:
    if placement_of(model) is not None:
        if call == "apply_ddp":
            return None
        return f"the model was placed on its devices by place(), and {call} would move it: leave one of the two out"
    devices = sorted({str(one.device) for one in (*model.parameters(), *model.buffers())} - {"cpu", "meta"})
    if len(devices) > 1:
        return f"the model is spread over {', '.join(devices)}, and {call} would move it to one: build it on one device"
    return None


def _quote_be(names: Sequence[str]) -> str:
    return f"{quote(names, _MOST_NAMED)} {'is' if len(names) == 1 else 'are'}"


def _name_shard(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Return this rank's part of a tensor, and a name that only ranks with the same part have."""
    if not isinstance(tensor, DTensor):
        return name, tensor
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    place = ",".join(f"{at}:{at + size}" for at, size in zip(offset, shape, strict=True))
    return f"{name}{_SHARD}{place}]", tensor.to_local()


def hash_tensor(tensor: Tensor) -> str:
    """Return a digest of a tensor's bits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # Not by numpy(): torch may be installed without NumPy.
    size_bytes = flat.numel() * flat.element_size()
    return hashlib.blake2b(view_memory(flat.data_ptr(), size_bytes), digest_size=8).hexdigest()


def check_replicas(
    model: nn.Module, *, ctx: RankContext | None = None, buffers: bool = False, timeout_s: float | None = None
) -> None:
    """Check that ranks hold the same weights, to the bit, where they must; once an epoch, or after loading a checkpoint.

    DDP shares the weights of rank 0 once, when it wraps. What is loaded afterwards on one rank only, trained through
    ``ddp.module``, or unfrozen after the wrap silently diverges. Of a sharded model, ranks are compared that hold the
    same shard.

    Args:
        model: The model, wrapped or not.
        ctx: The job; None: the one that ``init()`` joined.
        buffers: Whether buffers must be equal too. Those of a BatchNorm that is not synced are not, by design.
        timeout_s: Seconds to wait for the slowest rank; None: as long as collectives may take.

    Raises:
        ModelError: They differ; names the parameters and which ranks agree. The same error on all ranks.
        CollectiveError: A rank called something else.
        CollectiveTimeoutError: A rank did not arrive; names it.

    Collective: every rank of the job.
    """
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    held = (*inner.named_parameters(), *(inner.named_buffers() if buffers else ()))
    digests = {name: hash_tensor(one) for name, one in (_name_shard(*pair) for pair in held)}
    control = (ctx or current()).control
    what = f"check_replicas at {show_site(locate())}"
    answers = control.compare(json.dumps(digests), what=what, timeout_s=timeout_s)
    if answers is None:
        return
    of_rank: dict[int, dict[str, str]] = dict(zip(control.ranks, map(json.loads, answers), strict=True))
    has_stages = hasattr(inner, "stage_modules")  # each rank of a pipeline has some
    names_of = {frozenset(name.partition(_SHARD)[0] for name in own) for own in of_rank.values()}
    if len(names_of) > 1 and not has_stages:
        raise ModelError(
            "the ranks hold different parameters",
            hint="spread the model with apply_ddp or similar: it names them",
        )
    everything = dict.fromkeys(name for own in of_rank.values() for name in own)
    names = [name for name in everything if len({one[name] for one in of_rank.values() if name in one}) > 1]
    if not names:
        return
    groups = _group_ranks({rank: own[names[0]] for rank, own in of_rank.items() if names[0] in own})
    alike = "; ".join(name_ranks(ranks) for ranks in groups.values())
    raise ModelError(
        f"the values of {len(names)} of {len(everything)} {'parameters and buffers' if buffers else 'parameters'} differ between ranks: {', '.join(map(repr, names[:_MOST_NAMED]))}"
        f" (equal among themselves, of {names[0]!r}: {alike})",
        hint="load checkpoints on every rank or before apply_ddp; call the wrapped model, not ddp.module, in training",
    )
