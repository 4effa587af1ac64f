"""GlobalDropout called several times, computed again in the backward, compiled, and put into whole models."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rankwise.base.errors import ModelError, UsageError
from rankwise.data.sample_position import placed
from rankwise.train.dropout import GlobalDropout, replace_dropout, same_masks

RECOMPUTED = pytest.mark.parametrize("use_reentrant", [False, True])


class Block(nn.Module):
    """A layer, dropout, and a product that needs the dropped values for its gradient."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(6, 6), dropout, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(self.first(x))).tanh()


def build(*, is_shared: bool = False) -> Any:
    """Two blocks, with a dropout layer of their own each or one for both."""
    torch.manual_seed(0)
    first, second = GlobalDropout(), GlobalDropout()
    return nn.ModuleList([Block(first), Block(first if is_shared else second)]).double()


def find_gradients(blocks: Any, run: Any, positions: Any = range(3)) -> list[Tensor]:
    x = torch.linspace(-1, 1, 6 * len(positions), dtype=torch.float64).view(-1, 6).requires_grad_()
    blocks.zero_grad()
    with placed(positions):
        y = x
        for block in blocks:
            y = run(block, y)
        y.square().sum().backward()
    return [x.grad, *(parameter.grad.clone() for parameter in blocks.parameters())]


def assert_equal(ours: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


def plainly(block: Any, x: Tensor) -> Tensor:
    return block(x)


# ------------------------------------------------------------------------- called and computed again


def test_each_call_draws_another_mask() -> None:
    """A layer that is called twice for one micro-batch draws two masks, and the same two when that micro-batch comes again."""
    layer, x = GlobalDropout(), torch.ones(4, 99)
    drawn = []
    for _ in range(2):
        with placed(range(4)):
            drawn.append([layer(x), layer(x)])
    assert not torch.equal(drawn[0][0], drawn[0][1])
    assert_equal(drawn[0], drawn[1])


def test_a_copy_in_the_same_model_draws_masks_of_its_own() -> None:
    """Blocks made by copy.deepcopy, as many models are, don't drop the same."""
    layer, x = GlobalDropout(), torch.ones(4, 99)
    with placed(range(4)):
        assert not torch.equal(layer(x), copy.deepcopy(layer)(x))


@RECOMPUTED
def test_computed_again_it_is_the_same(use_reentrant: bool) -> None:
    """Under activation checkpointing the gradients are those without, to the bit."""
    expected = find_gradients(build(), plainly)
    found = find_gradients(build(), partial(checkpoint, use_reentrant=use_reentrant))
    assert_equal(found, expected)


@RECOMPUTED
def test_a_layer_with_several_calls_is_not_computed_again_by_guess(use_reentrant: bool) -> None:
    """Nobody knows which of two calls the backward computes again: an error that names the ways out."""
    with pytest.raises(UsageError, match=r"run 2 times(.|\n)*same_masks"):
        find_gradients(build(is_shared=True), partial(checkpoint, use_reentrant=use_reentrant))


@pytest.mark.parametrize("is_shared", [False, True])
def test_same_masks_remembers_which_call_it_was(is_shared: bool) -> None:
    """With same_masks the gradients are right for a shared layer too, within one checkpoint, in two, and in nested ones."""
    again = partial(checkpoint, use_reentrant=False, context_fn=same_masks)
    expected = find_gradients(build(is_shared=is_shared), plainly)
    assert_equal(find_gradients(build(is_shared=is_shared), again), expected)

    def run_twice(block: Any, x: Tensor, run: Any) -> Tensor:
        return run(block, run(block, x))

    expected = find_gradients(build(is_shared=is_shared), partial(run_twice, run=plainly))
    for run in (again, plainly):
        nested = partial(again, partial(run_twice, run=run))
        assert_equal(find_gradients(build(is_shared=is_shared), nested), expected)


@pytest.mark.parametrize("is_nested", [False, True])
def test_same_masks_holds_in_a_late_and_in_a_second_backward(is_nested: bool) -> None:
    """A graph that is kept gives the same gradient twice, also after the loop has gone on to other samples."""
    again = partial(checkpoint, use_reentrant=False, context_fn=same_masks)
    blocks = build(is_shared=True)

    def run_both(x: Tensor) -> Tensor:
        for block in blocks:
            x = again(block, x)
        return x

    x = torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6).requires_grad_()
    with placed(range(3)):
        y = again(run_both, x) if is_nested else run_both(x)
    expected = find_gradients(build(is_shared=True), plainly)[0]
    with placed(range(5, 8)):
        for _ in range(2):
            (gradient,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
            assert torch.equal(gradient, expected)


def test_a_late_backward_without_same_masks_is_refused() -> None:
    """What would be computed again with the masks of other samples is an error."""
    block = build()[0]
    with placed(range(3)):
        y = checkpoint(block, torch.ones(3, 6, dtype=torch.float64, requires_grad=True), use_reentrant=False)
    with placed(range(3, 6)), pytest.raises(UsageError, match=r"run 0 times(.|\n)*before you take the next"):
        y.sum().backward()


# ---------------------------------------------------------------------------------------- compiled


class Twice(nn.Module):
    """Two blocks with dropout, and one layer of it that is called twice on the same."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.shared = build(), GlobalDropout(0.25)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one, other = self.shared(x), self.shared(x)
        for block in self.blocks:
            x = block(x)
        return x, one, other


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's own, of torch 2.13
@pytest.mark.parametrize("by_block", [False, True])
def test_compiled_it_drops_the_same(by_block: bool) -> None:
    """As one graph or block by block, in steps and epochs that differ, masks and gradients are the eager ones; nothing is compiled anew."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter: Any = CompileCounterWithBackend("aot_eager")
    model = Twice()
    compiled = copy.deepcopy(model)
    if by_block:
        for block in compiled.blocks:
            block.compile(backend=counter, fullgraph=True)
    run = compiled if by_block else torch.compile(compiled, backend=counter, fullgraph=True)
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    seen = []
    for epoch, first in ((0, 0), (0, 4), (1, 0), (1, 1 << 40)):
        results = []
        for one in (model, run):
            one.zero_grad()
            with placed(range(first, first + 4), epoch=epoch):
                outputs = one(x)
                outputs[0].sum().backward()
            results.append([*outputs, *(parameter.grad for parameter in one.parameters())])
        assert not torch.equal(results[0][1], results[0][2])
        for ours, expected in zip(*reversed(results), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
        seen.append(results[0][1])
    assert not any(torch.equal(one, seen[0]) for one in seen[1:])
    # The two blocks are alike but for their tensors: one graph serves both.
    assert counter.frame_count == 1


def test_compiled_it_refuses_what_it_refuses_elsewhere() -> None:
    """A batch of another size is the same error in a compiled model."""
    torch.compiler.reset()
    layer = torch.compile(GlobalDropout(), backend="aot_eager", fullgraph=True)
    with placed(range(3)), pytest.raises(UsageError, match=r"4 rows, .* 3 samples"):
        layer(torch.ones(4, 2))


# ------------------------------------------------------------------------------------ whole models


def test_all_dropout_layers_of_a_model_are_replaced() -> None:
    """Nested, shared and switched off by eval(): each keeps its place, its p and its mode, and a shared one stays one."""
    shared = nn.Dropout(0.3)
    model = nn.Sequential(nn.Dropout(0.1), nn.Sequential(nn.Dropout2d(0.2), shared), shared, nn.Linear(2, 2)).eval()
    assert replace_dropout(model) is model
    assert [type(layer) for layer in model] == [GlobalDropout, nn.Sequential, GlobalDropout, nn.Linear]
    assert model[1][1] is model[2]
    layers = [layer for layer in model.modules() if isinstance(layer, GlobalDropout)]
    assert [(layer.p, layer.unit, layer.training) for layer in layers] == [
        (0.1, "element", False),
        (0.2, "channel", False),
        (0.3, "element", False),
    ]
    assert isinstance(replace_dropout(nn.Dropout1d(0.4)), GlobalDropout)


@pytest.mark.parametrize(
    ("layer", "plain"),
    [
        (nn.MultiheadAttention(4, 2, dropout=0.1), nn.MultiheadAttention(4, 2)),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.1), nn.LSTM(2, 2, num_layers=2)),
        (nn.AlphaDropout(), nn.AlphaDropout(0.0)),
        (type("Own", (nn.Dropout,), {})(0.5), nn.Dropout(0.5)),
    ],
)
def test_what_can_t_be_replaced_is_named(layer: nn.Module, plain: nn.Module) -> None:
    """Dropout inside of a layer's own forward: an error that names it and leaves the model alone; with partly=True it stays."""
    model = nn.ModuleDict({"first": nn.Dropout(), "odd": layer})
    with pytest.raises(ModelError, match=f"'odd' .{type(layer).__name__}"):
        replace_dropout(model)
    assert type(model["first"]) is nn.Dropout
    replace_dropout(model, partly=True)
    assert type(model["first"]) is GlobalDropout
    assert model["odd"] is layer
    replace_dropout(nn.ModuleDict({"odd": plain}))


def test_torch_s_own_transformer_trains_with_it() -> None:
    """An encoder of torch, whose attention drops nothing: a sample's output does not depend on who else is in its batch."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True, dtype=torch.float64)
    layer.self_attn.dropout = 0.0
    model = replace_dropout(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    x = torch.randn(6, 5, 8, dtype=torch.float64)
    with placed(range(6)):
        whole = model(x)
    with placed(range(1, 6, 2)):
        torch.testing.assert_close(model(x[1::2]), whole[1::2], rtol=0, atol=1e-12)
