"""apply_pipeline at first sight: models as public code writes them are cut, and have one process's loss, gradients and buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rankwise
from model_zoo import CASES, TRANSFORMERS, Case
from rankwise.testing import run_ranks

#: Called in another order than the model holds its parts: it is known from an example.
NEEDS_EXAMPLE = {"reversed"}
#: Of what they have four parts at least, so that two ranks can have two stages each.
DEEP = ["two streams", "hidden states", "unet", "vit", "in place", "functional head", "resnet", "lenet"]


def build(case: Case) -> tuple[torch.nn.Module, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = case.build().double()
    torch.manual_seed(1)
    return model, case.batch()


def run_alone(case: Case) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Add up the gradients of two micro-batches: BatchNorm sees one at a time."""
    model, batch = build(case)
    total = 0.0
    for part in zip(*(one.chunk(2) for one in batch), strict=True):
        loss = case.loss(model, part) / 2
        loss.backward()
        total += loss.item()
    return total, {name: one.grad for name, one in model.named_parameters(remove_duplicate=False)}, dict(model.named_buffers())  # fmt: skip


def run_staged(names: list[str], schedule: str, gives_example: bool) -> dict[str, Any]:
    found = {}
    with rankwise.init(device="cpu"):
        for name in names:
            case = {**CASES, **TRANSFORMERS}[name]
            model, batch = build(case)
            example = tuple(one[:2] for one in batch) if gives_example or name in NEEDS_EXAMPLE else None
            pipe = rankwise.apply_pipeline(model, schedule=schedule, microbatches=2, loss=case.loss, example=example)  # fmt: skip
            loss = pipe.step(batch).item()
            gradients = {name: one.grad for name, one in pipe.named_parameters(remove_duplicate=False)}
            found[name] = loss, gradients, dict(pipe.named_buffers())
    return found


def assert_same(names: list[str], found: list[dict[str, Any]]) -> None:
    for name in names:
        loss, gradients, buffers = run_alone({**CASES, **TRANSFORMERS}[name])
        assert set().union(*(rank[name][1] for rank in found)) == gradients.keys(), name
        for own_loss, own, _ in (rank[name] for rank in found):
            assert own_loss == pytest.approx(loss, rel=1e-12), name
            for key, value in own.items():
                expected = gradients[key]
                if value is None or expected is None:
                    assert all(one is None or not one.any() for one in (value, expected)), (name, key)
                else:
                    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12, msg=f"{name}: {key}")
        for key, expected in buffers.items():
            held = [rank[name][2][key] for rank in found if key in rank[name][2]]
            assert any(torch.allclose(one, expected, rtol=0, atol=1e-12) for one in held), (name, key)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("half", [0, 1])
def test_models_are_cut_at_first_sight(half: int) -> None:
    """Sequentials, CNNs with functions between layers, skips over stages, tied heads in functional form, masks, rotary tables, in-place ops, encoder and decoder: all on two stages."""
    names = list(CASES)[half::2]
    assert_same(names, run_ranks(run_staged, 2, names, "1f1b", False, timeout_s=240))


@pytest.mark.parametrize(("schedule", "gives_example"), [("interleaved_zero_bubble", False), ("looped_bfs", True)])  # fmt: skip
def test_models_are_cut_into_four_stages(schedule: str, gives_example: bool) -> None:
    """What is sent over several stages, forward and backward in two halves; cut by the order of the modules, or by the calls of an example."""
    assert_same(DEEP, run_ranks(run_staged, 2, DEEP, schedule, gives_example, timeout_s=120))


@pytest.mark.timeout(300)
def test_models_of_transformers_are_cut_at_first_sight() -> None:
    """Llama, GPT-2, BERT, T5, OPT, which holds its parts in another order than it calls them, and a mixture of experts: nothing is said of their blocks."""
    pytest.importorskip("transformers")
    names = list(TRANSFORMERS)
    assert_same(names, run_ranks(run_staged, 2, names, "1f1b", False, timeout_s=240))
