"""Which layer of a model is split how: patterns of module names, words for styles, and ready plans for known layouts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from rankwise.base.errors import UsageError
from rankwise.parallel.names import list_holders, matches
from rankwise.parallel.tensor_experts import count_experts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


#: What each word means is in apply_tensor_parallel's docstring.
WORDS = (
    "colwise", "colwise_gather", "rowwise", "rowwise_split", "rowwise_embed", "experts", "sequence", "replicate", "replicate_sum",
)  # fmt: skip
#: The words of transformers' plans, old and new (transformers/distributed/tensor_parallel.py), and ours for them.
_FOREIGN_WORDS = {
    "colwise_rep": "colwise_gather", "colwise_gather_output": "colwise_gather", "embedding_colwise": "colwise_gather",
    "local_colwise": "colwise", "local_rowwise": "rowwise", "rowwise_rep": "rowwise_split", "rowwise_split_input": "rowwise_split",
    "embedding_rowwise": "rowwise_embed", "vocab_parallel_rowwise": "rowwise_embed", "sequence_parallel": "sequence",
    "replicated_with_grad_allreduce": "replicate_sum", "replicated": "replicate", "moe_tp_experts": "experts",
}  # fmt: skip

#: Query, key and value, or gate and up, in one layer: a rank's share of its columns is not a share of each part.
_FUSED = re.compile(
    r"^(c_attn|in_proj|query_key_value|(to_|in_proj_|w)?(qkv|kv|qk|q_k_v)(_?(proj|lin|linear|layer))?|gate_up_proj|w12)$",
    re.IGNORECASE,
)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Layers that are split together, by their names below one module."""

    colwise: tuple[str, ...]
    rowwise: str
    found_in: str


#: Attention first; BERT's "output.dense" of the feed-forward part is that of the layer, not that of its attention.
FAMILIES = (
    Family(colwise=("q_proj", "k_proj", "v_proj"), rowwise="o_proj", found_in="Llama, transformers' ViT"),
    Family(colwise=("q_proj", "k_proj", "v_proj"), rowwise="out_proj", found_in="OPT, CLIP"),
    Family(colwise=("self.query", "self.key", "self.value"), rowwise="output.dense", found_in="BERT"),
    Family(colwise=("attention.query", "attention.key", "attention.value"), rowwise="output.dense", found_in="older transformers' ViT"),
    Family(colwise=("q_lin", "k_lin", "v_lin"), rowwise="out_lin", found_in="DistilBERT"),
    Family(colwise=("wq", "wk", "wv"), rowwise="wo", found_in="Meta's Llama"),
    Family(colwise=("gate_proj", "up_proj"), rowwise="down_proj", found_in="Llama"),
    Family(colwise=("w1", "w3"), rowwise="w2", found_in="Meta's Llama"),
    Family(colwise=("intermediate.dense",), rowwise="output.dense", found_in="BERT"),
    Family(colwise=("c_fc",), rowwise="c_proj", found_in="GPT-2"),
    Family(colwise=("dense_h_to_4h",), rowwise="dense_4h_to_h", found_in="GPT-NeoX"),
    Family(colwise=("fc1",), rowwise="fc2", found_in="ViT of timm and transformers"),
    Family(colwise=("ffn.lin1",), rowwise="ffn.lin2", found_in="DistilBERT"),
)  # fmt: skip
_EMBEDDINGS = ("embed_tokens", "tok_embeddings", "wte", "tok_emb", "token_embedding")
_HEADS = ("lm_head", "output")
_OF_VOCABULARY = ("rowwise_embed", "colwise_gather")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One module of the model, and how it is split.

    Attributes:
        name: Its name in the model.
        module: The module itself.
        word: One of ``WORDS``; "custom" for a style of torch's that is none of them.
        style: The style that the user gave as an object; None: it is built from the word.
        pattern: What of the plan matched.
    """

    name: str
    module: nn.Module
    word: str
    style: ParallelStyle | None
    pattern: str

    @property
    def weight_dim(self) -> int | None:
        """Which dim of the weight is cut; None: none, or not known."""
        is_turned = isinstance(self.module, nn.Embedding) or is_conv1d(self.module)
        if self.word.startswith("colwise"):
            return 1 if is_turned else 0
        if self.word.startswith("rowwise"):
            return 0 if is_turned else 1
        return None

    @property
    def parent_name(self) -> str:
        """The name of the module that holds it."""
        return self.name.rpartition(".")[0]

    @property
    def own_name(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]


def shorten(name: str) -> str:
    """Return a module's name with ``*`` for the numbers of layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def read_style(style: object, pattern: str) -> tuple[str, ParallelStyle | None]:
    """Return our word for a style, and torch's object if it is one."""
    if isinstance(style, str):
        word = _FOREIGN_WORDS.get(style, style)
        if word not in WORDS:
            raise UsageError(
                f"the plan's style {style!r} for {pattern!r} is not known; the styles are {', '.join(WORDS)}",
                hint="or give a ParallelStyle of torch.distributed.tensor.parallel, or one of your own",
            )
        return word, None
    if isinstance(style, ColwiseParallel):
        gathers = all(placement.is_replicate() for placement in style.output_layouts)
        return ("colwise_gather" if gathers else "colwise"), style
    if isinstance(style, RowwiseParallel):
        return "rowwise", style
    if isinstance(style, SequenceParallel):
        return "sequence", style
    if isinstance(style, ParallelStyle):
        return "custom", style
    raise UsageError(
        f"the plan's style for {pattern!r} is a {type(style).__name__}: it must be a style name ({', '.join(WORDS)}) or a ParallelStyle"
    )


def resolve_plan(model: nn.Module, plan: Mapping[str, Any]) -> list[Split]:
    """Find the modules that a plan names.

    Raises:
        UsageError: A pattern matches nothing, two give one module different styles, or a style is not known.
    """
    if not plan:
        raise UsageError(
            "the plan is empty: nothing would be split",
            hint="leave `plan` out for the ready plan of the model",
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[int, Split] = {}
    for pattern, style in plan.items():
        if not isinstance(pattern, str):
            raise UsageError(f"the plan's key {pattern!r} is a {type(pattern).__name__}, not a module's name")
        word, given = read_style(style, pattern)
        names = [name for name in modules if matches(pattern, name)]
        if not names:
            raise UsageError(
                f"the plan's {pattern!r} matches no module of {type(model).__name__}{_suggest(pattern, modules)}",
                hint="names are those of model.named_modules(); * stands for one part of a name, ** for any number of them",
            )
        for name in names:
            split = Split(name=name, module=modules[name], word=word, style=given, pattern=pattern)
            first = found.setdefault(id(split.module), split)
            if (first.word, repr(first.style)) != (word, repr(given)):
                same = "" if first.name == name else f" (the same module as {first.name!r})"
                raise UsageError(
                    f"module {name!r}{same} has two styles in the plan: {plan[first.pattern]!r} by {first.pattern!r}, {style!r} by {pattern!r}",
                    hint="write patterns that don't overlap",
                )
    order = {id(module): place for place, module in enumerate(model.modules())}
    return sorted(found.values(), key=lambda split: order[id(split.module)])


def _suggest(pattern: str, names: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(pattern, {shorten(name) for name in names if name}, n=2, cutoff=0.6)
    return f"; there is {' and '.join(map(repr, near))}" if near else ""


def is_fused(name: str, module: nn.Module) -> bool:
    """Whether one layer holds the weights of several: query, key and value; or gate and up."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    return count_features(module) is not None and _FUSED.match(name.rpartition(".")[2]) is not None


def refuse_fused(model: nn.Module, name: str, module: nn.Module) -> UsageError:
    """Return the error for a fused layer that is to be split, with a plan that works."""
    if isinstance(module, nn.MultiheadAttention):
        hint = "use a module with three nn.Linear (q_proj, k_proj, v_proj) and o_proj; or give a plan that leaves attention out"
        what = "is a torch.nn.MultiheadAttention, which keeps query, key and value in one parameter that no style can split"
    else:
        what = "holds query, key and value (or gate and up) side by side: a rank's share of its columns would be some of the first only"
        hint = "make it one nn.Linear for each part, or give it 'colwise_gather', and what follows 'rowwise_split'"
    ways = _find_families(model)
    if ways and not isinstance(module, nn.MultiheadAttention):
        hint += "; or"
    if ways:
        plan = {shorten(layer): word for layer, word in ways.items()}
        hint += f" leave it whole: plan={plan}"
    return UsageError(f"module {name!r} {what}", hint=hint)


def find_ready_plan(model: nn.Module, degree: int) -> dict[str, str]:
    """Find the plan for a model: transformers' own, and for what that does not tell of one by the names of its layers.

    A vocabulary that ``degree`` does not divide stays whole.

    Raises:
        UsageError: No layout that is known; says what was looked for.
    """
    own, whole = read_transformers_plan(model, degree)
    known = [*own, *(f"{part}.**" for part in whole)]
    plan = _find_families(model, lambda name: any(matches(pattern, name) for pattern in known))
    plan |= dict.fromkeys(_find_head_norms(model, plan), "replicate_sum")
    if not own:
        plan |= _find_fused(model, plan)
        if not plan:
            looked_for = "; ".join(
                f"{', '.join(family.colwise)} -> {family.rowwise} ({family.found_in})" for family in FAMILIES
            )
            raise UsageError(
                f"there is no ready plan for {type(model).__name__}: it has no tensor-parallel plan of transformers', and no nn.Linear layers of these names: {looked_for}",
                hint='give a plan: apply_tensor_parallel(model, {"blocks.*.fc1": "colwise", "blocks.*.fc2": "rowwise"})',
            )
        plan |= _find_vocabulary(model)
    return _keep_whole_vocabulary(model, own | plan, degree)


def read_transformers_plan(model: nn.Module, degree: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return transformers' own plan for a model, which knows what its fused layers hold; empty if there is none.

    And what stays whole, with the reason: a style that is not known here, or does not suit the module. A plan holds for modules as a whole.
    """
    own = getattr(model, "_tp_plan", None)
    if not isinstance(own, Mapping) or not own:
        own = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not isinstance(own, Mapping):
        return {}, {}
    # One configuration serves several models: what a plan names and this model lacks is no mistake, as in transformers.
    # What it says of single parameters, those of experts, follows here from the style of the module that holds them.
    modules = dict(model.named_modules())
    found = {pattern: [module for name, module in modules.items() if matches(str(pattern), name)] for pattern in own}
    plan = {pattern: own[pattern] for pattern, here in found.items() if here}
    whole: dict[str, str] = {}
    for pattern, style in plan.items():
        word = _FOREIGN_WORDS.get(style, style)
        counts = map(count_experts, found[pattern]) if word == "experts" else ()
        if word in WORDS and all(number and number % degree == 0 for number in counts):
            continue
        is_group = any(other.startswith(f"{pattern}.") for other in own)
        part = pattern if is_group else pattern.rpartition(".")[0] or pattern
        whole[part] = f"transformers' style {style!r} for {pattern!r} is not known here, or does not suit it"
    kept = {name: style for name, style in plan.items() if not any(f"{name}.".startswith(f"{one}.") for one in whole)}
    if all(read_style(style, name)[0] in _OF_VOCABULARY for name, style in kept.items()):
        return {}, {}  # some name the head alone
    return kept, whole


def _find_families(model: nn.Module, is_known: Callable[[str], bool] = lambda _: False) -> dict[str, str]:
    found: list[dict[str, str]] = []
    for name, module in model.named_modules():
        for family in FAMILIES:
            prefix, paths = f"{name}." if name else "", (*family.colwise, family.rowwise)
            if _fit_together([_get(module, path) for path in paths]):
                words = dict.fromkeys((prefix + path for path in paths), "colwise")
                found.append({**words, prefix + family.rowwise: "rowwise"})
    of_families = {name for words in found for name in words}
    plan: dict[str, str] = {}
    for words in found:
        # Beside query, key and value, a linear layer of no family would meet a part of the heads: a gate of attention.
        beside = (layer for name in words for layer in _list_linears(model, name.rpartition(".")[0]))
        is_attention = len(words) == 4
        if not any(map(is_known, words)) and (not is_attention or of_families.issuperset(beside)):
            plan |= words
    return plan


def _list_linears(model: nn.Module, parent: str) -> Iterator[str]:
    for own, child in model.get_submodule(parent).named_children():
        if count_features(child) is not None:
            yield f"{parent}.{own}" if parent else own


def _fit_together(layers: Sequence[nn.Module | None]) -> bool:
    """Whether all are linear, and what the first gives is what the last takes; else it is cut in two in between, as in gated units."""
    features = [count_features(layer) for layer in layers]
    first, last = features[0], features[-1]
    return None not in features and first is not None and last is not None and first[1] == last[0]


def _find_fused(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Cut fused layers and what stands beside them; what is between, the heads of attention, all ranks compute."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            raise refuse_fused(model, name, module)
        if not is_fused(name, module):
            continue
        parent = name.rpartition(".")[0]
        holder = model.get_submodule(parent)
        # What has weights of another kind beside it is no attention, but the mixer of a state space model, say.
        if any(True for _ in holder.parameters(recurse=False)) or any(
            isinstance(one, _CONVOLUTIONS) for one in holder.children()
        ):
            continue
        for own, other in holder.named_children():
            full = f"{parent}.{own}" if parent else own
            if full not in plan and count_features(other) is not None:
                found[full] = "colwise_gather" if is_fused(full, other) else "rowwise_split"
    return found


def _get(module: nn.Module, path: str) -> nn.Module | None:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, "_modules", {}).get(part)
    return found if isinstance(found, nn.Module) else None


def _find_head_norms(model: nn.Module, plan: Mapping[str, str]) -> Iterator[str]:
    """Norms of single heads of query and key, by which each rank sends other heads."""
    for parent in {name.rpartition(".")[0] for name in plan}:
        for own in ("q_norm", "k_norm"):
            name = f"{parent}.{own}" if parent else own
            norm = _get(model, name)
            if norm is not None and next(norm.parameters(), None) is not None:
                yield name


def _find_vocabulary(model: nn.Module) -> dict[str, str]:
    """Embedding of the tokens, and the head: by name, where the model says which they are."""
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        own = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and own in _EMBEDDINGS:
            plan[name] = "rowwise_embed"
        elif isinstance(module, nn.Linear) and (own == _HEADS[0] or name in _HEADS):
            plan[name] = "colwise_gather"
    return plan


def _keep_whole_vocabulary(model: nn.Module, plan: dict[str, str], degree: int) -> dict[str, str]:
    """Leave out what of the vocabulary can't be split: by its size, its options, or for whom it shares its weight with."""
    modules = dict(model.named_modules(remove_duplicate=False))
    of_vocabulary = {
        name: pattern
        for pattern, style in plan.items()
        for name in modules
        if read_style(style, pattern)[0] in _OF_VOCABULARY and matches(pattern, name)
    }
    holders = list_holders(model.named_parameters(remove_duplicate=False), modules)
    left_out: set[str | None] = set()
    for name in of_vocabulary:
        module = modules[name]
        own = (f"{name}.{one}".removeprefix(".") for one, _ in module.named_parameters(recurse=False))
        sharing = {other for one in own for other in holders[one]}
        if not (_fits_vocabulary(module, degree) and sharing <= set(of_vocabulary)):
            left_out |= sharing | {name}
    dropped = {of_vocabulary[name] for name in left_out if name in of_vocabulary}
    return {pattern: style for pattern, style in plan.items() if pattern not in dropped}


def _fits_vocabulary(module: nn.Module, degree: int) -> bool:
    if isinstance(module, nn.Embedding):
        return module.num_embeddings % degree == 0 and find_embedding_trouble(module) is None
    features = count_features(module)
    return features is not None and features[1] % degree == 0


def find_embedding_trouble(module: nn.Embedding) -> str | None:
    """Name the option of an embedding that means another thing once its rows are split."""
    if module.max_norm is not None:
        return f"max_norm={module.max_norm}"
    return next((f"{name}=True" for name in ("scale_grad_by_freq", "sparse") if getattr(module, name)), None)


# Linear layers of both kinds: torch's, and transformers' Conv1D of GPT-2, whose weight lies the other way, (inputs,
# outputs).


def is_conv1d(module: nn.Module | None) -> bool:
    """Whether a module is transformers' ``Conv1D``, which may not be installed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nx") and hasattr(module, "nf")


def count_features(module: nn.Module | None) -> tuple[int, int] | None:
    """Return how many inputs and outputs a linear layer has; None: it is none."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return (int(module.nx), int(module.nf)) if module is not None and is_conv1d(module) else None


def adapt(style: ParallelStyle | None, module: nn.Module) -> ParallelStyle | None:
    """Return the style that does to a module what another does to ``nn.Linear``."""
    is_known = is_conv1d(module) and isinstance(style, (ColwiseParallel, RowwiseParallel))
    return Conv1dStyle(style) if is_known else style


@final
class Conv1dStyle(ParallelStyle):  # type: ignore[misc]
    """What torch's style does for ``nn.Linear``, for ``Conv1D``."""

    def __init__(self, style: ColwiseParallel | RowwiseParallel) -> None:
        super().__init__()
        is_colwise = isinstance(style, ColwiseParallel)
        self._cuts = {"weight": Shard(1), "bias": Shard(0)} if is_colwise else {"weight": Shard(0)}
        self._wanted = Replicate() if is_colwise else Shard(-1)
        self._style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            self._cut,
            partial(_enter, self._style.input_layouts, self._wanted),
            partial(_leave, self._style.output_layouts, self._style.use_local_output),
        )

    def _cut(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for own, one in list(module.named_parameters(recurse=False)):
            # All ranks hold the same values: each cuts its own share, and nothing is sent.
            cut = distribute_tensor(one, mesh, [self._cuts.get(own, Replicate())], src_data_rank=None)
            module.register_parameter(own, nn.Parameter(cut))


def _enter(layouts: Any, wanted: Any, _: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
    x = inputs[0]
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, layouts, run_check=False)
    return x.redistribute(placements=[wanted])


def _leave(layouts: Any, is_local: bool, _: nn.Module, output: Any, mesh: DeviceMesh) -> Any:  # noqa: FBT001, ARG001 - torch's order
    output = output.redistribute(placements=layouts)
    return output.to_local() if is_local else output
