"""apply_fsdp: what is cut and gathered, models from the meta device, and each likely mistake as one clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import rankwise
from rankwise.parallel.blocks import find_blocks
from rankwise.parallel.dtensors import total_norm
from rankwise.testing import run_ranks


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(size),
            nn.Linear(size, 2 * size),
            nn.Linear(2 * size, size),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    """Embedding and head share a weight; three blocks."""

    def __init__(self, size: int = 6, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, size)
        self.layers = nn.ModuleList(Block(size) for _ in range(3))
        self.head = nn.Linear(size, 5, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.second = nn.Sequential(nn.Linear(3, 3), self.first[0])


@pytest.mark.parametrize(
    ("blocks", "names"),
    [
        ("auto", ["layers.0", "layers.1", "layers.2"]),
        (Block, ["layers.0", "layers.1", "layers.2"]),
        ("layers.*", ["layers.0", "layers.1", "layers.2"]),
        (["layers.2", nn.Embedding], ["embed", "layers.2"]),
        (150, ["layers.0", "layers.1", "layers.2"]),
        ("*.*.up", ["layers.0.up", "layers.1.up", "layers.2.up"]),
    ],
)
def test_blocks_are_found(blocks: Any, names: list[str]) -> None:
    """By repetition, class, name pattern or size, in the model's order."""
    assert list(find_blocks(Net(), blocks)) == names


@pytest.mark.parametrize("blocks", ["layer.*", nn.Conv2d, 10**9, [], 3.5, [3]])
def test_blocks_that_are_not_there_are_named(blocks: Any) -> None:
    """What was asked for and what the model has."""
    with pytest.raises(rankwise.UsageError):
        find_blocks(Net(), blocks)


def look_inside() -> dict[str, Any]:
    with rankwise.init(device="cpu") as ctx:
        torch.manual_seed(ctx.rank)
        model = rankwise.apply_fsdp(Net())
        first = model.layers[0].up.weight.full_tensor().detach().clone()
        model(torch.arange(5)[None]).sum().backward()
        rankwise.check_replicas(model)
        if ctx.rank == 0:
            with torch.no_grad():
                model.layers[1].norm.bias.to_local().add_(1)
        rankwise.check_replicas(model)  # each rank has its own shard
        return {
            "sharded": sorted(name for name, one in model.named_modules() if isinstance(one, FSDPModule)),
            "local": sum(one.to_local().numel() for one in model.parameters()),
            "all": sum(one.numel() for one in Net().parameters()),
            "tied": model.head.weight is model.embed.weight,
            "first": first,
        }  # fmt: skip


def test_each_rank_holds_its_share() -> None:
    """Blocks and the whole are gathered apart, tied weights stay tied, the ranks begin with rank 0's weights and hold 1/n of them."""
    found = run_ranks(look_inside, 3)
    assert all(one["sharded"] == ["", "layers.0", "layers.1", "layers.2"] for one in found)
    assert sum(one["local"] for one in found) == found[0]["all"]
    assert max(one["local"] for one in found) <= 0.5 * found[0]["all"]
    assert all(one["tied"] for one in found)
    torch.manual_seed(0)
    expected = Net().layers[0].up.weight
    assert all(torch.equal(one["first"], expected) for one in found)


def drift() -> str:
    with rankwise.init(device="cpu", mesh={"replicate": 2, "shard": 2}) as ctx:
        model = rankwise.apply_fsdp(Net())
        rankwise.check_replicas(model)
        if ctx.rank == 3:
            with torch.no_grad():
                model.layers[1].up.bias.to_local().add_(1)
        with pytest.raises(rankwise.ModelError) as caught:
            rankwise.check_replicas(model)
        return str(caught.value)


def test_copies_of_a_shard_must_agree() -> None:
    """Under HSDP ranks 1 and 3 hold the same shards: where these drift apart, shard and ranks are named."""
    for text in run_ranks(drift, 4):
        assert "layers.1.up.bias[6:12]" in text
        assert "rank 1; rank 3" in text


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.table


def start_from_meta(shards: int) -> dict[str, Tensor]:
    def fill(module: nn.Module) -> None:
        if isinstance(module, Rotary):
            nn.init.normal_(module.scale)
            module.table.copy_(torch.arange(3.0))
        else:
            module.reset_parameters()

    with rankwise.init(device="cpu", mesh={"shard": shards}):
        with torch.device("meta"):
            model, other = Net(), nn.Sequential(nn.Linear(3, 3), Rotary(), nn.Linear(3, 3))
        rankwise.apply_fsdp(model)
        rankwise.apply_fsdp(other, init_weights=fill)
        assert model.head.weight is model.embed.weight
        model(torch.arange(5)[None]).sum().backward()
        with torch.device("meta"):
            empty = rankwise.apply_fsdp(Net(), init_weights=False)
        assert all(one.full_tensor().isnan().all() for one in empty.parameters())
        values = {
            f"{number}.{name}": one
            for number, made in enumerate((model, other))
            for name, one in made.state_dict().items()
        }
        return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in values.items()}


def test_models_from_the_meta_device_are_the_same_at_any_size() -> None:
    """Weights that are made block by block, seeded by name, are equal at 1, 2 and 3 ranks, and no two layers are equal."""
    alone = run_ranks(start_from_meta, 1, 1)[0]
    for size in (2, 3):
        for found in run_ranks(start_from_meta, size, size):
            assert found.keys() == alone.keys()
            assert all(torch.equal(value, found[name]) for name, value in alone.items())
    assert not torch.equal(alone["0.layers.0.up.weight"], alone["0.layers.1.up.weight"])
    assert alone["0.layers.0.up.weight"].abs().max() < 1


def recompute(mode: Any) -> list[float]:
    """Two steps; then count how often each block's first layer runs in a step."""
    with rankwise.init(device="cpu"):
        torch.manual_seed(0)
        model = Net(is_tied=False).double()
        if mode is not None:
            rankwise.apply_checkpointing(model, mode)
        calls: list[str] = []
        for name, layer in model.layers.named_children():
            layer.norm.register_forward_hook(lambda *_, name=name: calls.append(name))
        assert list(model.state_dict()) == list(Net(is_tied=False).state_dict())
        rankwise.apply_fsdp(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            calls.clear()
            loss = model(torch.arange(5)[None]).logsumexp(-1).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return [*losses, float(len(calls))]


def test_activations_computed_again_are_the_same() -> None:
    """Full, every second block, and selective checkpointing: equal losses, and as many blocks run twice as were asked for."""
    plain = run_ranks(recompute, 2, None)[0]
    for mode, number in (("full", 6), (2, 5), ("selective", 6)):
        found = run_ranks(recompute, 2, mode)[0]
        assert found[:-1] == plain[:-1], mode
        assert found[-1] == number, mode
    assert plain[-1] == 3


def misuse(case: str) -> tuple[str, str]:
    options: dict[str, Any] = {}
    mesh, model = None, Net()
    rank = int(__import__("os").environ["RANK"])
    if case == "copies only":
        mesh = {"replicate": 2}
    elif case == "twice":
        options["before"] = rankwise.apply_fsdp
    elif case == "after fully_shard":
        options["before"] = fully_shard
    elif case == "wrapped":
        options["before"] = rankwise.apply_ddp
    elif case == "precision":
        options["precision"] = "int8"
    elif case == "other blocks":
        options["blocks"] = Block if rank else nn.Linear
    elif case == "other shapes":
        model = Net(6 + rank)
    elif case == "no initialisation":
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 3), Rotary())
    elif case == "lost buffer":
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 3), Rotary())
        options["init_weights"] = lambda module: [nn.init.normal_(one) for one in module.parameters(recurse=False)]
    elif case == "lazy":
        model = nn.Sequential(nn.LazyLinear(3))
    before = options.pop("before", None)
    with rankwise.init(device="cpu", mesh=mesh):
        model = model if before is None else before(model)
        with pytest.raises(rankwise.RankwiseError) as caught:
            rankwise.apply_fsdp(model, **options)
        return str(caught.value), caught.value.hint or ""


MISTAKES = {
    "copies only": "2 copies and 1 shard would shard nothing",
    "twice": "was passed to fully_shard or apply_fsdp already",
    "after fully_shard": "was passed to fully_shard or apply_fsdp already",
    "wrapped": "is wrapped in DistributedDataParallel already",
    "precision": "precision='int8'",
    "other blocks": "apply_fsdp was called with different options: blocks is",
    "other shapes": "the ranks hold different models",
    "no initialisation": "nothing initialises '1.scale', '1.table': give Rotary a reset_parameters()",
    "lost buffer": "'1.table' of a Rotary",
    "lazy": "not initialised yet",
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_clear_error(case: str) -> None:
    """The same error on every rank; none hangs."""
    for text, _ in run_ranks(misuse, 2, case):
        assert MISTAKES[case] in text


def train_wrongly(case: str) -> str:
    with rankwise.init(device="cpu") as ctx:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sharded = rankwise.apply_fsdp(model, defer_gradients=True)
        loader = rankwise.DataLoader(torch.arange(10)[:, None], global_batch=4)
        inputs = torch.arange(5)[None]

        def take(number: int, *, leaves: bool = False) -> None:
            for micro in rankwise.accumulate(sharded, [inputs] * number):
                sharded(micro).sum().backward()
                if leaves:
                    break

        def train() -> None:
            if case == "old optimizer":
                config = rankwise.TrainerConfig(steps=1)
                rankwise.Trainer(sharded, optimizer, loader, lambda m, b: m(b).sum(), config=config)
            elif case == "other numbers":
                take(1 + ctx.rank)
            elif case == "bare":
                list(rankwise.accumulate(Net(), [inputs]))
            else:
                take(2, leaves=True)
                take(2)

        with pytest.raises(rankwise.RankwiseError) as caught:
            train()
        return str(caught.value)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("old optimizer", "are not the model's"),
        ("left early", "left after 1 micro-batch(es), and the sharded model still holds"),
        ("other numbers", "with sharded parameters every rank must run the same number of micro-batches: rank 0 1, rank 1 2"),
        ("bare", "this Net is not spread over the ranks"),
    ],
)  # fmt: skip
def test_loops_that_go_wrong_say_so(case: str, words: str) -> None:
    """An optimizer of the old parameters, a step left early, unequal micro-batches, a model that nobody spread."""
    for text in run_ranks(train_wrongly, 2, case):
        assert words in text


def measure_norms() -> list[float]:
    with rankwise.init(device="cpu", mesh={"replicate": 1, "shard": 2}):
        torch.manual_seed(0)
        model = rankwise.apply_fsdp(Net().double())
        plain = torch.full((7,), 2.0, dtype=torch.float64)
        model(torch.arange(5)[None]).square().sum().backward()
        gradients = [one.grad for one in model.parameters()]
        whole = [one.full_tensor() for one in gradients]
        return [
            float(total_norm(gradients)), float(torch.nn.utils.get_total_norm(whole)),
            float(total_norm([*gradients, plain])), float(torch.nn.utils.get_total_norm([*whole, plain])),
        ]  # fmt: skip


def test_norms_of_shards_and_plain_tensors_are_one_number() -> None:
    """The norm of shards, and of shards and plain tensors together, is that of the whole tensors."""
    for sharded, whole, mixed, whole_mixed in run_ranks(measure_norms, 2):
        assert sharded == pytest.approx(whole, rel=1e-14)
        assert mixed == pytest.approx(whole_mixed, rel=1e-14)


def take_gradients(precision: str) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    with rankwise.init(device="cpu") as ctx:
        torch.manual_seed(0)
        model = rankwise.apply_fsdp(
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), precision=precision
        )
        model(torch.full((3, 4), 1.0 + ctx.rank)).sum().backward()
        return {name: one.grad.full_tensor().float() for name, one in model.named_parameters()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_the_mean_over_the_ranks_in_each_precision(precision: str) -> None:
    """Gloo of torch 2.8 sums where a mean is asked for, in fp32 and bf16: two ranks' gradients are those of the mean of their losses all the same."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    (sum(model(torch.full((3, 4), 1.0 + rank)).sum() for rank in range(2)) / 2).backward()
    for found in run_ranks(take_gradients, 2, precision, timeout_s=60):
        for name, one in model.named_parameters():
            torch.testing.assert_close(found[name], one.grad, rtol=2e-2 if precision == "bf16" else 1e-5, atol=2e-2)
