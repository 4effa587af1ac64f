"""Whatever a training state is made of comes back as it was, into objects built anew, or is refused with a reason."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from rankwise import checkpoint
from rankwise.base.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Scheduler = torch.optim.lr_scheduler


def build(seed: int, width: int = 4) -> nn.Module:
    """A small model with parameters and buffers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    """Some steps on made up data, the same for the same step."""
    for step in steps:
        x_BF = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x_BF).square().mean().backward()
        optimizer.step()


def same(left: Any, right: Any) -> bool:
    """Whether two nested states are equal to the bit."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


# LBFGS of torch before 2.9 converts the loss that its closure returns.
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.AdamW(params, lr=0.01),
        lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), amsgrad=True),
        torch.optim.Adagrad,
        lambda params: torch.optim.RMSprop(params, centered=True),
        torch.optim.LBFGS,
    ],
    ids=["sgd", "adamw", "amsgrad", "adagrad", "rmsprop", "lbfgs"],
)
def test_a_resumed_run_is_bit_identical(tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Training that is saved and loaded into new objects ends where training in one go ends, to the bit."""

    def go(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            for step in steps:
                x_BF = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))

                def loss(x_BF: torch.Tensor = x_BF) -> torch.Tensor:
                    optimizer.zero_grad()
                    value: torch.Tensor = model(x_BF).square().mean()
                    value.backward()
                    return value

                optimizer.step(loss)
        else:
            train(model, optimizer, *steps)

    model = build(0)
    optimizer = make(model.parameters())
    go(model, optimizer, 1, 2)
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, step=2)
    resumed = build(1)
    other = make(resumed.parameters())
    assert checkpoint.load(tmp_path, {"model": resumed, "optimizer": other}) == 2
    go(model, optimizer, 3, 4)
    go(resumed, other, 3, 4)
    assert same(model.state_dict(), resumed.state_dict())
    assert same(optimizer.state_dict(), other.state_dict())


# SequentialLR of older torch itself uses what it warns of.
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda opt: Scheduler.MultiStepLR(opt, [2, 4]),
        lambda opt: Scheduler.LambdaLR(opt, lambda step: 1 / (step + 1)),
        lambda opt: Scheduler.OneCycleLR(opt, 0.1, total_steps=10),
        lambda opt: Scheduler.CyclicLR(opt, 0.1, 0.2, cycle_momentum=False),
        lambda opt: Scheduler.CosineAnnealingWarmRestarts(opt, 3),
        lambda opt: Scheduler.SequentialLR(opt, [Scheduler.ConstantLR(opt), Scheduler.LinearLR(opt)], [3]),
        lambda opt: Scheduler.ChainedScheduler([Scheduler.ConstantLR(opt), Scheduler.ExponentialLR(opt, 0.9)]),
    ],
    ids=["multistep", "lambda", "onecycle", "cyclic", "restarts", "sequential", "chained"],
)
def test_schedulers_go_on(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    """A scheduler that was loaded gives the learning rates that the saved one would have given."""

    def start() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
        return optimizer, make(optimizer)

    def list_rates(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
        rates = []
        for _ in range(4):
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, scheduler = start()
    list_rates(optimizer, scheduler)
    checkpoint.save(tmp_path, {"optimizer": optimizer, "scheduler": scheduler}, step=4)
    expected = list_rates(optimizer, scheduler)
    optimizer, scheduler = start()
    checkpoint.load(tmp_path, {"optimizer": optimizer, "scheduler": scheduler})
    assert list_rates(optimizer, scheduler) == expected


def test_scaler_and_own_objects_come_back(tmp_path: Path) -> None:
    """A GradScaler, and whatever has state_dict and load_state_dict, is given its state, tensors and arrays in it too."""

    class Cursor:
        def __init__(self, *held: Any) -> None:
            self.held: Any = held

        def state_dict(self) -> dict[str, Any]:
            return {"held": self.held}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.held = state["held"]

    scaler = torch.amp.GradScaler("cpu", init_scale=77.0)
    checkpoint.save(tmp_path, {"scaler": scaler, "cursor": Cursor(3, torch.arange(3), {1: (None, b"x")})}, step=1)
    scaler, cursor = torch.amp.GradScaler("cpu"), Cursor()
    checkpoint.load(tmp_path, {"scaler": scaler, "cursor": cursor})
    assert scaler.get_scale() == 77.0
    assert same(cursor.held, (3, torch.arange(3), {1: (None, b"x")}))


_TENSORS = [
    torch.empty(0, 3), torch.tensor(3), torch.tensor([True, False]), torch.ones(3, dtype=torch.bfloat16), torch.ones(3).to(torch.float8_e4m3fn),
    torch.tensor([1 + 2j], dtype=torch.complex128), torch.tensor([1 + 2j]).conj(), torch.arange(6).view(2, 3).t(), torch.ones(2, requires_grad=True),
    torch.ones(1).expand(4), torch.tensor([float("nan"), float("-inf"), -0.0]), torch.ones(5, dtype=torch.uint16), torch.arange(10)[::3],
]  # fmt: skip


@pytest.mark.parametrize("tensor", _TENSORS, ids=lambda one: f"{one.dtype}-{list(one.shape)}")
def test_tensors_of_all_kinds_come_back(tmp_path: Path, tensor: torch.Tensor) -> None:
    """Tensors of any dtype, shape and layout in memory come back bit by bit: in place, anew, and when read."""

    def bits(one: torch.Tensor) -> list[int]:
        whole = one.detach().clone(memory_format=torch.contiguous_format).resolve_conj()
        return whole.reshape(-1).view(torch.uint8).tolist()

    checkpoint.save(tmp_path, {"alone": tensor, "held": [tensor]}, step=1)
    own = torch.zeros(tensor.shape, dtype=tensor.dtype)
    state: dict[str, Any] = {"alone": own, "held": None}
    checkpoint.load(tmp_path, state)
    assert state["alone"] is own
    for found in (own, state["held"][0], checkpoint.read(tmp_path)["alone"]):
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert bits(found) == bits(tensor)
    assert checkpoint.verify(tmp_path) == []


def test_wrapped_and_plain_models_load_each_other(tmp_path: Path) -> None:
    """Names don't depend on torch.compile, nor on a wrapper that calls the model ``module``; the optimizer's neither."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    ways: list[Callable[[nn.Module], Any]] = [
        lambda model: model,
        Wrapper,
        partial(torch.compile, backend="eager"),
    ]
    for number, save_as in enumerate(ways):
        for load_as in ways:
            folder, model, other = tmp_path / f"{number}", build(0), build(1)
            optimizer, optimizer2 = (torch.optim.Adam(one.parameters()) for one in (model, other))
            train(model, optimizer, 1)
            checkpoint.save(folder, {"model": save_as(model), "optimizer": optimizer}, step=1)
            checkpoint.load(folder, {"model": load_as(other), "optimizer": optimizer2})
            assert same(model.state_dict(), other.state_dict())
            assert same(optimizer.state_dict(), optimizer2.state_dict())


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    """Weights that two modules share are shared after loading, and right."""

    def tie(seed: int) -> nn.Module:
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]).requires_grad_()
        torch.manual_seed(seed)
        nn.init.normal_(model[0].weight)
        model[1].weight = model[0].weight
        return model

    model, other = tie(0), tie(1)
    checkpoint.save(tmp_path, {"model": model}, step=1)
    checkpoint.load(tmp_path, {"model": other})
    assert other[1].weight is other[0].weight
    assert same(model.state_dict(), other.state_dict())


class Extra(nn.Module):
    """A module with an extra state, and a buffer that is not saved."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("own", [None, 7, torch.zeros(9), {}], ids=["none", "number", "tensor", "dict"])
@pytest.mark.parametrize(
    "extra", [5, {"t": torch.arange(3), "n": [1]}, torch.arange(4)], ids=["number", "dict", "tensor"]
)
def test_extra_state_may_be_anything(tmp_path: Path, extra: Any, own: Any) -> None:
    """A module's extra state comes back whatever it is, and whatever the new module has there; other buffers stay."""
    checkpoint.save(tmp_path, {"model": Extra(extra)}, step=1)
    model = Extra(own)
    model.scratch.fill_(3)
    checkpoint.load(tmp_path, {"model": model})
    assert same(model.extra, extra)
    assert model.scratch.tolist() == [3, 3, 3]


def test_a_module_sees_its_own_version(tmp_path: Path) -> None:
    """Modules that convert states of older versions are not told that a new one is old."""

    class Versioned(nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
            if local_metadata.get("version") != 2:
                state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 100
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    model, other = Versioned(2, 2), Versioned(2, 2)
    checkpoint.save(tmp_path, {"model": model}, step=1)
    checkpoint.load(tmp_path, {"model": other})
    assert same(model.state_dict(), other.state_dict())


# -------------------------------------------------------------- optimizers


def two_layers() -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "ab"})


def test_an_optimizer_finds_its_parameters_by_name(tmp_path: Path) -> None:
    """Parameters or groups in another order get their own states and learning rates, not each other's."""
    model = two_layers()
    a, b = model["a"].weight, model["b"].weight
    for number, (saved, loaded) in enumerate(
        [
            ([a, b], [b, a]),
            ([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.2}], [{"params": [b]}, {"params": [a]}]),
        ]
    ):
        optimizer = torch.optim.Adam(saved)
        (model["a"](torch.ones(3)).sum() * 5 + model["b"](torch.ones(3)).sum()).backward()
        optimizer.step()
        checkpoint.save(tmp_path / str(number), {"model": model, "optimizer": optimizer}, step=1)
        other = torch.optim.Adam(loaded)
        checkpoint.load(tmp_path / str(number), {"model": model, "optimizer": other})
        assert not torch.equal(optimizer.state[a]["exp_avg"], optimizer.state[b]["exp_avg"])
        for parameter in (a, b):
            assert same(optimizer.state[parameter], other.state[parameter])
        rates = [
            {id(parameter): group["lr"] for group in one.param_groups for parameter in group["params"]}
            for one in (optimizer, other)
        ]
        assert rates[0] == rates[1]


def test_other_groups_or_parameters_are_refused(tmp_path: Path) -> None:
    """An optimizer over other groups, more parameters or other ones is refused with both sides in the error."""
    model = two_layers()
    a, b = model["a"].weight, model["b"].weight
    checkpoint.save(
        tmp_path, {"model": model, "optimizer": torch.optim.Adam([{"params": [a]}, {"params": [b]}])}, step=1
    )
    other = two_layers()
    for parts, told in [
        (
            {"model": model, "optimizer": torch.optim.Adam([a, b])},
            r"groups of \[1, 1\] parameters, this one of \[2\]",
        ),
        ({"model": model, "optimizer": torch.optim.Adam([a])}, "has 2 parameters, this one 1"),
        ({"net": other, "optimizer": torch.optim.Adam(other.parameters())}, "train other parameters"),
    ]:
        with pytest.raises(CheckpointError, match=told):
            checkpoint.load(tmp_path, parts, strict=False)


# --------------------------------------------------------------- what does not fit


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    """Missing and unknown names, other shapes, missing parts and the meta device each have an error of their own."""
    checkpoint.save(tmp_path, {"model": build(0), "number": 3, "tensor": torch.ones(2)}, step=1)
    with torch.device("meta"):
        on_meta = build(0)
    for parts, told in [
        (
            {"model": nn.Sequential(nn.Linear(3, 4))},
            r"the model lacks 1\.bias, 1\.num_batches_tracked.* and 2 more",
        ),
        ({"model": nn.Sequential(*build(0), nn.Linear(1, 1))}, r"the checkpoint lacks 3\.weight, 3\.bias"),
        ({"model": build(0, width=5)}, r"0\.weight has shape \[5, 3\] here and \[4, 3\] in the checkpoint"),
        ({"model": on_meta}, r"model\.0\.weight is on the meta device"),
        ({"scaler": 1}, r"has no part 'scaler'; it has model, number, rng, tensor"),
        ({"number": nn.Linear(1, 1)}, "'number' is a module here"),
        (
            {"tensor": torch.ones(3)},
            r"'tensor' is a tensor of shape \[3\] here, and \[\[2\]\] in the checkpoint",
        ),
    ]:
        with pytest.raises(CheckpointError, match=told):
            checkpoint.load(tmp_path, parts)
    kept: dict[str, Any] = {"scaler": 1, "number": 0}
    assert checkpoint.load(tmp_path, kept, strict=False) == 1
    assert kept == {"scaler": 1, "number": 3}


@pytest.mark.parametrize("saved_fused", [False, True])
def test_a_scaler_goes_on_with_an_optimizer_that_ran_otherwise(tmp_path: Path, saved_fused: bool) -> None:
    """Saved as it ran, fused or not, loaded into one that was built the other way: the next scaled step is that of the saved one."""
    ends = []
    for fused in (saved_fused, not saved_fused):
        model = build(0)
        optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=fused), torch.amp.GradScaler("cpu")
        if fused == saved_fused:
            train(model, optimizer, 1, 2)
            checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, step=2)
        else:
            checkpoint.load(tmp_path, {"model": model, "optimizer": optimizer})
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(8, 3)).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        ends.append(model.state_dict())
    assert same(*ends)


def test_a_state_is_a_dict_of_parts(tmp_path: Path) -> None:
    """A model by itself is refused with how it is passed; a ModuleDict names its parts itself."""
    for call in (checkpoint.load, lambda *given: checkpoint.save(*given, step=1)):
        with pytest.raises(UsageError, match=r'the state is a Linear\n.*{"model": model'):
            call(tmp_path, nn.Linear(2, 2))
        call(tmp_path, nn.ModuleDict({"a": nn.Linear(2, 2)}))


@pytest.mark.parametrize("step", [-1, 1.0, True, "3", None, torch.tensor(1)])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    """What is no step is refused before anything is written."""
    with pytest.raises(UsageError, match="a step is a whole number"):
        checkpoint.save(tmp_path / "runs", {"a": 1}, step=step)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["", "a@b", 3, None])
def test_a_part_has_a_name(tmp_path: Path, name: Any) -> None:
    """What can't name a part is refused before anything is written."""
    with pytest.raises(CheckpointError, match="part of the state is named"):
        checkpoint.save(tmp_path / "runs", {name: 1}, step=1)
    assert not (tmp_path / "runs").exists()


def test_metrics_may_be_nan_but_must_be_numbers(tmp_path: Path) -> None:
    """A loss that has become NaN or infinite does not stop a save; a word does, before anything is written."""
    checkpoint.save(
        tmp_path,
        {"a": 1},
        step=1,
        metrics={"loss": float("nan"), "best": torch.tensor(2.5), "worst": float("-inf")},
    )
    manifest = checkpoint.list_checkpoints(tmp_path)[0].manifest
    assert manifest is not None
    assert repr(manifest.metrics) == "{'loss': nan, 'best': 2.5, 'worst': -inf}"
    with pytest.raises(UsageError, match="a metric is a number"):
        checkpoint.save(tmp_path, {"a": 1}, step=2, metrics={"loss": "low"})  # type: ignore[dict-item]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writer", "step-1"]


def test_a_part_of_the_users_may_be_called_rng(tmp_path: Path) -> None:
    """Who saves generators by another way, under our name for them, is not disturbed by ours."""
    checkpoint.save(tmp_path, {"rng": checkpoint.PerRank(5), "n": 1}, step=1)
    state: dict[str, Any] = {"n": 0}
    assert checkpoint.load(tmp_path, state) == 1
    state["rng"] = checkpoint.PerRank(0)
    assert checkpoint.load(tmp_path, state) == 1
    assert state["rng"].value == 5


@pytest.mark.parametrize(
    ("saved", "here", "told"),
    [
        (
            torch.optim.SGD,
            torch.optim.AdamW,
            ["this optimizer is AdamW, with the options", "betas", "dampening"],
        ),
        (torch.optim.AdamW, torch.optim.SGD, ["this optimizer is SGD", "momentum", "betas"]),
        (torch.optim.Adam, torch.optim.AdamW, []),
    ],
)
def test_another_class_of_optimizer_is_told(saved: Any, here: Any, told: list[str], tmp_path: Path) -> None:
    """Torch takes the options for its own, and the next step is a bare KeyError: 'betas'. Of equal options it may be meant."""
    model = nn.Linear(3, 1)
    optimizer = saved(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, 0)
    checkpoint.save(tmp_path, {"optimizer": optimizer}, step=1)
    other = here(model.parameters(), lr=0.1)
    if not told:
        assert checkpoint.load(tmp_path, {"optimizer": other}) == 1
        return
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path, {"optimizer": other})
    assert all(word in str(caught.value) for word in told)
