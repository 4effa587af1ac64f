"""What is measured of a model's units is what training it takes, and measuring leaves no trace."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rankwise.base.errors import ModelError
from rankwise.parallel.blocks import find_units
from rankwise.parallel.costs import list_owned, measure_costs
from rankwise.parallel.partition import balance
from small_gpt import Gpt

TOKENS = torch.arange(32).reshape(4, 8) % 50


def build_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(16, 4),
    )  # fmt: skip


def count_saved(model: nn.Module, batch: Any) -> int:
    """Return the bytes that a training forward keeps, as autograd itself packs them."""
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}

    def pack(one: Tensor) -> Tensor:
        saved[one.untyped_storage().data_ptr()] = one
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        result = model(batch)
    del result
    return sum(one.untyped_storage().nbytes() for key, one in saved.items() if key not in own)


def test_units_are_blocks_and_what_stands_around_them() -> None:
    """Of a GPT: embeddings, each block, the last norm, the head; of a Sequential each child."""
    assert list(find_units(Gpt(50, 8))) == ["tokens", "positions", "blocks.0", "blocks.1", "norm", "head"]
    assert list(find_units(build_layers())) == ["0", "1", "2", "3", "4", "5", "6"]
    assert list(find_units(nn.Linear(2, 2))) == [""]


def test_units_come_in_the_order_of_their_calls() -> None:
    """Not in that of the model's attributes; one that is never called stays beside its neighbour."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.spare, self.body = nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    assert [one.name for one in measure_costs(Backwards(), torch.ones(2, 4))] == ["body", "head", "spare"]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_bytes_are_those_of_a_training_step(optimizer: str) -> None:
    """Parameters, buffers, gradients and states add up to what a step has made; a shared weight counts once, at its first unit."""
    model = Gpt(50, 8, tied=True)
    costs = {one.name: one for one in measure_costs(model, TOKENS, optimizer=optimizer)}
    stepped = (torch.optim.AdamW if optimizer == "adamw" else torch.optim.SGD)(model.parameters())
    model(TOKENS).sum().backward()
    stepped.step()
    states = sum(one.nbytes for held in stepped.state.values() for one in held.values() if isinstance(one, Tensor))  # fmt: skip
    weights = sum(one.nbytes for one in model.parameters())
    assert sum(one.memory.parameters for one in costs.values()) == weights
    assert sum(one.memory.gradients for one in costs.values()) == weights
    assert sum(one.memory.optimizer for one in costs.values()) == states
    assert "tokens.weight" in costs["tokens"].tensors
    assert costs["head"].memory.parameters == costs["head"].memory.optimizer == 0


def test_activations_add_up_to_those_of_the_whole_model() -> None:
    """What each unit keeps by itself is, summed, what the whole forward keeps: what two neighbours share is counted once."""
    layers = build_layers()
    costs = measure_costs(layers, torch.randn(5, 8))
    assert sum(one.memory.activations or 0 for one in costs) == count_saved(layers, torch.randn(5, 8))
    blocks = [one for one in measure_costs(Gpt(50, 8), TOKENS) if one.name.startswith("blocks.")]
    assert blocks[0].memory.activations == blocks[1].memory.activations == count_saved(Gpt(50, 8).blocks[0], torch.randn(4, 8, 16, requires_grad=True))  # fmt: skip


def test_measuring_leaves_no_trace() -> None:
    """Weights, running statistics, gradients, random numbers and the modules' forwards are what they were."""
    model = build_layers()
    before, state = {name: one.clone() for name, one in model.state_dict().items()}, torch.get_rng_state()
    measure_costs(model, torch.ones(5, 8), device=torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())
    assert not any("forward" in vars(one) for one in model.modules())


def test_time_grows_with_the_work() -> None:
    """A layer of 64 times the work counts more than 4 times as much, forward and backward; on a device both are measured."""
    sizes = ((64, 64), (64, 512), (512, 512), (512, 8))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(*each) for each in sizes))
    counted = measure_costs(model, torch.empty(512, 64, device="meta"))
    assert counted[2].time > 4 * counted[0].time > 0
    measured = measure_costs(nn.Sequential(*(nn.Linear(*each) for each in sizes)), torch.randn(512, 64))
    assert all(one.time > 0 for one in measured)


def test_a_model_on_the_meta_device_is_counted() -> None:
    """Operations of a linear layer: 2 x in x out for each sample, and twice that backward; a first layer has no gradient of its input."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    first, _, last = measure_costs(model, torch.empty(5, 8))
    assert first.time == 2 * 2 * 5 * 8 * 16
    assert last.time == 3 * 2 * 5 * 16 * 4
    assert all(one.is_meta for one in model.parameters())


def test_the_cut_is_within_five_percent_of_the_best_of_all_cuts() -> None:
    """Of a model with uneven layers, on three devices: each cut's stages are run whole, and their operations counted."""
    widths = [32, 256, 48, 16, 192, 192, 24, 320, 8]
    model = nn.Sequential(*(nn.Linear(one, two) for one, two in pairwise(widths)))
    batch = torch.randn(4, widths[0])
    costs = measure_costs(nn.Sequential(*(nn.Linear(one, two, device="meta") for one, two in pairwise(widths))), batch)

    def work(begin: int, end: int) -> int:
        x = torch.randn(4, widths[begin], requires_grad=begin > 0)
        with FlopCounterMode(display=False) as counter:
            model[begin:end](x).sum().backward()
        return counter.get_total_flops()

    def find_slowest(*cut: int) -> int:
        return max(work(begin, end) for begin, end in pairwise((*cut, len(model))))

    best = min(find_slowest(0, one, two) for one in range(1, len(model)) for two in range(one + 1, len(model)))  # fmt: skip
    assert find_slowest(*balance([one.time for one in costs], 3)) <= 1.05 * best


def test_a_batch_that_does_not_fit_is_an_error_in_one_line() -> None:
    """It has torch's reason, and what to look at; the model's forwards are restored."""
    model = build_layers()
    with pytest.raises(
        ModelError, match=r"can't be measured with this batch: RuntimeError: (addmm: )?mat1 and mat2 shapes"
    ):
        measure_costs(model, torch.ones(5, 9))
    assert not any("forward" in vars(one) for one in model.modules())


def test_what_lies_around_units_goes_with_the_first_inside() -> None:
    """A parameter of the model itself, such as a class token, belongs to the unit that is called first."""

    class WithToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(4))
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    owned = list_owned(WithToken(), ["body", "head"])
    assert owned == {"body": ["token", "body.weight", "body.bias"], "head": ["head.weight", "head.bias"]}
