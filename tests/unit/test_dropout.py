"""GlobalDropout in one process: what a mask depends on and what not, that it is random, and what is refused."""

from __future__ import annotations

import copy
import random
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise.base.errors import UsageError
from rankwise.data.sample_position import placed
from rankwise.train.dropout import GlobalDropout, decide_kept

#: Standard deviations that a fair coin leaves once in two million tests.
SIGMAS = 5.0


def build(p: float = 0.5, seed: int = 0, **more: Any) -> GlobalDropout:
    torch.manual_seed(seed)
    return GlobalDropout(p, **more)


def mask(layer: GlobalDropout, shape: Any, positions: Any = None, epoch: int = 0) -> Tensor:
    """Return where ones are kept."""
    with placed(range(shape[layer.batch_dim]) if positions is None else positions, epoch=epoch):
        return layer(torch.ones(shape)) != 0


def agree_by_chance(one: Tensor, other: Tensor, p: float) -> bool:
    """Whether two masks agree as often as independent ones do."""
    chance, number = p * p + (1 - p) * (1 - p), one.numel()
    found = float((one == other).double().mean())
    return abs(found - chance) < SIGMAS * (chance * (1 - chance) / number) ** 0.5


# ----------------------------------------------------------------------------------- what it does


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_kept_is_scaled_and_the_rest_is_zero(dtype: torch.dtype) -> None:
    """Each element is 0 or x / (1 - p), in the input's dtype, and its gradient is 0 or 1 / (1 - p) at the same places."""
    x = torch.randn(8, 50, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    with placed(range(8)):
        y = build(0.2)(x)
        y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    kept = y != 0
    assert 0 < int((~kept).sum()) < 200
    torch.testing.assert_close(y, torch.where(kept, x * 1.25, 0))
    torch.testing.assert_close(x.grad, torch.where(kept, 1.25, 0.0).to(dtype))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_as_many_are_dropped_as_was_asked_for(p: float) -> None:
    """The fraction of zeros is p, over all elements and spread over rows and columns as coins are."""
    kept = mask(build(p), (400, 1000)).double()
    assert abs(float(kept.mean()) - (1 - p)) < SIGMAS * (p * (1 - p) / kept.numel()) ** 0.5
    for dim, number in ((0, 400), (1, 1000)):
        # The sum of squared deviations of n sums in units of their variance: n, give or take sqrt(2 n).
        sums = kept.sum(dim)
        spread = float((sums - number * (1 - p)).square().sum() / (number * p * (1 - p)))
        assert abs(spread - len(sums)) < SIGMAS * (2 * len(sums) + len(sums) / (number * p * (1 - p))) ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_of_layers_samples_epochs_and_calls_are_independent(p: float) -> None:
    """Any two of them agree as often as chance has it; so do neighbours among rows, columns and pixels."""
    layer, shape = build(p), (64, 1024)
    masks = [
        mask(layer, shape),
        mask(layer, shape, epoch=1),
        mask(layer, shape, epoch=2),
        mask(build(p, 1), shape),
    ]
    masks += [mask(layer, shape, range(64, 128)), mask(layer, shape, range(1 << 40, (1 << 40) + 64))]
    with placed(range(64)):
        masks += [layer(torch.ones(shape)) != 0 for _ in range(3)][1:]
    for one, other in combinations(masks, 2):
        assert agree_by_chance(one, other, p)
    whole = mask(layer, (32, 8, 16, 16))
    for dim in range(4):
        for step in (1, 2, 4):
            size = whole.size(dim) - step
            assert agree_by_chance(whole.narrow(dim, 0, size), whole.narrow(dim, step, size), p)


def test_in_evaluation_and_without_chance_the_input_comes_back() -> None:
    """In evaluation mode and with p = 0 it is the same tensor and needs no loader; p = 1 leaves zeros."""
    x = torch.randn(3, 2)
    assert build().eval()(x) is x
    assert build(0)(x) is x
    with placed(range(3)):
        assert not build(1)(x).any()


# ------------------------------------------------------------------------------ what a mask depends on


def test_a_sample_has_its_mask_in_any_batch() -> None:
    """Split, dealt out and in another order: each sample's mask is that of its position."""
    whole = mask(build(), (12, 5, 7))
    for positions in (range(1, 12, 3), range(5, 6), [7, 2, 11], range(0)):
        part = mask(build(), (len(positions), 5, 7), positions)
        assert torch.equal(part, whole[list(positions)])


@pytest.mark.parametrize("shape", [(4, 10), (4, 3, 10), (4, 2, 3, 10)])
def test_padding_changes_nothing_for_what_was_there(shape: Any) -> None:
    """Longer in any dim but the samples': what was there keeps its mask."""
    small, large = mask(build(), shape), mask(build(), (4, *(size + 3 for size in shape[1:])))
    for dim, size in enumerate(shape):
        large = large.narrow(dim, 0, size)
    assert torch.equal(small, large)


def test_no_generator_is_read_or_moved() -> None:
    """Python's and torch's generators stand where they were after a forward, and another seed there gives the same mask."""
    layer = build()
    torch.manual_seed(5), random.seed(5)
    before = torch.get_rng_state(), random.getstate()
    first = mask(layer, (4, 9))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    torch.manual_seed(6)
    assert torch.equal(mask(layer, (4, 9)), first)


def test_masks_are_those_of_earlier_versions() -> None:
    """A run that goes on with a newer version draws the masks that the older one would have drawn."""
    torch.manual_seed(0)
    layer = GlobalDropout(0.5)
    layer.key.fill_(1234567890123456789)
    kept = mask(layer, (2, 3, 8), [5, 1 << 33], epoch=7)
    assert ["".join(map(str, row)) for row in kept.int().flatten(0, 1).tolist()] == GOLDEN


GOLDEN = ["10010010", "00100110", "10110000", "11100011", "00110111", "10001110"]


@pytest.mark.parametrize(("unit", "shape"), [("channel", (6, 40, 1, 1)), ("sample", (6, 1, 1, 1))])
def test_channels_and_samples_are_dropped_as_one(unit: Any, shape: Any) -> None:
    """All pixels of a channel, or all of a sample, share their chance; channels and samples don't."""
    kept = mask(build(unit=unit), (6, 40, 3, 5))
    assert torch.equal(kept, kept[tuple(slice(0, size) for size in shape)].expand_as(kept))
    assert 0 < int(kept.sum()) < kept.numel()


def test_the_samples_may_stand_in_another_dim() -> None:
    """With batch_dim=1, (S, B, D) gets the masks that (B, S, D) gets; a vector of one number for each sample works, too."""
    first = mask(build(), (6, 4, 5))
    assert torch.equal(mask(build(batch_dim=1), (4, 6, 5)), first.transpose(0, 1))
    assert torch.equal(mask(build(batch_dim=-2), (4, 6, 5)), first.transpose(0, 1))
    for unit in ("element", "sample"):
        assert torch.equal(mask(build(unit=unit), (6,)), mask(build(unit=unit), (6, 1))[:, 0])


def test_flattened_rows_belong_to_their_samples() -> None:
    """Tokens flattened to (B * S, D): split over two batches, each sample's rows have the same masks; more rows come behind."""

    def rows(positions: Any, number: int) -> Tensor:
        layer = build(flattened=True)
        with placed(positions):
            return (layer(torch.ones(len(positions) * number, 9)) != 0).view(len(positions), number, 9)

    whole = rows(range(4), 3)
    assert torch.equal(rows(range(1, 4, 2), 3), whole[1::2])
    assert torch.equal(rows(range(4), 5)[:, :3], whole)
    assert rows(range(0), 3).shape == (0, 3, 9)
    assert agree_by_chance(rows(range(400), 3)[:, 0], rows(range(400), 3)[:, 1], 0.5)


# ---------------------------------------------------------------------------------------------- the key


def test_the_same_seed_gives_the_same_key() -> None:
    """The key comes from torch's default generator: equal seeds, equal masks; two layers of one model differ."""
    assert torch.equal(build(seed=3).key, build(seed=3).key)
    torch.manual_seed(3)
    assert not torch.equal(GlobalDropout().key, GlobalDropout().key)


def test_a_checkpoint_carries_the_key() -> None:
    """A layer made with another seed draws, with the state of the first one, the first one's masks; so does a copy."""
    first, second = build(seed=1), build(seed=2)
    assert not torch.equal(mask(first, (4, 99)), mask(second, (4, 99)))
    second.load_state_dict(first.state_dict())
    assert torch.equal(mask(first, (4, 99)), mask(second, (4, 99)))
    assert torch.equal(mask(first, (4, 99)), mask(copy.deepcopy(first), (4, 99)))


def test_a_layer_made_without_memory_gets_its_key_later() -> None:
    """Made on the meta device, as big models are, reset_parameters() draws the key; the model's dtype does not touch it."""
    with torch.device("meta"):
        layer = GlobalDropout()
    assert layer.key.is_meta
    layer = layer.to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    assert torch.equal(layer.half().key, build().key)
    assert mask(layer, (4, 9)).any()


# --------------------------------------------------------------------------------------------- refused


def test_outside_of_a_loop_it_says_what_to_do() -> None:
    """Without a micro-batch at hand the forward is an error that names the ways out."""
    with pytest.raises(UsageError, match=r"no micro-batch(.|\n)*placed(.|\n)*eval"):
        build()(torch.ones(2, 3))
    with placed(range(2)):
        build()(torch.ones(2, 3))
    with pytest.raises(UsageError, match="no micro-batch"):
        build()(torch.ones(2, 3))


@pytest.mark.parametrize(("flattened", "num_rows"), [(False, 8), (False, 3), (True, 6), (True, 3)])
def test_a_batch_of_another_size_is_refused(flattened: bool, num_rows: int) -> None:
    """Both numbers are named; with flattened=True only a multiple fits."""
    with placed(range(4)), pytest.raises(UsageError, match=f"{num_rows} rows, .* 4 samples"):
        build(flattened=flattened)(torch.ones(num_rows, 3))


def test_arguments_that_mean_nothing_are_refused() -> None:
    """A probability outside of 0 to 1, an unknown unit, channels where there are none."""
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(UsageError, match="p="):
            GlobalDropout(p)
    with pytest.raises(UsageError, match="pixel"):
        GlobalDropout(unit="pixel")  # type: ignore[arg-type]
    with placed(range(4)), pytest.raises(UsageError, match="no channels"):
        build(unit="channel")(torch.ones(4))


def test_the_hash_is_no_worse_than_torch_s_generator_at_small_sizes() -> None:
    """Over many keys, each of the 16 masks of four elements comes as often as the others."""
    keys = torch.randint(1 << 62, (4000,), generator=torch.Generator().manual_seed(1))
    for shape in ((1, [4]), (2, [2]), (1, [2, 2]), (4, [1])):
        tickets = torch.arange(shape[0]) * 7919
        found = torch.stack([decide_kept(tickets, key, 0.5, shape[1]).flatten() for key in keys])
        counts = torch.bincount((found.long() * torch.tensor([1, 2, 4, 8])).sum(1), minlength=16)
        spread = float((counts - 250.0).square().sum() / 250)
        assert spread < 15 + SIGMAS * 30**0.5


def test_print_shows_what_it_is() -> None:
    """As torch's layers do."""
    assert str(nn.Sequential(GlobalDropout(0.1), GlobalDropout(unit="sample"))) == (
        "Sequential(\n  (0): GlobalDropout(p=0.1)\n  (1): GlobalDropout(p=0.5, unit='sample')\n)"
    )
