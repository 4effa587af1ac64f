"""Our SyncBatchNorm on W ranks does what torch's BatchNorm does with all samples in one process."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankwise
from rankwise.base.errors import ModelError
from rankwise.parallel.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm
from rankwise.testing import run_ranks, try_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

TOLERANCE = 1e-12
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "1d": lambda: nn.BatchNorm1d(3),
    "1d of a sequence": lambda: nn.BatchNorm1d(3, momentum=None),
    "2d": lambda: nn.BatchNorm2d(3, momentum=0.3, eps=1e-3),
    "3d": lambda: nn.BatchNorm3d(3, affine=False),
    "without statistics": lambda: nn.BatchNorm2d(3, track_running_stats=False),
}
SHAPES = {"1d": (), "1d of a sequence": (5,), "2d": (4, 2), "3d": (2, 3, 2), "without statistics": (2, 2)}


def build_layer(kind: str) -> nn.Module:
    torch.manual_seed(1)
    layer = LAYERS[kind]().double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.5, 2)
    return layer


def build_input(kind: str, number: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return (torch.randn(number, 3, *SHAPES[kind], generator=generator, dtype=torch.float64) * 2 + 100).to(dtype)


def run_twice(layer: nn.Module, x: torch.Tensor, all_x: torch.Tensor) -> dict[str, Any]:
    """Use the layer twice in one forward, with a loss whose gradient differs from sample to sample."""
    x = x.clone().requires_grad_()
    first = layer(x)
    second = layer(first.tanh() + x * 0.1)
    weights = all_x.sin()
    offset = int((all_x == x.detach()[:1]).flatten(1).all(1).nonzero()[0]) if len(x) else 0
    (second * weights[offset : offset + len(x)]).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.eval()
    return {
        "y": second.detach(),
        "dx": x.grad,
        "gradients": gradients,
        "state": state,
        "evaluated": layer(all_x[:2]).detach(),
    }


def on_ranks(kind: str, counts: list[int]) -> dict[str, Any]:
    with rankwise.init(device="cpu") as ctx:
        layer = convert_sync_batchnorm(build_layer(kind))
        assert type(layer) is SyncBatchNorm
        x = build_input(kind, sum(counts))
        start = sum(counts[: ctx.rank])
        found = run_twice(layer, x[start : start + counts[ctx.rank]], x)
        for gradient in found["gradients"].values():
            dist.all_reduce(gradient)  # what DDP does, but for the division
        return found


@pytest.mark.parametrize("counts", [[4, 4], [1, 5, 2], [3, 0, 1]])
@pytest.mark.parametrize("kind", list(LAYERS))
def test_it_equals_batchnorm_on_the_whole_batch(kind: str, counts: list[int]) -> None:
    """Outputs, gradients, statistics and evaluation are those of one process, though ranks hold 0 to 5 samples."""
    x = build_input(kind, sum(counts))
    expected = run_twice(build_layer(kind), x, x)
    start = 0
    for count, ours in zip(counts, run_ranks(on_ranks, len(counts), kind, counts), strict=True):
        for name in ("y", "dx"):
            torch.testing.assert_close(
                ours[name], expected[name][start : start + count], rtol=TOLERANCE, atol=TOLERANCE
            )
        for part in ("gradients", "state"):
            assert ours[part].keys() == expected[part].keys()
            for name, value in expected[part].items():
                torch.testing.assert_close(ours[part][name], value, rtol=TOLERANCE, atol=TOLERANCE)
        if kind != "without statistics":
            torch.testing.assert_close(ours["evaluated"], expected["evaluated"], rtol=TOLERANCE, atol=TOLERANCE)
        start += count


def test_half_precision_is_computed_in_float32() -> None:
    """bfloat16 samples around 100 give the statistics of float32, within one rounding, and come back as bfloat16."""

    def body() -> tuple[torch.Tensor, torch.Tensor]:
        with rankwise.init(device="cpu") as ctx:
            layer = convert_sync_batchnorm(nn.BatchNorm2d(3))
            x = build_input("2d", 8, torch.bfloat16)[ctx.rank * 4 : ctx.rank * 4 + 4].requires_grad_()
            y = layer(x)
            y.square().sum().backward()
            assert y.dtype == x.grad.dtype == torch.bfloat16
            return layer.running_var, y.detach()

    reference = nn.BatchNorm2d(3)
    x = build_input("2d", 8, torch.bfloat16).float()
    expected = reference(x).detach()
    for rank, (running_var, y) in enumerate(run_ranks(body, 2)):
        torch.testing.assert_close(running_var, reference.running_var, rtol=1e-5, atol=1e-5)
        # bfloat16 keeps 8 bits: half a unit in the last place is 2**-9 of the value.
        torch.testing.assert_close(y.float(), expected[rank * 4 : rank * 4 + 4], rtol=2**-8, atol=1e-3)


def test_one_value_per_channel_is_refused_on_all_ranks() -> None:
    """If the ranks together hold one value per channel, each raises what torch's BatchNorm raises."""

    def body() -> None:
        with rankwise.init(device="cpu") as ctx:
            convert_sync_batchnorm(nn.BatchNorm1d(3))(torch.ones(1 if ctx.rank == 1 else 0, 3))

    for outcome in try_ranks(body, 2):
        assert isinstance(outcome.error, ValueError)
        assert "Expected more than 1 value per channel when training" in str(outcome.error)


def test_one_sample_on_each_rank_is_enough() -> None:
    """What torch's BatchNorm refuses on one rank works when the ranks together hold two samples."""

    def body() -> float:
        with rankwise.init(device="cpu") as ctx:
            return float(convert_sync_batchnorm(nn.BatchNorm1d(1))(torch.full((1, 1), float(ctx.rank)))[0, 0])

    torch.testing.assert_close(torch.tensor(run_ranks(body, 2)), torch.tensor([-1.0, 1.0]), rtol=1e-4, atol=0)


def test_evaluation_and_one_process_need_no_peer() -> None:
    """One rank evaluates alone, and a process without a job trains."""

    def body() -> bool:
        with rankwise.init(device="cpu") as ctx:
            layer = convert_sync_batchnorm(nn.BatchNorm1d(3)).eval()
            if ctx.rank == 0:
                layer(torch.ones(2, 3))
            return True

    assert run_ranks(body, 2) == [True, True]
    alone, reference = convert_sync_batchnorm(nn.BatchNorm1d(3)), nn.BatchNorm1d(3)
    x = torch.arange(12.0).reshape(4, 3)
    torch.testing.assert_close(alone(x), reference(x), rtol=0, atol=0)
    torch.testing.assert_close(alone.running_var, reference.running_var, rtol=0, atol=0)


def test_a_subgroup_shares_and_a_copy_keeps_it() -> None:
    """Layers of a subgroup see that group's samples only; a deep copy of the model, as for EMA, still does."""

    def body() -> float:
        with rankwise.init(device="cpu") as ctx:
            groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            layer = convert_sync_batchnorm(nn.BatchNorm1d(1, momentum=1.0), groups[ctx.rank // 2])
            copied = copy.deepcopy(layer)
            copied(torch.full((1, 1), float(ctx.rank)))
            return float(copied.running_mean)

    assert run_ranks(body, 4) == [0.5, 0.5, 2.5, 2.5]


def test_converting_keeps_parameters_and_state() -> None:
    """Parameters are the same objects, state dicts have the same names and load either way, input dims are checked."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm1d(2)))
    before, names = list(model.parameters()), list(model.state_dict())
    converted = convert_sync_batchnorm(copy.copy(model))
    assert all(ours is theirs for ours, theirs in zip(converted.parameters(), before, strict=True))
    assert list(converted.state_dict()) == names
    plain = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm1d(2)))
    plain.load_state_dict(converted.state_dict())
    converted.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="expected 4D input"):
        converted[1](torch.ones(2, 2))
    with pytest.raises(ValueError, match="2 channels"):
        converted[1](torch.ones(2, 3, 1, 1))


def test_torch_layers_for_gpus_are_converted_too() -> None:
    """torch.nn.SyncBatchNorm, which refuses the CPU, becomes ours, and works there."""
    layer = convert_sync_batchnorm(nn.SyncBatchNorm(3))
    assert type(layer) is SyncBatchNorm
    assert layer(torch.arange(6.0).reshape(2, 3)).shape == (2, 3)


def test_layers_of_other_makers_are_named() -> None:
    """A class derived from BatchNorm adds something that converting would drop: it is refused by name."""

    class NormAndRelu(nn.BatchNorm2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).relu()

    with pytest.raises(ModelError, match=r"'1' \(NormAndRelu\)"):
        convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(2), NormAndRelu(2)))
