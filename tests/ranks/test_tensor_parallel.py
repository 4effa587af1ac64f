"""apply_tensor_parallel refuses what it can't split before it changes anything, with the same words on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import rankwise
from rankwise.parallel.names import matches
from rankwise.parallel.tensor_checks import leave_whole
from rankwise.parallel.tensor_plans import find_ready_plan, read_transformers_plan, resolve_plan
from rankwise.testing import run_ranks

WIDTH = 8
MLP = {"fc1": "colwise", "fc2": "rowwise"}


class Attention(nn.Module):
    """Query, key and value apart; ``counts`` are the attributes that tell the number of heads."""

    def __init__(self, *, width: int = WIDTH, kv_width: int | None = None, **counts: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.k_proj, self.v_proj = nn.Linear(width, kv_width or width), nn.Linear(width, kv_width or width)
        self.o_proj = nn.Linear(width, width)
        for name, number in counts.items():
            setattr(self, name, number)

    def forward(self, x: Tensor) -> Tensor:
        """As nanoGPT: the width of the input, where only a part of it comes out of the projections."""
        batch, sequence, width = x.shape
        q = self.q_proj(x).view(batch, sequence, self.num_heads, width // self.num_heads)
        return self.o_proj(q.reshape(batch, sequence, width))


class Model(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Scaled(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(sizes[1]))


def mlp(width: int = WIDTH, hidden: int = 12, **more: nn.Module) -> nn.Module:
    return Model(fc1=nn.Linear(width, hidden), fc2=nn.Linear(hidden, width), **more)


def tied(*, rows: int = WIDTH) -> nn.Module:
    model = Model(
        embed_tokens=nn.Embedding(rows, WIDTH),
        lm_head=nn.Linear(WIDTH, rows, bias=False),
        **dict(mlp().named_children()),
    )
    model.lm_head.weight = model.embed_tokens.weight
    return model


class Experts(nn.Module):
    """Each token goes through some of the experts, as in transformers, without a word of an index that belongs to nobody."""

    def __init__(self, number: int = 4) -> None:
        super().__init__()
        self.num_experts, self.weights = number, nn.Parameter(torch.randn(number, WIDTH, WIDTH))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states)
        for token, choice in (top_k_weights > 0).nonzero().tolist():
            vector = hidden_states[token] @ self.weights[top_k_index[token, choice]]
            total[token] += vector * top_k_weights[token, choice]
        return total


class OtherExperts(Experts):
    """As GPT-OSS names and counts them: it has the attribute, and its loop takes no index but those of its experts."""

    _is_expert_parallel = False

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        assert int(router_indices.max()) < self.num_experts
        return super().forward(hidden_states, router_indices, routing_weights)


class Mixture(nn.Module):
    def __init__(self, used: int, kind: type[Experts]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(WIDTH, used), kind()

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        return self.experts(x, index, weights)


def attention(**counts: int) -> nn.Module:
    return Model(attn=Attention(**counts))


ATTENTION = {"attn.[qkv]_proj": "colwise", "attn.o_proj": "rowwise"}


def apply(model: nn.Module, plan: Any, options: dict[str, Any]) -> tuple[str, str, str | None, bool]:
    """Return the error's type, message and hint, and whether the model is as it was."""
    with rankwise.init(device="cpu"):
        before = copy.deepcopy(model.state_dict())
        types = [type(parameter) for parameter in model.parameters()]
        with pytest.raises(rankwise.RankwiseError) as caught:
            rankwise.apply_tensor_parallel(model, plan, **options)
        after = model.state_dict()
        same = all(torch.equal(after[name], value) for name, value in before.items())
        same = same and types == [type(parameter) for parameter in model.parameters()]
        return type(caught.value).__name__, caught.value.message, caught.value.hint, same


REFUSALS: dict[str, tuple[nn.Module, Any, dict[str, Any], tuple[str, ...]]] = {
    "empty plan": (mlp(), {}, {}, ("the plan is empty",)),
    "no match": (mlp(), {"fc11": "colwise"}, {}, ("'fc11' matches no module of Model", "there is 'fc1'")),
    "two styles": (mlp(), {"fc1": "colwise", "fc*": "rowwise"}, {}, ("'fc1' has two styles", "'colwise' by 'fc1'", "'rowwise' by 'fc*'")),
    "unknown word": (mlp(), {"fc1": "columnwise"}, {}, ("'columnwise' for 'fc1' is not known", "colwise_gather")),
    "no style": (mlp(), {"fc1": 3}, {}, ("a int", "ParallelStyle")),
    "norm split": (mlp(norm=nn.LayerNorm(WIDTH)), {**MLP, "norm": "colwise"}, {}, ("'colwise' for 'norm' suits nn.Linear and nn.Embedding only", "LayerNorm")),
    "linear as embedding": (mlp(), {"fc1": "rowwise_embed"}, {}, ("'rowwise_embed' for 'fc1'", "Linear")),
    "outputs": (mlp(hidden=9), MLP, {}, ("'fc1': out_features 9 can't be divided by 2", "axis 'tensor'")),
    "inputs": (mlp(hidden=9), {"fc2": "rowwise"}, {}, ("'fc2': in_features 9 can't be divided by 2",)),
    "rows": (tied(rows=9), {"embed_tokens": "rowwise_embed"}, {}, ("num_embeddings 9", "2")),
    "max_norm": (Model(embed=nn.Embedding(4, 2, max_norm=1.0)), {"embed": "rowwise_embed"}, {}, ("'embed'", "max_norm=1.0")),
    "heads": (attention(width=12, num_heads=3), ATTENTION, {}, ("'attn.q_proj': 3 heads (by num_heads 3 of Attention) can't be divided by 2",)),
    "fewer keys": (attention(num_heads=4, kv_width=2), ATTENTION, {}, ("'attn.k_proj': 1 head",)),
    "key-value heads": (attention(kv_width=4, num_heads=4, n_kv_heads=1), ATTENTION, {}, ("'attn.k_proj': 1 head (n_kv_heads of Attention)",)),
    "heads by width": (attention(width=12, head_dim=4), ATTENTION, {}, ("'attn.q_proj': 3 heads (out_features 12 by head_dim 4",)),
    "heads unknown": (attention(), ATTENTION, {}, ("'attn.q_proj' is a projection of attention", "num_heads")),
    "values whole": (attention(num_heads=4), {"attn.[qk]_proj": "colwise"}, {}, ("'attn'", "splits 'q_proj', 'k_proj' and not 'v_proj'")),
    "fused": (Model(c_attn=nn.Linear(4, 12), fc1=nn.Linear(4, 8), fc2=nn.Linear(8, 4)), {"c_attn": "colwise"}, {}, ("'c_attn' holds query, key and value", "plan={'fc1': 'colwise', 'fc2': 'rowwise'}")),
    "gated": (Model(fc1=nn.Linear(4, 16), fc2=nn.Linear(8, 4)), MLP, {}, ("'fc1' gives 16 features, and the 'rowwise' layer beside it takes 8",)),
    "MultiheadAttention": (Model(attn=nn.MultiheadAttention(4, 2), fc1=nn.Linear(4, 8), fc2=nn.Linear(8, 4)), None, {}, ("'attn' is a torch.nn.MultiheadAttention", "plan={'fc1'")),
    "no ready plan": (Model(a=nn.Linear(4, 4)), None, {}, ("no ready plan for Model", "q_proj, k_proj, v_proj -> o_proj (Llama", "fc1 -> fc2")),
    "tied, one split": (tied(), {"lm_head": "colwise_gather"}, {}, ("'embed_tokens.weight' is whole", "'lm_head.weight' is split along dim 0")),
    "tied, two ways": (tied(), {"embed_tokens": "colwise_gather", "lm_head": "colwise_gather"}, {}, ("'embed_tokens.weight' is split along dim 1; 'lm_head.weight' is split along dim 0",)),
    "norm of heads": (Model(attn=Model(q_proj=nn.Linear(WIDTH, WIDTH), k_proj=nn.Linear(WIDTH, WIDTH), v_proj=nn.Linear(WIDTH, WIDTH), q_norm=nn.LayerNorm(2))), {"attn.[qkv]_proj": "colwise"}, {}, ("'attn.q_norm.weight', shape (2,), is beside split layers", "'replicate_sum'")),
    "experts that differ": (mlp(), {"fc1": "experts"}, {}, ("'experts' for 'fc1'", "that Linear is none")),
    "odd experts": (Model(experts=Experts(3)), {"experts": "experts"}, {}, ("'experts': 3 experts can't be divided by 2",)),
    "experts in a sequence": (nn.Sequential(Model(mlp=mlp(experts=Experts()))), {"0.mlp.fc1": "colwise", "0.mlp.fc2": "rowwise", "0.mlp.experts": "experts"}, {"sequence_parallel": True}, ("the experts '0.mlp.experts' see all tokens",)),
    "more parameters": (Model(fc1=Scaled(4, 4)), {"fc1": "colwise"}, {}, ("'fc1' can't be split", "'weight', 'bias', 'scale'")),
    "sequence alone": (mlp(norm=nn.LayerNorm(WIDTH)), {**MLP, "norm": "sequence"}, {}, ("'norm' the style 'sequence'", "sequence_parallel=True")),
    "no blocks": (mlp(), MLP, {"sequence_parallel": True}, ("needs blocks in a ModuleList or Sequential", "'fc1' is in none")),
    "flat attention": (nn.Sequential(Attention(num_heads=4)), {"0.[qkv]_proj": "colwise", "0.o_proj": "rowwise"}, {"sequence_parallel": True}, ("'0.q_proj' is in the block '0' itself",)),
    "scale in a block": (nn.Sequential(Model(mlp=mlp(), conv=nn.Conv1d(WIDTH, WIDTH, 3))), {"0.mlp.fc1": "colwise", "0.mlp.fc2": "rowwise"}, {"sequence_parallel": True}, ("'0.conv' (Conv1d) has parameters", "a part of the sequence")),
    "norm inside": (nn.Sequential(Model(mlp=mlp(norm=nn.LayerNorm(WIDTH)))), {"0.mlp.fc1": "colwise", "0.mlp.fc2": "rowwise"}, {"sequence_parallel": True}, ("'0.mlp.norm' (LayerNorm)", "the whole sequence")),
}  # fmt: skip


def apply_all(cases: list[tuple[nn.Module, Any, dict[str, Any]]]) -> list[tuple[str, str, str | None, bool]]:
    return [apply(*case) for case in cases]


def test_what_cannot_be_split_is_refused() -> None:
    """Each refusal is a UsageError that names the module and the numbers, is the same on all ranks, and changes nothing."""
    cases = [case[:3] for case in REFUSALS.values()]
    first, second = run_ranks(apply_all, 2, cases)
    assert first == second
    for (what, (_, _, _, words)), (kind, message, hint, unchanged) in zip(REFUSALS.items(), first, strict=True):
        assert kind == "UsageError", f"{what}: {message}"
        assert unchanged, what
        for word in words:
            assert word in f"{message} -> {hint}", f"{what}: {message} -> {hint}"


def test_the_case_of_one_rank_is_told_to_all() -> None:
    """Ranks that hold different models or plans hear who holds what; no process claims left waiting."""

    def body() -> list[str]:
        with rankwise.init(device="cpu") as ctx:
            texts = []
            for model, plan in (
                (mlp(hidden=12 + 4 * ctx.rank), MLP),
                (mlp(), MLP if ctx.rank else {"fc1": "colwise"}),
                (mlp(), MLP if ctx.rank else {"fc7": "colwise"}),
            ):
                with pytest.raises(rankwise.ModelError) as caught:
                    rankwise.apply_tensor_parallel(model, plan)
                texts.append(caught.value.message)
            return texts

    first, second = run_ranks(body, 2)
    assert first == second
    assert "'fc1.weight': shape (12, 8)" in first[0]
    assert "apply_tensor_parallel was called with different options: plan is" in first[1]
    assert first[2].startswith("rank 0: the plan's 'fc7' matches no module")


def test_models_that_do_not_fit_are_refused() -> None:
    """Split twice, wrapped, without values: each with what to do."""

    def body() -> list[str]:
        with rankwise.init(device="cpu"):
            wrapped = rankwise.apply_ddp(mlp())
            model = rankwise.apply_tensor_parallel(mlp(), MLP)
            with torch.device("meta"):
                empty = mlp()
            texts = []
            for other in (model, wrapped, empty):
                with pytest.raises(rankwise.ModelError) as caught:
                    rankwise.apply_tensor_parallel(other, MLP)
                texts.append(str(caught.value))
            return texts

    for texts in run_ranks(body, 2):
        words = (
            "'fc1.weight' is a DTensor already",
            "wrapped in DistributedDataParallel",
            "on the meta device",
        )
        for text, word in zip(texts, words, strict=True):
            assert word in text


def test_a_reshape_by_the_whole_width_says_why_it_fails() -> None:
    """Torch's error in a forward that takes the whole width for its own gets the module's name and the way out."""

    def body() -> tuple[str, int]:
        with rankwise.init(device="cpu"):
            model = attention(num_heads=4)
            rankwise.apply_tensor_parallel(model, ATTENTION)
            with pytest.raises(RuntimeError) as caught:
                model.attn(torch.ones(1, 3, WIDTH))
            return str(caught.value), model.attn.num_heads

    for text, num_heads in run_ranks(body, 2):
        assert "is invalid for input of size" in text
        assert "'attn' (Attention) is split over 2 ranks" in text
        assert "view(B, S, -1, head_dim)" in text
        assert num_heads == 2


def test_whole_parameters_have_equal_gradients() -> None:
    """Norms, positions and biases that the plan leaves whole get the same gradient, to the bit, on every rank."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.fc1, self.fc2 = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.after(x + self.fc2(self.fc1(self.before(x)).relu()))

    def body() -> dict[str, Tensor]:
        with rankwise.init(device="cpu") as ctx:
            torch.manual_seed(ctx.rank)
            model = Net()
            rankwise.apply_tensor_parallel(model, MLP)
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(5))
            (model(x) * torch.arange(WIDTH)).sum().backward()
            return {
                name: parameter.grad
                for name, parameter in model.named_parameters()
                if not isinstance(parameter, DTensor)
            }

    first, *others = run_ranks(body, 4)
    assert set(first) == {f"{norm}.{kind}" for norm in ("before", "after") for kind in ("weight", "bias")}
    for other in others:
        for name, gradient in first.items():
            assert gradient.abs().max() > 0
            assert torch.equal(gradient, other[name]), name


def test_dropout_needs_the_same_random_numbers() -> None:
    """Ranks that would drop other units of what they hold in common are refused; without dropout, or seeded alike, they are not."""

    def body() -> str:
        with rankwise.init(device="cpu") as ctx:
            ctx.seed(3)
            rankwise.apply_tensor_parallel(mlp(), MLP)
            rankwise.apply_tensor_parallel(mlp(drop=nn.Dropout(0.0)), MLP)
            with pytest.raises(rankwise.UsageError) as caught:
                rankwise.apply_tensor_parallel(mlp(drop=nn.Dropout(0.1)), MLP)
            ctx.seed(3)  # by now there is a mesh
            rankwise.apply_tensor_parallel(mlp(drop=nn.Dropout(0.1)), MLP)
            return str(caught.value)

    first, second = run_ranks(body, 2)
    assert first == second
    assert "dropout ('drop')" in first
    assert "create the mesh first" in first


def test_all_start_from_the_first_rank_of_their_axis() -> None:
    """On a mesh of two axes, parameters and buffers of every dtype are those of the first rank on the tensor axis."""

    def body() -> tuple[float, list[Any], Tensor, Tensor]:
        with rankwise.init(device="cpu", mesh={"replicate": 2, "tensor": 2}) as ctx:
            model = mlp(norm=nn.LayerNorm(WIDTH))
            model.register_buffer("flags", torch.tensor([ctx.rank % 2 == 0, True]))
            model.register_buffer("turned", torch.full((2, 3), complex(ctx.rank, 1)).T)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(ctx.rank)
            rankwise.apply_tensor_parallel(model, MLP)
            values = {float(p.full_tensor().mean() if isinstance(p, DTensor) else p.mean()) for p in model.parameters()}
            return (
                values.pop() if len(values) == 1 else -1.0,
                list(model.fc1.weight.to_local().shape),
                model.flags,
                model.turned,
            )

    for rank, (value, shape, flags, turned) in enumerate(run_ranks(body, 4)):
        assert value == rank // 2 * 2
        assert shape == [6, WIDTH]
        assert flags.all()
        assert turned.tolist() == [[complex(rank // 2 * 2, 1)] * 2] * 3


def test_what_is_frozen_stays_frozen_and_what_is_tied_tied() -> None:
    """requires_grad and shared weights outlast the split, also of norms that work on a part of the sequence."""

    def body() -> tuple[list[str], bool, list[str]]:
        with rankwise.init(device="cpu"):
            model = nn.Sequential(Model(mlp=mlp(), norm=nn.LayerNorm(WIDTH)))
            model[0].norm.weight.requires_grad_(False)
            model[0].mlp.fc1.weight.requires_grad_(False)
            rankwise.apply_tensor_parallel(model, {"**.fc1": "colwise", "**.fc2": "rowwise"}, sequence_parallel=True)
            frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
            shared = tied()
            rankwise.apply_tensor_parallel(shared)
            names = [name for name, parameter in shared.named_parameters() if isinstance(parameter, DTensor)]
            return frozen, shared.lm_head.weight is shared.embed_tokens.weight, names

    for frozen, is_tied, names in run_ranks(body, 2):
        assert sorted(frozen) == ["0.mlp.fc1.weight", "0.norm.weight"]
        assert is_tied
        assert names == ["embed_tokens.weight", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


def test_what_is_frozen_when_it_is_split_is_summed_once_it_is_trained() -> None:
    """A norm of single heads, frozen at first: later its gradient is that of all ranks' heads."""

    def body() -> list[float]:
        with rankwise.init(device="cpu") as ctx:
            model = mlp(norm=nn.LayerNorm(WIDTH))
            model.norm.requires_grad_(False)
            rankwise.apply_tensor_parallel(model, {**MLP, "norm": "replicate_sum"})
            model.norm.requires_grad_(True)
            (model.norm(torch.ones(1, WIDTH)) * (ctx.rank + 1)).sum().backward()
            return model.norm.bias.grad.tolist()

    assert run_ranks(body, 2) == [[3.0] * WIDTH] * 2


def test_styles_of_torch_and_one_rank() -> None:
    """A plan may hold torch's own styles; on one rank the model comes back as it was."""

    def body() -> tuple[bool, list[str]]:
        with rankwise.init(device="cpu"):
            model = mlp()
            x = torch.ones(2, WIDTH)
            expected = model.fc2(model.fc1(x))
            plan = {
                "fc1": ColwiseParallel(output_layouts=Replicate()),
                "fc2": RowwiseParallel(input_layouts=Replicate()),
            }
            assert rankwise.apply_tensor_parallel(model, plan) is model
            close = torch.allclose(model.fc2(model.fc1(x)), expected, atol=1e-6)
            return close, [str(getattr(p, "placements", None)) for p in model.parameters()]

    torch.manual_seed(0)
    for is_close, placements in run_ranks(body, 1):
        assert is_close
        assert placements == ["None"] * 4
    cut = [(Shard(0),), (Shard(0),), (Shard(1),), (Replicate(),)]
    for _, placements in run_ranks(body, 2):
        assert placements == [str(each) for each in cut]


def test_the_sequence_must_be_shared_evenly() -> None:
    """A sequence that ranks can't share evenly, or an input without one, is an error that names the block and the shape."""

    def body() -> list[str]:
        with rankwise.init(device="cpu"):

            class Block(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH))

                def forward(self, hidden_states: Tensor) -> tuple[Tensor, int]:
                    return hidden_states + self.mlp(hidden_states), 7

            class Net(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.blocks = nn.ModuleList([Block()])

                def forward(self, x: Tensor) -> tuple[Tensor, int]:
                    return self.blocks[0](hidden_states=x)

            model = rankwise.apply_tensor_parallel(
                Net(), {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.1": "rowwise"}, sequence_parallel=True
            )
            output, seven = model(torch.ones(1, 4, WIDTH))
            assert (output.shape, seven) == ((1, 4, WIDTH), 7)
            texts = []
            for shape in ((1, 3, WIDTH), (4, WIDTH)):
                with pytest.raises(rankwise.UsageError) as caught:
                    model(torch.ones(*shape))
                texts.append(caught.value.message)
            return texts

    for odd, flat in run_ranks(body, 2):
        assert "'blocks.0' has the shape (1, 3, 8)" in odd
        assert "(4, 8)" in flat


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("blocks.*.attn.qkv", "blocks.0.attn.qkv", True),
        ("blocks.*.qkv", "blocks.0.attn.qkv", False),
        ("**.qkv", "blocks.0.attn.qkv", True),
        ("**.qkv", "qkv", True),
        ("blocks.**", "blocks.0.attn", True),
        ("blocks.*", "blocks.0.attn", False),
        ("block?.[qk]_proj", "blocks.q_proj", True),
        ("", "", True),
        ("", "a", False),
    ],
)
def test_patterns(pattern: str, name: str, expected: bool) -> None:
    """``*`` stays within one part of a name, ``**`` spans any number of parts, none among them."""
    assert matches(pattern, name) is expected


def test_words_of_transformers_are_ours() -> None:
    """The words of transformers' plans, of several versions, mean what ours mean."""
    words = {"colwise_rep": "colwise_gather", "colwise_gather_output": "colwise_gather", "local_colwise": "colwise", "rowwise_rep": "rowwise_split", "sequence_parallel": "sequence"}  # fmt: skip
    for theirs, ours in words.items():
        assert resolve_plan(mlp(), {"fc1": theirs})[0].word == ours


def test_what_is_not_known_of_a_plan_stays_whole() -> None:
    """Where transformers' plan has a style that is not known, or that its module can't take, all of that part stays whole, and the rest is split."""
    model = Model(moe=mlp(experts=nn.Linear(4, 4)), attn=attention().attn, mlp=mlp())
    model._tp_plan = {
        "attn.q_proj": "colwise", "attn.o_proj": "rowwise", "attn.k_proj": "compressed_colwise",
        "mlp.fc1": "colwise", "mlp.fc2": "rowwise", "moe.experts": "moe_tp_experts", "moe.experts.weight": "packed_colwise",
        "moe.fc1": "colwise", "moe.fc2": "rowwise",
    }  # fmt: skip
    model.more = mlp()  # of this it does not tell
    model.gated = attention().attn  # nor of this, whose gate would meet a part of the heads
    model.gated.gate = nn.Linear(WIDTH, WIDTH)
    rest = {"mlp.fc1": "colwise", "mlp.fc2": "rowwise", "moe.fc1": "colwise", "moe.fc2": "rowwise"}
    kept, whole = read_transformers_plan(model, 2)
    assert kept == rest
    assert "'compressed_colwise' for 'attn.k_proj'" in whole["attn"]
    assert "'moe_tp_experts' for 'moe.experts'" in whole["moe.experts"]
    assert find_ready_plan(model, 2) == {**rest, "more.fc1": "colwise", "more.fc2": "rowwise"}
    experts = Model(moe=Model(experts=Experts(3)), mlp=mlp())
    experts._tp_plan = {"moe.experts": "moe_tp_experts", "mlp.fc1": "colwise", "mlp.fc2": "rowwise"}
    assert "moe.experts" in find_ready_plan(experts, 3)
    assert "moe.experts" not in find_ready_plan(experts, 2)


def test_a_ready_plan_that_does_not_tell_of_a_parameter_leaves_its_module_whole() -> None:
    """A learned number for each head beside the projections, as GPT-OSS has it: attention stays whole, the feed-forward is split."""
    attn = attention(num_heads=4).attn
    attn.sinks = nn.Parameter(torch.zeros(4))
    model = Model(layers=nn.ModuleList([Model(attn=attn, mlp=mlp())]))
    splits, whole = leave_whole(model, resolve_plan(model, find_ready_plan(model, 2)))
    assert [split.name for split in splits] == ["layers.0.mlp.fc1", "layers.0.mlp.fc2"]
    assert list(whole) == ["layers.*.attn"]
    assert "'layers.*.attn.sinks', shape (4,)" in whole["layers.*.attn"]


def test_a_plan_of_the_head_alone_is_none() -> None:
    """Some models of transformers name nothing but their head: then the names of the layers count."""
    model = tied()
    model._tp_plan = {"lm_head": "colwise_gather_output"}
    assert find_ready_plan(model, 2) == {**MLP, "embed_tokens": "rowwise_embed", "lm_head": "colwise_gather"}


def run_experts(used: int, kind: type[Experts]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model, x = Mixture(used, kind).double(), torch.arange(5 * WIDTH, dtype=torch.float64).sin().view(5, WIDTH).requires_grad_()  # fmt: skip
    if torch.distributed.is_initialized():
        rankwise.apply_tensor_parallel(model, {"experts": "experts"})
        assert list(model.experts.weights.to_local().shape) == [2, WIDTH, WIDTH]
    y = model(x)
    y.square().sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters()}
    return y.detach(), x.grad, {name: getattr(one, "full_tensor", one.clone)() for name, one in gradients.items()}


class FusedAttention(nn.Module):
    """As in timm's ViT with qk_norm: one layer for query, key and value, and norms of single heads behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(self.q_norm(query), self.k_norm(key), value)
        return self.proj(y.transpose(1, 2).flatten(2))


def run_fused_attention() -> dict[str, Tensor]:
    model = Model(attn=FusedAttention()).double()
    if torch.distributed.is_initialized():
        rankwise.apply_tensor_parallel(model)
    model.attn(torch.arange(10 * WIDTH, dtype=torch.float64).sin().view(2, 5, WIDTH)).square().sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters()}
    return {name: getattr(one, "full_tensor", one.clone)() for name, one in gradients.items()}


def test_norms_of_heads_that_every_rank_computes_are_not_summed() -> None:
    """Behind a fused layer, whose outputs are gathered, each rank has all heads, and so the whole gradient of their norms."""

    def body() -> dict[str, Tensor]:
        with rankwise.init(device="cpu"):
            return run_fused_attention()

    expected = run_fused_attention()
    for found in run_ranks(body, 2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def run_in_place() -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    model, x = mlp().double(), torch.arange(5 * WIDTH, dtype=torch.float64).sin().view(5, WIDTH)
    if torch.distributed.is_initialized():
        rankwise.apply_tensor_parallel(model, MLP)
    hidden = model.fc1(x)
    hidden *= 2
    y = model.fc2(hidden.relu())
    y += x
    y.square().sum().backward()
    gradients = (one.grad for one in model.parameters())
    return y.detach(), [getattr(one, "full_tensor", one.clone)() for one in gradients]


def test_outputs_of_split_layers_can_be_changed_in_place() -> None:
    """``y += residual`` after a split layer, as in Falcon, has the output and the gradients of one process."""

    def body() -> tuple[Tensor, list[Tensor]]:
        with rankwise.init(device="cpu"):
            return run_in_place()

    expected = run_in_place()
    for found in run_ranks(body, 2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("used", "kind"), [(4, Experts), (2, Experts), (4, OtherExperts)], ids=["all", "those of one rank", "GPT-OSS"]
)
def test_experts_are_shared_out(used: int, kind: type[Experts]) -> None:
    """Each of two ranks has half of the experts, and output and gradients are those of one process, also where no token comes to a rank."""

    def body() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        with rankwise.init(device="cpu"):
            return run_experts(used, kind)

    expected = run_experts(used, kind)
    for found in run_ranks(body, 2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_vocabulary_that_is_odd_stays_whole_in_ready_plans() -> None:
    """Where nobody has asked for the vocabulary to be split, one that can't be is left out, with what shares its weight."""
    assert find_ready_plan(tied(rows=9), 2) == MLP
    assert find_ready_plan(tied(), 2) == {**MLP, "embed_tokens": "rowwise_embed", "lm_head": "colwise_gather"}


def test_fused_layers_of_ready_plans_are_cut_and_gathered() -> None:
    """Of nanoGPT's attention each rank holds a part of the weights and computes all heads; the feed-forward is split."""
    block = Model(
        attn=Model(c_attn=nn.Linear(8, 24), c_proj=nn.Linear(8, 8)),
        mlp=Model(c_fc=nn.Linear(8, 32), c_proj=nn.Linear(32, 8)),
    )
    assert find_ready_plan(Model(h=nn.ModuleList([block])), 2) == {
        "h.0.attn.c_attn": "colwise_gather", "h.0.attn.c_proj": "rowwise_split",
        "h.0.mlp.c_fc": "colwise", "h.0.mlp.c_proj": "rowwise",
    }  # fmt: skip
    mixer = Model(
        in_proj=nn.Linear(8, 32), conv1d=nn.Conv1d(16, 16, 3), x_proj=nn.Linear(16, 8), out_proj=nn.Linear(16, 8)
    )
    assert find_ready_plan(Model(block=block, mixer=mixer), 2).keys().isdisjoint({"mixer.in_proj", "mixer.x_proj"})
