"""A model on two devices of one process trains as on one; the second device is tests/pretend_device.py, which torch keeps apart from the CPU."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import pretend_device
import rankwise
from one_process import TOLERANCE, build_optimizer
from pretend_device import needs_pretend
from rankwise.testing import run_ranks
from small_gpt import Gpt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = needs_pretend
VOCABULARY, SEQUENCE, NUM_STEPS = 50, 8, 5
TOKENS = (torch.arange(32).reshape(4, SEQUENCE) * 7) % VOCABULARY
HALVES = {"tokens": "cpu", "positions": "cpu", "blocks.0": "cpu", "blocks.1": 0, "norm": 0, "head": 0}
BACK_AND_FORTH = {"tokens": "cpu", "positions": "cpu", "blocks.0": 0, "blocks.1": "cpu", "norm": "pretend:0", "h*": torch.device("cpu")}  # fmt: skip


def on_two_devices(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a process that has both devices."""

    def run() -> Any:
        pretend_device.install()
        return function(*args)

    return run_ranks(run, 1, timeout_s=60)[0]


def build(*, tied: bool = False) -> Gpt:
    torch.manual_seed(0)
    return Gpt(VOCABULARY, SEQUENCE, tied=tied).double()


def train(model: nn.Module) -> list[float]:
    optimizer = build_optimizer("sgd", model)
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def to_cpu(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.cpu() for name, one in model.state_dict().items()}


def assert_trained_alike(losses: list[float], state: dict[str, Tensor], *, tied: bool = False) -> None:
    alone = build(tied=tied)
    torch.testing.assert_close(losses, train(alone), rtol=0, atol=TOLERANCE["sgd"])
    assert list(state) == list(alone.state_dict())
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=TOLERANCE["sgd"])


@pytest.mark.parametrize("where", [HALVES, BACK_AND_FORTH], ids=["halves", "back and forth"])
def test_a_placed_model_trains_as_in_one_place(where: dict[str, Any]) -> None:
    """Five steps of SGD with momentum and clipping, in a plain loop: losses and weights are equal, and each part is where it was placed."""

    def run() -> Any:
        model = rankwise.place(build(), where)
        devices = {name: str(one.weight.device) for name, one in model.named_modules() if hasattr(one, "weight")}
        return train(model), to_cpu(model), devices

    losses, state, devices = on_two_devices(run)
    assert_trained_alike(losses, state)
    on_pretend = ("blocks.1", "norm", "head") if where is HALVES else ("blocks.0", "norm")
    assert devices == {name: "pretend:0" if name.startswith(on_pretend) else "cpu" for name in devices}


def test_tied_weights_stay_one_tensor() -> None:
    """Embedding and head on one device, with blocks of another between them; "auto" and "balanced" keep them together by themselves."""

    def run() -> Any:
        tied = {**HALVES, "head": "cpu"}
        model = rankwise.place(build(tied=True), tied)
        assert model.head.weight is model.tokens.weight
        losses, state = train(model), to_cpu(model)
        for how in ("auto", "balanced"):
            cut = rankwise.place(build(tied=True), how, devices=["cpu", 0], example=TOKENS)
            assert cut.head.weight is cut.tokens.weight
            torch.testing.assert_close(train(cut), losses, rtol=0, atol=TOLERANCE["sgd"])
        return losses, state

    assert_trained_alike(*on_two_devices(run), tied=True)


@pytest.mark.parametrize(("outputs", "device"), [("inputs", "cpu"), ("last", "pretend:0"), (0, "pretend:0"), ("cpu", "cpu")])  # fmt: skip
def test_outputs_go_where_they_are_wanted(outputs: Any, device: str) -> None:
    """Where the inputs were, where they were made, or on a device of the caller's choice."""

    def run() -> str:
        return str(rankwise.place(build(), HALVES, outputs=outputs)(TOKENS).device)

    assert on_two_devices(run) == device


@dataclass
class Batch:
    x: Tensor
    extra: dict[str, Any]


class Nested(nn.Module):
    """Hands a dataclass with a dict with a tuple from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NestedLayer() for _ in range(4))

    def forward(self, batch: Batch, *, scale: Tensor) -> dict[str, Any]:
        for layer in self.layers:
            batch = layer(batch, scale=scale)
        return {"x": batch.x, "notes": batch.extra["notes"]}


class NestedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: Batch, *, scale: Tensor) -> Batch:
        x = self.linear(batch.x) * scale + batch.extra["bias"][0]
        return Batch(x, {**batch.extra, "notes": (*batch.extra["notes"], str(x.device))})


class Copies(TorchDispatchMode):
    """Counts copies from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wanted = (kwargs or {}).get("device")
        is_move = str(func) == "aten._to_copy.default" and wanted is not None and wanted != args[0].device
        self.num_copies += is_move
        return func(*args, **(kwargs or {}))


def test_nested_inputs_are_moved_and_masks_only_once() -> None:
    """Tensors in dataclasses, dicts, tuples and keywords reach each layer; what all layers of a device share is copied there once."""

    def run() -> Any:
        torch.manual_seed(0)
        model = Nested()
        batch = Batch(torch.ones(2, 4), {"bias": (torch.ones(4),), "notes": ()})
        expected = model(batch, scale=torch.tensor([2.0]))["x"]
        rankwise.place(model, {"layers.0": "cpu", "layers.1-3": 0})
        with Copies() as copies:
            found = model(batch, scale=torch.tensor([2.0]))
        torch.testing.assert_close(found["x"], expected)
        found["x"].sum().backward()
        return found["notes"], copies.num_copies, [str(one.linear.weight.grad.device) for one in model.layers]

    places, num_copies, of_gradients = on_two_devices(run)
    assert list(places) == of_gradients == ["cpu", "pretend:0", "pretend:0", "pretend:0"]
    # There: x, the bias, the scale; and back: x, the bias is not returned.
    assert num_copies == 4


class Chain(nn.Module):
    """Layers one after the other; what a class below computes between them meets on two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.follow(self.embed(x)))

    def follow(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Residual(Chain):
    def forward(self, x: Tensor) -> Tensor:
        first = self.embed(x)
        return self.head(torch.cat([self.follow(first), first], dim=-1)[..., 2:6])


class Masked(Chain):
    def follow(self, x: Tensor) -> Tensor:
        mask = torch.ones(len(x), 1, device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x) * mask
        return x.mul_(self.scale)


class Tied(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.follow(self.embed(x)), self.embed.weight)


class WithLoss(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(super().forward(x), x)


class Turning(Chain):
    """In evaluation it computes over the cut from its second forward on."""

    count = 0

    def follow(self, x: Tensor) -> Tensor:
        first, self.count = x, self.count + 1
        x = super().follow(x)
        return x if self.count == 1 else x + first


@pytest.mark.parametrize("kind", [Residual, Masked, Tied, WithLoss])
def test_what_modules_compute_between_devices_is_moved(kind: type[Chain]) -> None:
    """A residual over the cut, a mask made first, a buffer of the model, a tied weight, a loss inside: output and gradients are one device's."""

    def run() -> Any:
        torch.manual_seed(0)
        alone = kind().double()
        placed = rankwise.place(
            copy.deepcopy(alone),
            {"embed": "cpu", "scale": "cpu", "blocks.0": "cpu", "blocks.1-2": 0, "head": 0},
        )
        x = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)
        found = []
        for model in (alone, placed):
            for _ in range(2):  # the second forward goes by what the first has shown
                output = model(x)
            output.square().sum().backward()
            grads = [one.grad.cpu() for one in model.parameters() if one.grad is not None]
            found.append([output.detach(), *grads])
        return found

    alone, placed = on_two_devices(run)
    assert len(alone) == len(placed) >= 6
    for one, other in zip(alone, placed, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


def test_another_path_than_the_first_forwards_is_explained() -> None:
    """A forward that mixes devices where the first did not: torch's own error has a note that says what to do, and the next forward works."""

    def run() -> Any:
        where = {"embed": "cpu", "scale": "cpu", "blocks.0": "cpu", "blocks.1-2": 0, "head": 0}
        model = rankwise.place(Turning(), where).eval()
        x = torch.ones(2, 4)
        model(x)
        with pytest.raises(RuntimeError, match="tensors on cpu and pretend:0") as caught:
            model(x)
        assert model(x).device == x.device
        return getattr(caught.value, "__notes__", None)

    notes = on_two_devices(run)
    assert notes is None or "place together what is added up" in notes[0]


def test_what_does_not_fit_is_refused_before_anything_is_moved() -> None:
    """The error has every device with what it needs and has, and the model stays where it was; another optimizer may fit."""

    def run() -> Any:
        model = build()
        with pytest.raises(rankwise.ModelError) as caught:
            rankwise.place(model, HALVES, memory={0: "100KB", "cpu": "1GB"})
        with pytest.raises(rankwise.ModelError, match="no cut of 6 units fits"):
            rankwise.place(model, "auto", example=TOKENS, devices=["cpu", 0], memory={0: "40KB", "cpu": "40KB"})
        unmoved = {one.device.type for one in model.parameters()}
        rankwise.place(model, HALVES, memory={0: "100KB"}, optimizer="sgd")
        return str(caught.value), unmoved

    told, unmoved = on_two_devices(run)
    assert "cpu needs 131.6 KiB of 1.0 GiB free" in told
    assert (
        "pretend:0 needs 128.6 KiB of 100.0 KiB free (parameters 32.1 KiB, gradients 32.1 KiB, optimizer 64.3 KiB), TOO MUCH"
        in told
    )
    assert "optimizer='sgd'" in told
    assert unmoved == {"cpu"}


def test_the_automatic_cut_keeps_to_memory_and_order() -> None:
    """With room for a part only, "auto" puts as much there as fits and the rest behind it; the report agrees with what lies there."""

    def run() -> Any:
        model = rankwise.place(build(), "auto", example=TOKENS, devices=["cpu", 0], memory={"cpu": "300KB", 0: "300KB"})
        placement = rankwise.placement_of(model)
        sums: dict[str, int] = {}
        for one in model.parameters():
            sums[str(one.device)] = sums.get(str(one.device), 0) + one.nbytes
        return sums, {str(one): (need.parameters, need.total) for one, need in placement.needs.items()}, [str(one.device) for one in model.parameters()]  # fmt: skip

    sums, needs, order = on_two_devices(run)
    assert {device: parameters for device, (parameters, _) in needs.items()} == sums
    assert set(sums) == {"cpu", "pretend:0"}
    assert all(total <= 300 * 1024 for _, total in needs.values())
    assert order == sorted(order)


def test_a_model_from_the_meta_device_gets_its_values_where_it_is_placed() -> None:
    """The same values in every placement, as each module is seeded by its name."""

    def run() -> Any:
        states = []
        for where in (HALVES, {"": "cpu"}):
            with torch.device("meta"):
                model = Gpt(VOCABULARY, SEQUENCE)
            rankwise.place(model, where, seed=3)
            assert not any(one.is_meta for one in model.parameters())
            states.append(to_cpu(model))
        return states

    one, other = on_two_devices(run)
    assert all(torch.equal(one[name], value) for name, value in other.items())


def test_copies_and_pickles_of_a_placed_model_move_their_inputs() -> None:
    """Deepcopy and pickle keep placement and hooks; placing again replaces the hooks of before."""

    def run() -> None:
        model = rankwise.place(rankwise.place(build(), {"": "cpu"}), {**HALVES})
        expected = model(TOKENS)
        assert len(model.blocks[1]._forward_pre_hooks) == len(model._forward_hooks) == 1
        torch.testing.assert_close(copy.deepcopy(model)(TOKENS), expected)
        in_one_place = rankwise.place(model, {"": "cpu"})
        torch.testing.assert_close(pickle.loads(pickle.dumps(in_one_place))(TOKENS), expected)

    on_two_devices(run)


def test_checkpointed_blocks_are_computed_again_where_they_lie() -> None:
    """apply_checkpointing before place(): the same losses, also with blocks on the second device."""

    def run() -> Any:
        model = rankwise.place(rankwise.apply_checkpointing(build()), HALVES)
        return train(model), to_cpu(model)

    assert_trained_alike(*on_two_devices(run))


def compute_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten())


def test_a_trainer_trains_it_and_checkpoints_go_into_any_placement(tmp_path: Path) -> None:
    """Three steps on two devices, three more on the CPU alone, and two with the halves swapped: the curve of eight steps in one place."""

    def run() -> Any:
        def fit(where: Any, steps: int, folder: Path) -> Any:
            with rankwise.init(device="cpu"):
                model = build()
                if where is not None:
                    rankwise.place(model, where)
                optimizer = build_optimizer("adamw", model)
                loader = rankwise.DataLoader(TensorDataset(TOKENS.repeat(4, 1)), global_batch=4)
                config = rankwise.TrainerConfig(steps=steps, progress=False, clip_norm=1.0, log_every=1)
                trainer = rankwise.Trainer(model, optimizer, loader, compute_loss, folder=folder, config=config)
                trainer.fit()
                return to_cpu(model), trainer.step

        swapped = {
            "tokens": 0,
            "positions": 0,
            "blocks.0": 0,
            "blocks.1": "cpu",
            "norm": "cpu",
            "head": "cpu",
        }
        fit(HALVES, 3, tmp_path / "moved")
        fit(None, 6, tmp_path / "moved")
        return fit(swapped, 8, tmp_path / "moved"), fit(None, 8, tmp_path / "alone")

    (state, steps), (expected, _) = on_two_devices(run)
    assert steps == 8
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=TOLERANCE["adamw"])


def test_ranks_refuse_what_they_cannot_share() -> None:
    """DDP takes devices of one type: the error names them; apply_fsdp would move the model."""

    def run() -> tuple[str, str]:
        with rankwise.init(device="cpu"):
            model = rankwise.place(build(), HALVES)
            with pytest.raises(rankwise.ModelError) as of_ddp:
                rankwise.apply_ddp(model)
            with pytest.raises(rankwise.ModelError) as of_fsdp:
                rankwise.apply_fsdp(model)
            return str(of_ddp.value), str(of_fsdp.value)

    of_ddp, of_fsdp = on_two_devices(run)
    assert "placed on devices of type cpu and pretend" in of_ddp
    assert "apply_fsdp would move it" in of_fsdp
