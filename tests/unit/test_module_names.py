"""A module is named from frames alone, as ``named_modules()`` of the outermost one has it, without the parts that wrappers put in."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from rankwise.evidence.in_rank.module_names import ModuleNames


class _Asks(nn.Module):
    """Tells in its forward how it is called."""

    def __init__(self, modules: ModuleNames) -> None:
        super().__init__()
        self.modules_, self.told = modules, ["never called"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def ask() -> None:
            self.told.append(self.modules_.find(sys._getframe()))

        ask()
        return x


class DistributedDataParallel(nn.Module):
    """Holds a module as torch's class of that name does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)


def _make() -> tuple[ModuleNames, _Asks, nn.Module]:
    modules = ModuleNames()
    asks = _Asks(modules)
    return modules, asks, nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), asks))


def test_the_innermost_module_is_named_as_in_the_outermost() -> None:
    """A function that a forward calls is in the module of that forward; a model inside another is named as in that one."""
    _, asks, net = _make()
    net(torch.zeros(2))
    assert asks.told[-1] == "1.1"
    nn.Sequential(nn.Identity(), net)(torch.zeros(2))
    assert asks.told[-1] == "1.1.1"


@pytest.mark.parametrize("wrap", ["replicas", "checkpointing", "compiled"])
def test_wrappers_leave_no_part_in_a_name(wrap: str) -> None:
    """DistributedDataParallel, activation checkpointing and torch.compile put a word of their own into names; users don't."""
    _, asks, net = _make()
    if wrap == "replicas":
        net = DistributedDataParallel(net)
    elif wrap == "checkpointing":
        net[1] = _Named("_checkpoint_wrapped_module", net[1])
    else:
        net = _Named("_orig_mod", net)
    net(torch.zeros(2))
    assert asks.told[-1] == "1.1"


class _Named(nn.Module):
    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)

    def forward(self, x: torch.Tensor) -> Any:
        return next(self.children())(x)


def test_where_no_module_runs_or_only_the_outermost_there_is_no_name() -> None:
    """A line of the loop is in no module, and the outermost one has no name to tell."""
    modules, asks, _ = _make()
    assert modules.find(sys._getframe()) == ""
    asks(torch.zeros(2))
    assert asks.told[-1] == ""


def test_a_module_that_is_added_later_is_found() -> None:
    """Names are kept from one look to the next, and read again when a module is not among them."""
    _, asks, net = _make()
    net(torch.zeros(2))
    later = _Asks(asks.modules_)
    net.append(later)
    net(torch.zeros(2))
    assert later.told[-1] == "2"


def test_an_exception_tells_the_module_that_it_came_through() -> None:
    """Its traceback is enough, when the frames are long over: the innermost module, not the outermost."""
    modules = ModuleNames()
    net = nn.Sequential(nn.Identity(), nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(RuntimeError) as raised:
        net(torch.zeros(3))
    assert modules.find_raised(raised.value.__traceback__) == "1.0"


def test_what_fsdp_tells_of_its_shards_goes_before_the_module_that_runs() -> None:
    """A block that runs may gather the next one ahead of time: the collective is of that one, and its name is kept without asking again."""
    path = f"{torch.__path__[0]}/distributed/fsdp/_fully_shard/_fsdp_param_group.py"
    text = "import sys\nclass Shards:\n    modules = ()\n    def unshard(self):\n        return ask(sys._getframe())\n"
    modules = ModuleNames()
    space: dict[str, Any] = {"ask": modules.find}
    exec(compile(text, path, "exec"), space)
    shards = space["Shards"]()

    class Runs(nn.Module):
        def forward(self) -> str:
            return str(shards.unshard())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Runs()

        def forward(self) -> Any:
            return self.first()

    net = Net()
    shards._module_fqn = None  # before its first forward FSDP does not know
    assert net() == "first"
    shards._module_fqn = "layers.1._checkpoint_wrapped_module"
    assert net() == "layers.1"
    shards._module_fqn = None
    assert net() == "layers.1"
