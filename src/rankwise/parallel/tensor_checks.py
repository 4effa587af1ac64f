"""What keeps a model from being split as planned: sizes, numbers of heads, shared weights; found before anything is changed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from torch import nn
from torch.distributed.tensor import DTensor

from rankwise.base.errors import ModelError, UsageError
from rankwise.parallel.model_check import find_unusable
from rankwise.parallel.tensor_experts import count_experts
from rankwise.parallel.tensor_plans import (
    Split,
    count_features,
    find_embedding_trouble,
    is_conv1d,
    is_fused,
    refuse_fused,
    shorten,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: Attributes of an attention module that count its heads: those of the queries first, then those of keys and values.
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_query_heads", "n_local_heads", "nhead")
KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_local_kv_heads")
#: How wide one head is.
HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size", "d_head", "dim_head", "d_kv")
#: Heads times width, where it is the width of the projections.
PROJECTION_WIDTHS = ("all_head_size", "inner_dim")

_PROJECTION = re.compile(r"^(to_)?w?(q|k|v|query|key|value)(_?(proj|lin|layer|linear))?$")
_KEY_OR_VALUE = re.compile(r"^(to_)?w?(k|v|key|value)(_?(proj|lin|layer|linear))?$")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """An attention module whose heads are dealt out to the ranks, and the attributes that must be divided by the degree, with what they hold now."""

    name: str
    module: nn.Module
    counts: Mapping[str, int]


def check_model(model: nn.Module) -> None:
    """See that a model can be split at all."""
    complaint = find_unusable(model, call="apply_tensor_parallel")
    if complaint is not None:
        raise ModelError(complaint)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, DTensor):
            raise ModelError(
                f"{name!r} is a DTensor already, on the mesh {tensor.device_mesh}: the model has been split or sharded before",
                hint="call apply_tensor_parallel once, before FSDP",
            )


def check_splits(model: nn.Module, splits: Sequence[Split], degree: int, *, trusts_fused: bool = False) -> None:
    """See that each module can be split as planned."""
    for split in splits:
        if split.word == "colwise" and is_fused(split.name, split.module) and not trusts_fused:
            raise refuse_fused(model, split.name, split.module)
        _check_kind(split)
        _check_size(split, degree)
    _check_shared(model, splits)
    _check_between(model, splits)


def _check_kind(split: Split) -> None:
    name, module = split.name, split.module
    if split.word == "experts" and count_experts(module) is None:
        raise UsageError(
            f"the plan's 'experts' for {name!r} suits a module whose parameters all have num_experts as their first dim, and forward(hidden_states, top_k_index, top_k_weights); that {type(module).__name__} is none",
            hint="leave it out of the plan: then every rank computes all of it",
        )
    if split.weight_dim is None:
        return
    if not isinstance(module, (nn.Linear, nn.Embedding)) and not is_conv1d(module):
        raise UsageError(
            f"the plan's {split.word!r} for {name!r} suits nn.Linear and nn.Embedding only, and that is a {type(module).__name__}",
            hint=f"{split.pattern!r} must match the layers themselves, not what holds them",
        )
    if split.word == "rowwise_embed" and not isinstance(module, nn.Embedding):
        raise UsageError(
            f"the plan's 'rowwise_embed' for {name!r} is for nn.Embedding, and that is a {type(module).__name__}",
            hint="'rowwise' is the style for nn.Linear",
        )
    if isinstance(module, nn.Embedding):
        trouble = find_embedding_trouble(module)
        if trouble is not None:
            raise UsageError(
                f"the embedding {name!r} can't be split: it was made with {trouble}, which would hold for each rank's rows by themselves",
                hint="leave it out of the plan: then every rank holds all of it",
            )
    owned = [own for own, _ in module.named_parameters()]
    if not {"weight", "bias"}.issuperset(owned):
        raise UsageError(
            f"module {name!r} can't be split: its parameters are {', '.join(map(repr, owned))}, and not a weight and a bias alone",
            hint="remove parametrizations such as weight_norm before, or leave it out of the plan",
        )


def _check_size(split: Split, degree: int) -> None:
    dim, module = split.weight_dim, split.module
    if split.word == "experts" and (number := count_experts(module) or 0) % degree:
        raise UsageError(
            f"module {split.name!r}: {number} experts can't be divided by {degree}, the number of ranks on the axis 'tensor'",
            hint="use another degree, or leave it out of the plan",
        )
    if dim is None:
        return
    size = int(module.weight.shape[dim])
    names = ("nx", "nf") if is_conv1d(module) else ("out_features", "in_features")
    names = ("num_embeddings", "embedding_dim") if isinstance(module, nn.Embedding) else names
    if size % degree:
        raise UsageError(
            f"module {split.name!r}: {names[dim]} {size} can't be divided by {degree}, the number of ranks on the axis 'tensor'",
            hint="pad the layer to a multiple, use another degree, or leave it out of the plan",
        )


def _check_shared(model: nn.Module, splits: Sequence[Split]) -> None:
    dims = {id(split.module): split.weight_dim for split in splits}
    for holders in find_shared(model):
        found = {
            f"{name}.{own}" if name else own: dims.get(id(module)) if own == "weight" else None
            for name, module, own in holders
        }
        if len(set(found.values())) > 1:
            text = "; ".join(
                f"{name!r} is {'whole' if dim is None else f'split along dim {dim}'}" for name, dim in found.items()
            )
            raise UsageError(
                f"one parameter is shared by modules that the plan splits in different ways: {text}",
                hint="'rowwise_embed' for the embedding and 'colwise_gather' for the head fit together; or leave both out of the plan",
            )


def find_shared(model: nn.Module) -> list[list[tuple[str, nn.Module, str]]]:
    """List parameters that several modules hold: for each, the modules' names, the modules, and its name in each."""
    holders: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(parameter), []).append((name, module, own))
    return [found for found in holders.values() if len(found) > 1]


def _check_between(model: nn.Module, splits: Sequence[Split]) -> None:
    """Refuse parameters of a width of their own beside split layers: each rank would train them on its own share."""
    for parent_name, beside in _list_parents(splits):
        _check_widths(beside)
        for name, parameter in _list_odd(model, parent_name, beside, splits):
            raise UsageError(
                f"parameter {name!r}, shape {tuple(parameter.shape)}, is beside split layers ({beside[0].name!r}) and is not in the plan: if it works on a rank's own heads, ranks would train it differently",
                hint="give its module the style 'replicate_sum' (each rank has a part of its gradient, as with a norm of single heads), or 'replicate' (all ranks do the same with it)",
            )


def leave_whole(model: nn.Module, splits: Sequence[Split]) -> tuple[list[Split], dict[str, str]]:
    """Drop from a ready plan the modules beside whose layers there are parameters of which it does not tell; return what stays, and the reasons."""
    dropped, reasons = set(), {}
    for parent_name, beside in _list_parents(splits):
        if {split.word for split in beside} >= {"colwise", "rowwise"}:  # else others need what these give
            for name, parameter in _list_odd(model, parent_name, beside, splits):
                dropped.add(parent_name)
                reasons[shorten(parent_name)] = (
                    f"the ready plan does not tell of {shorten(name)!r}, shape {tuple(parameter.shape)}, which may work on a rank's own part; give a plan that does"
                )
    return [split for split in splits if split.parent_name not in dropped], reasons


def _list_parents(splits: Sequence[Split]) -> Iterator[tuple[str, list[Split]]]:
    for parent_name in dict.fromkeys(split.parent_name for split in splits if split.word == "colwise"):
        yield parent_name, [split for split in splits if split.parent_name == parent_name]


def _list_odd(
    model: nn.Module, parent_name: str, beside: Sequence[Split], splits: Sequence[Split]
) -> Iterator[tuple[str, nn.Parameter]]:
    """List the parameters beside split layers that have none of the widths that are whole."""
    whole = {int(split.module.weight.shape[1 - split.weight_dim]) for split in beside if split.weight_dim is not None}
    for name, parameter in _list_unplanned(model.get_submodule(parent_name), {id(split.module) for split in splits}):
        if not whole & set(parameter.shape):
            yield (f"{parent_name}.{name}" if parent_name else name), parameter


def _check_widths(beside: Sequence[Split]) -> None:
    """Refuse two layers in one whose name does not tell: what it gives is cut in two before the next layer takes it."""
    widths = {
        features[0]
        for split in beside
        if split.word == "rowwise" and (features := count_features(split.module)) is not None
    }
    for split in beside:
        # Heads of keys and values may be fewer than those of the queries; fused layers have been looked at.
        if split.word != "colwise" or is_projection(split.own_name) or is_fused(split.name, split.module):
            continue
        features = count_features(split.module)
        if widths and features is not None and features[1] not in widths:
            raise UsageError(
                f"module {split.name!r} gives {features[1]} features, and the 'rowwise' layer beside it takes {' or '.join(map(str, sorted(widths)))}: its output is split in between, and a rank's share would hold some of the first part only",
                hint="make it one nn.Linear for each part (gate and up), or leave both out of the plan",
            )


def _list_unplanned(parent: nn.Module, planned: set[int]) -> Iterator[tuple[str, nn.Parameter]]:
    if id(parent) in planned:
        return
    yield from parent.named_parameters(recurse=False)
    for own, child in parent.named_children():
        # What has children of its own is a part of the model, of which the split layers here say nothing.
        if id(child) not in planned and next(child.children(), None) is None:
            yield from ((f"{own}.{name}", parameter) for name, parameter in child.named_parameters())


def find_heads(model: nn.Module, splits: Sequence[Split], degree: int) -> list[Heads]:
    """Find the attention modules whose heads are dealt out, and see that the heads can be.

    Raises:
        UsageError: The heads can't be divided, their number is not to be found, or only some projections are split.
    """
    found = []
    projections = [
        split
        for split in splits
        if split.word == "colwise" and (is_projection(split.own_name) or is_fused(split.name, split.module))
    ]
    for parent_name in dict.fromkeys(split.parent_name for split in projections):
        own = [split for split in projections if split.parent_name == parent_name]
        parent = model.get_submodule(parent_name)
        _check_all_split(parent_name, parent, own)
        query = next((split for split in own if not _KEY_OR_VALUE.match(split.own_name)), own[0])
        for split in own:
            _check_heads(_count_heads(model, parent, split, query), split, degree)
        found.append(Heads(name=parent_name, module=parent, counts=_list_counts(parent, own)))
    return found


def is_projection(own_name: str) -> bool:
    """Whether a layer is query, key or value of attention, by the last part of its name."""
    return _PROJECTION.match(own_name) is not None


def _check_all_split(parent_name: str, parent: nn.Module, own: Sequence[Split]) -> None:
    split_names = [split.own_name for split in own]
    whole = [
        name
        for name, child in parent.named_children()
        if is_projection(name) and isinstance(child, nn.Linear) and name not in split_names
    ]
    if whole:
        raise UsageError(
            f"attention module {parent_name!r}: the plan splits {', '.join(map(repr, split_names))} and not {', '.join(map(repr, whole))}: heads would not get their own keys and values",
            hint="give query, key and value the style 'colwise', all three or none",
        )


def _check_heads(counted: tuple[int, str] | None, split: Split, degree: int) -> None:
    if counted is None:
        raise UsageError(
            f"module {split.name!r} is a projection of attention, but its number of heads can't be found: neither the module that holds it nor model.config has any of {', '.join((*HEAD_COUNTS, *HEAD_WIDTHS))}",
            hint="give the attention module an attribute num_heads, and let its forward use that or view(..., -1, head_dim): each rank holds num_heads / degree heads",
        )
    number, where = counted
    if number % degree:
        divisors = [str(each) for each in range(1, number + 1) if number % each == 0]
        raise UsageError(
            f"module {split.name!r}: {number} {'head' if number == 1 else 'heads'} ({where}) can't be divided by {degree}, the number of ranks on the axis 'tensor'",
            hint=f"the degree must be one of {', '.join(divisors)}; or leave attention out of the plan",
        )


def _count_heads(model: nn.Module, parent: nn.Module, split: Split, query: Split) -> tuple[int, str] | None:
    size, query_size = int(split.module.weight.shape[0]), int(query.module.weight.shape[0])
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    places: list[tuple[str, Any]] = [(type(parent).__name__, parent)]
    places += [("model.config", text() if callable(text) else config)] if config is not None else []
    for where, place in places:
        for name in KEY_VALUE_COUNTS if _KEY_OR_VALUE.match(split.own_name) else ():
            number = _read_int(place, name)
            if number is not None:
                return number, f"{name} of {where}"
        for name in HEAD_COUNTS:
            number = _read_int(place, name)
            # Keys and values of fewer heads are as much narrower than the queries.
            if number is not None:
                return number * size // query_size, f"by {name} {number} of {where}"
        for name in HEAD_WIDTHS:
            width = _read_int(place, name)
            if width is not None and size % width == 0:
                return size // width, f"out_features {size} by {name} {width} of {where}"
    return None


def _read_int(place: Any, name: str) -> int | None:
    value = getattr(place, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _list_counts(parent: nn.Module, own: Sequence[Split]) -> dict[str, int]:
    sizes = {int(split.module.weight.shape[0]) for split in own}
    counts: dict[str, int] = {}
    for name in (*HEAD_COUNTS, *KEY_VALUE_COUNTS, *PROJECTION_WIDTHS):
        value = _read_int(parent, name)
        # A property follows from what it is computed of.
        if value is None or isinstance(getattr(type(parent), name, None), property):
            continue
        if name not in PROJECTION_WIDTHS or value in sizes:
            counts[name] = value
    return counts
