"""What the scripts here share: checks that are run one by one, and a small training that one process can do as well."""

from __future__ import annotations

import json
import os
import shutil
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

#: "cpu" is for trying the scripts where there is no GPU; what they prove then is only that they do what they say.
DEVICE = os.environ.get("RANKWISE_TEST_DEVICE", "cuda")
IS_CUDA = DEVICE == "cuda"
#: Triton, below inductor, builds a small library with a C compiler; on the CPU inductor needs more than that.
COMPILER = "inductor" if IS_CUDA and any(map(shutil.which, ("cc", "gcc", "clang"))) else "aot_eager"
NUM_SAMPLES = 24
_found: dict[str, Any] = {}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Run a check now; write down what it finds, or its traceback, so that one that fails hides no other."""
    try:
        note(function.__name__, function())
    except Exception:  # noqa: BLE001 - the test shows it
        note(function.__name__, {"traceback": traceback.format_exc()})
    return function


def note(name: str, value: Any) -> None:
    """Write down a fact for the test that has started this script."""
    _found[name] = value
    Path(os.environ["FACTS"], f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(_found))


def build_model(
    dtype: torch.dtype = torch.float64, *, batchnorm: bool = False, dropout: float = 0.0, seed: int = 0
) -> nn.Sequential:
    """The same model wherever it is built."""
    torch.manual_seed(seed)
    layers = [
        nn.Linear(16, 32), *([nn.BatchNorm1d(32)] if batchnorm else []), nn.Tanh(),
        *([nn.Dropout(dropout)] if dropout else []), nn.Linear(32, 5),
    ]  # fmt: skip
    return nn.Sequential(*layers).to(dtype)


def draw(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The samples of a step, the same wherever they are drawn; far from zero mean."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(NUM_SAMPLES, 16, generator=generator, dtype=torch.float64) * 2 + 1
    return inputs.to(DEVICE, dtype), torch.randint(5, (NUM_SAMPLES,), generator=generator).to(DEVICE)


def train(
    model: nn.Module,
    part: slice = slice(None),
    *,
    dtype: torch.dtype = torch.float64,
    steps: int = 4,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[float]:
    """Train on a part of each step's samples, which all ranks have equally many of; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        inputs, targets = draw(step, dtype)
        with context():
            loss = cross_entropy(model(inputs[part]).to(dtype), targets[part])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def measure_difference(one: nn.Module, other: nn.Module) -> float:
    """Return by how much the states of two models differ at most."""
    mine, theirs = one.state_dict(), other.state_dict()
    assert [*mine] == [*theirs]
    return max(float((mine[name].double() - theirs[name].double()).abs().max()) for name in mine)
