"""Names, ranges and patterns place every parameter and buffer exactly once, and every slip is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rankwise
from rankwise.base.errors import UsageError
from rankwise.parallel.placement import read_device, read_names
from small_gpt import Gpt

CPU, META = torch.device("cpu"), torch.device("meta")
REST = {"positions": "cpu", "norm": "cpu", "head": "cpu"}


class WithTensors(nn.Module):
    """Thirteen blocks, and a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(4))
        self.register_buffer("scale", torch.ones(4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(13))


def test_ranges_and_patterns_name_what_they_say() -> None:
    """``blocks.0-11`` are twelve blocks and not the thirteenth; parameters and buffers outside of modules have names, too."""
    found = read_names(WithTensors(), {"blocks.0-11": "cpu", "blocks.12": "meta", "token": "cpu", "sc*": "meta"})
    assert found == {
        **{f"blocks.{one}": CPU for one in range(12)},
        "blocks.12": META,
        "token": CPU,
        "scale": META,
    }
    within = read_names(Gpt(50, 8), {"tokens": "cpu", "blocks.*.attention": "meta", "blocks.*.norm?": "cpu", "blocks.0-1.mlp": "cpu", **REST})  # fmt: skip
    assert [name for name, device in within.items() if device == META] == [
        "blocks.0.attention",
        "blocks.1.attention",
    ]
    deep = read_names(Gpt(50, 8), {"tokens": "cpu", "**.attention": "meta", "blocks.*.norm?": "cpu", "**.mlp": "cpu", **REST})  # fmt: skip
    assert deep == within | {"blocks.0.mlp": CPU, "blocks.1.mlp": CPU}


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ({"tokens": 0}, "finds 0 devices of type 'cuda'"),
        ({"tokens": "gpu"}, "device 'gpu'"),
        ({"tokens": True}, "device True"),
        ({"token": "cpu"}, "pattern 'token': the model has no module, parameter or buffer named like 'token'"),
        ({"blocks.0-2": "cpu"}, "pattern 'blocks.0-2': .* named like 'blocks.2'"),
        ({"blocks.1-0": "cpu"}, "the range 1-0 is empty"),
        ({"*": "cpu", "head": "meta"}, "'head' is placed twice, by '\\*' and by 'head'"),
        ({"*": "cpu", "blocks.1": "meta"}, r"'blocks.1.norm1.weight' is placed twice: by 'blocks.1', .* and by '\*', which names 'blocks'"),
        ({"tokens": "cpu", "blocks.*": "cpu", **REST, "head": "meta"}, None),
        ({"blocks.*": "cpu", **REST}, "no pattern places 'tokens.weight'"),
        ({"tokens": "cpu", **REST}, "no pattern places 'blocks.0.norm1.weight', .* and 28 more"),
    ],
)  # fmt: skip
def test_slips_are_named(where: dict[str, Any], told: str | None) -> None:
    """With the pattern, and the module or tensor that it concerns."""
    if torch.accelerator.is_available() and 0 in where.values():
        pytest.skip("this host has an accelerator 0")
    if told is None:
        assert read_names(Gpt(50, 8), where)["head"] == META
        return
    with pytest.raises(UsageError, match=told):
        read_names(Gpt(50, 8), where)


def test_tied_weights_apart_are_refused_by_both_names() -> None:
    """The error has both names with their patterns and devices; on one device they are no error."""
    where = {"tokens": "cpu", "blocks.*": "meta", **REST}
    assert read_names(Gpt(50, 8, tied=True), where)["head"] == CPU
    with pytest.raises(UsageError, match=r"'tokens.weight' \(on cpu by 'tokens'\) and 'head.weight' \(on meta by 'head'\) are one tensor"):  # fmt: skip
        read_names(Gpt(50, 8, tied=True), {**where, "head": "meta"})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("evenly", {}), "where='evenly'"),
        (("auto", {}), "without an example"),
        (({"": "cpu"}, {"outputs": "gpu"}), "device 'gpu'"),
    ],
)
def test_calls_that_cannot_work_are_refused(arguments: tuple[Any, dict[str, Any]], told: str) -> None:
    """Each in one line, before anything is moved."""
    where, options = arguments
    with pytest.raises(UsageError, match=told):
        rankwise.place(Gpt(50, 8), where, **options)


def test_devices_have_an_index_or_are_no_accelerator() -> None:
    """The CPU has no index, also as "cpu:1": tensors of torch don't keep such an index."""
    assert read_device("cpu:1") == read_device(CPU) == CPU


def test_the_report_names_parts_and_bytes() -> None:
    """placement_of() has each part's device and each device's bytes; of a model that was not placed it has nothing."""
    model = Gpt(50, 8)
    assert rankwise.placement_of(model) is None
    rankwise.place(model, {"": "cpu"}, example=torch.zeros(2, 8, dtype=torch.int64), optimizer=None)
    placement = rankwise.placement_of(model)
    assert placement is not None
    need = placement.needs[CPU]
    assert (need.parameters, need.gradients, need.optimizer) == (sum(one.nbytes for one in model.parameters()), 0, 0)  # fmt: skip
    assert need.activations
    assert str(placement).startswith("cpu: the model; needs ")
