"""The losses of a model split over W ranks are those of one process: tensor parallelism against a loop that knows nothing of ranks."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel
from torch.nn.functional import cross_entropy

import rankwise
from rankwise.parallel.tensor_plans import find_ready_plan
from rankwise.testing import run_ranks
from small_gpt import WIDTH, Gpt

NUM_STEPS, BATCH, SEQUENCE, VOCABULARY = 5, 3, 8, 24
#: Float64 has 53 bits. SGD adds what it is given: the order of sums shows as rounding only. AdamW divides by the root of the second
#: moment, which is as small as the gradient where that vanishes: a relative error of 1e-16 becomes one of 1e-12 and more.
TOLERANCE = {"sgd": 1e-12, "adamw": 1e-9}

MLP_PLAN = {"net.up": "colwise", "net.down": "rowwise", "head": "colwise_gather"}
GPT_PLAN = {
    "tokens": "rowwise_embed", "blocks.*.attention.[qkv]": "colwise", "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise", "head": "colwise_gather",
}  # fmt: skip


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.net = nn.ModuleDict({"up": nn.Linear(WIDTH, 32), "down": nn.Linear(32, WIDTH)})
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.head(self.net["down"](self.net["up"](self.tokens(tokens_BS)).tanh()))


def build_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "mlp":
        return Mlp().double()
    if kind in ("llama", "qwen", "bert", "vit", "gpt2", "mixture"):
        return build_transformers(kind)
    model = Gpt(VOCABULARY, SEQUENCE, tied=kind == "tied", head_norm=kind == "head_norm").double()
    with torch.no_grad():  # norms begin as ones: a wrong one would not show
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.rand_like(parameter))
    return model


def build_transformers(kind: str) -> nn.Module:
    import transformers

    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    words = {**size, "vocab_size": VOCABULARY, "max_position_embeddings": 16}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if kind == "llama":
        config = transformers.LlamaConfig(**words, num_key_value_heads=4, tie_word_embeddings=True)
        model = transformers.LlamaForCausalLM(config)
    elif kind == "qwen":
        config = transformers.Qwen3Config(**words, num_key_value_heads=4, head_dim=8)
        model = transformers.Qwen3ForCausalLM(config)
    elif kind == "mixture":
        experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
        config = transformers.Qwen3MoeConfig(**words, **experts, num_key_value_heads=4, head_dim=8, mlp_only_layers=[1], experts_implementation="eager")  # fmt: skip
        model = transformers.Qwen3MoeForCausalLM(config)
    elif kind == "gpt2":
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=16, **none)
        model = transformers.GPT2LMHeadModel(config)
    elif kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**words, **off))
    else:
        config = transformers.ViTConfig(**size, **off, image_size=8, patch_size=4, num_labels=VOCABULARY)
        model = transformers.ViTForImageClassification(config)
    return model.double()


def make_batch(kind: str, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    if kind == "vit":
        images = torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64)
        return images, torch.randint(VOCABULARY, (BATCH,), generator=generator)
    tokens_BS = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    return tokens_BS[:, :-1], tokens_BS[:, 1:]


def train(kind: str, optimizer_kind: str, model: nn.Module, *, splits_logits: bool = False) -> list[float]:
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if optimizer_kind == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=0.01)
    )
    losses = []
    for step in range(NUM_STEPS):
        inputs, targets = make_batch(kind, step)
        with loss_parallel() if splits_logits else contextlib.nullcontext():
            logits = model(inputs)
            logits = getattr(logits, "logits", logits)
            loss = cross_entropy(logits.flatten(0, -2), targets.flatten())
            loss.backward()
        for one in model.parameters():  # an optimizer of torch 2.8 would count each part as the whole
            assert not any(placement.is_partial() for placement in getattr(one.grad, "placements", ()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@functools.cache
def train_alone(kind: str, optimizer_kind: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.set_num_threads(1)
    model = build_model(kind)
    losses = train(kind, optimizer_kind, model)
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def train_split(
    cases: list[tuple[str, str, dict[str, Any] | None, dict[str, bool]]],
) -> list[tuple[list[float], dict[str, Tensor], list[str]]]:
    torch.set_num_threads(1)
    found = []
    with rankwise.init(device="cpu") as ctx:
        for kind, optimizer_kind, plan, options in cases:
            model = build_model(kind)
            if ctx.rank:  # other weights on each rank: all must start from those of rank 0
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(ctx.rank)
            splits_logits, chosen = options.pop("splits_logits", False), plan
            if splits_logits:
                style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
                name = next(one for one, _ in model.named_modules() if one.endswith("head"))
                chosen = {**(plan or find_ready_plan(model, ctx.world_size)), name: style}
            assert rankwise.apply_tensor_parallel(model, chosen, **options) is model
            losses = train(kind, optimizer_kind, model, splits_logits=splits_logits)
            whole = {
                name: value.full_tensor() if hasattr(value, "full_tensor") else value
                for name, value in model.named_parameters()
            }
            split = [name for name, value in model.named_parameters() if hasattr(value, "placements")]
            found.append((losses, {name: value.detach() for name, value in whole.items()}, split))
    return found


def assert_same(cases: list[tuple[str, str, dict[str, Any] | None, dict[str, bool]]], world_size: int) -> None:
    for rank, found in enumerate(run_ranks(train_split, world_size, cases)):
        for (kind, optimizer, _, options), (losses, weights, split) in zip(cases, found, strict=True):
            what = f"rank {rank} of {world_size}, {kind}, {optimizer}, {options}"
            expected_losses, expected = train_alone(kind, optimizer)
            assert split, what
            assert weights.keys() == expected.keys(), what
            worst = max(abs(a - b) / b for a, b in zip(losses, expected_losses, strict=True))
            assert worst <= TOLERANCE[optimizer], f"{what}: the losses differ by {worst:.2e}"
            for name, value in expected.items():
                torch.testing.assert_close(
                    weights[name], value, rtol=0, atol=100 * TOLERANCE[optimizer],
                    msg=lambda text, name=name, what=what: f"{what}, {name}: {text}",
                )  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 4])
def test_mlp_and_gpt_are_those_of_one_process(world_size: int) -> None:
    """Losses and weights of five steps, SGD to 1e-12 and AdamW to 1e-9 in float64: whole logits, and split ones."""
    assert_same(
        [
            (kind, optimizer, plan, {"splits_logits": splits_logits})
            for kind, plan in (("mlp", MLP_PLAN), ("gpt", GPT_PLAN))
            for optimizer in ("sgd", "adamw")
            for splits_logits in (False, True)
        ],
        world_size,
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_sequence_parallel_changes_nothing(world_size: int) -> None:
    """With activations split along the sequence, losses and weights are the same, norms' among them."""
    assert_same(
        [
            ("gpt", optimizer, GPT_PLAN, {"sequence_parallel": True, "splits_logits": splits_logits})
            for optimizer in ("sgd", "adamw")
            for splits_logits in (False, True)
        ],
        world_size,
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tied_weights_stay_one(sequence_parallel: bool) -> None:
    """An embedding and a head that share a weight share it afterwards, and train as in one process."""
    assert_same([("tied", "sgd", GPT_PLAN, {"sequence_parallel": sequence_parallel})], 2)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms_of_single_heads_get_the_sum(sequence_parallel: bool) -> None:
    """A norm that each rank applies to its own heads has the whole gradient by 'replicate_sum'."""
    plan = {**GPT_PLAN, "**.q_norm": "replicate_sum"}
    assert_same([("head_norm", "sgd", plan, {"sequence_parallel": sequence_parallel})], 4)


@pytest.mark.parametrize("world_size", [2, 4])
def test_transformers_models_have_ready_plans(world_size: int) -> None:
    """Llama and GPT-2 with tied weights, Qwen with norms of heads, BERT, ViT and a mixture of experts, without a plan, are those of one process."""
    pytest.importorskip("transformers")
    cases: list[Any] = [(kind, "sgd", None, {}) for kind in ("llama", "qwen", "bert", "vit", "gpt2", "mixture")]
    cases += [(kind, "sgd", None, {"splits_logits": True}) for kind in ("llama", "gpt2")]
    assert_same(cases, world_size)


def test_transformers_models_with_sequence_parallel() -> None:
    """Llama, Qwen and GPT-2 (norms first) and BERT (norms last) with activations split along the sequence."""
    pytest.importorskip("transformers")
    assert_same([(kind, "sgd", None, {"sequence_parallel": True}) for kind in ("llama", "qwen", "gpt2", "bert")], 2)
