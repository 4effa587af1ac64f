"""In which order an epoch shows its samples: which one stands at position p is computed from p, seed and epoch.

An order knows nothing of ranks, batches in flight or workers: that is why it can be the same for any number of them.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.base.errors import UsageError
from rankwise.data.permutation import checksum, hash_numbers, permute, pick
from rankwise.runtime.rng import derive_seed

if TYPE_CHECKING:
    from torch import Tensor

#: Batches that are sorted by length together: enough that lengths are alike, few enough that much is left to chance.
GROUP_BATCHES = 64
#: Weights become whole numbers whose sum stays below this, so that it is exact.
_MOST_BITS = 62


@final
class SequentialOrder:
    """The data set's own order, the same in each epoch.

    Attributes:
        name: What kind of order this is, with all that it depends on besides seed and number of samples.
        num_samples: Positions of an epoch.
    """

    name = "sequential"

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def take(self, epoch: int, positions: Tensor) -> Tensor:  # noqa: ARG002 - as of all orders
        """Return the indices at some positions of an epoch; here the positions themselves.

        Args:
            epoch: Which epoch, from 0.
            positions: int64, shape (N,), each 0 to ``num_samples - 1``.

        Returns:
            int64, shape (N,).
        """
        return positions


@final
class ShuffledOrder:
    """Every sample once, shuffled anew in each epoch, in the memory of a few numbers."""

    name = "shuffled"

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples, self._seed = num_samples, seed

    def take(self, epoch: int, positions: Tensor) -> Tensor:
        """Return the indices at some positions of an epoch."""
        return permute(positions, self.num_samples, derive_seed(self._seed, "shuffle", epoch))


@final
class LengthGroupedOrder:
    """Every sample once, and samples of like length in the same batch, so that little is padded.

    The shuffled order is cut into groups of 64 global batches; each group is sorted by length and cut into batches,
    and their order is shuffled. What is left of the epoch after the last whole batch stays at the end.

    Args:
        lengths: Length of each sample, shape (N,): whole numbers, in whatever unit.
        global_batch: Samples of a global batch.
        seed: The seed.
    """

    def __init__(self, lengths: Any, global_batch: int, seed: int) -> None:
        self._lengths = torch.as_tensor(lengths, device="cpu").to(torch.int64)
        self.num_samples, self._global_batch, self._seed = len(self._lengths), global_batch, seed
        self._group_size = GROUP_BATCHES * global_batch
        self._kept: tuple[tuple[int, int], Tensor] | None = None

    @cached_property
    def name(self) -> str:
        """What kind of order this is: the global batch and the lengths are part of it."""
        return f"length-grouped/{GROUP_BATCHES}x{self._global_batch}/{checksum(self._lengths)}"

    def take(self, epoch: int, positions: Tensor) -> Tensor:
        """Return the indices at some positions of an epoch."""
        groups, found = positions // self._group_size, torch.empty_like(positions)
        for group in groups.unique().tolist():
            chosen = (groups == group).nonzero().flatten()
            places = pick(positions, chosen) - group * self._group_size
            found.index_copy_(0, chosen, pick(self._sort_group(epoch, group), places))
        return found

    def _sort_group(self, epoch: int, group: int) -> Tensor:
        if self._kept is not None and self._kept[0] == (epoch, group):
            return self._kept[1]
        start = group * self._group_size
        stop = min(start + self._group_size, self.num_samples)
        positions = torch.arange(start, stop, device="cpu")
        shuffled = permute(positions, self.num_samples, derive_seed(self._seed, "shuffle", epoch))
        num_batches = (stop - start) // self._global_batch
        whole = num_batches * self._global_batch
        batches = self._sort(shuffled[:whole]).view(num_batches, self._global_batch)
        key = derive_seed(self._seed, "batches", epoch, group)
        batches = pick(batches, permute(torch.arange(num_batches, device="cpu"), num_batches, key))
        self._kept = ((epoch, group), torch.cat([batches.flatten(), self._sort(shuffled[whole:])]))
        return self._kept[1]

    def _sort(self, indices: Tensor) -> Tensor:
        return pick(indices, pick(self._lengths, indices).argsort(stable=True))


@final
class WeightedOrder:
    """Samples drawn by chance, each as often as its weight says.

    With replacement, position p holds the sample into whose part of the sum of all weights a hash of p falls. Without,
    each sample gets an exponentially distributed number divided by its weight, and the smallest come first
    (Efraimidis & Spirakis, "Weighted random sampling with a reservoir", 2006).

    Args:
        weights: Weight of each sample, shape (N,): not negative, not all 0.
        num_samples: How many are drawn in an epoch.
        seed: The seed.
        replacement: Whether a sample may come twice in an epoch.

    Raises:
        UsageError: The weights can't be weights, or there are too few.
    """

    def __init__(self, weights: Any, num_samples: int, seed: int, *, replacement: bool = True) -> None:
        self._weights = torch.as_tensor(weights, device="cpu").to(torch.float64)
        self.num_samples, self._seed, self._replacement = num_samples, seed, replacement
        _check_weights(self._weights, num_samples, replacement=replacement)
        self._ends = _round_weights(self._weights).cumsum(0) if replacement else None
        self._kept: tuple[int, Tensor] | None = None

    @cached_property
    def name(self) -> str:
        """What kind of order this is: the weights are part of it."""
        how = "with" if self._replacement else "without"
        return f"weighted/{how} replacement/{checksum(self._weights)}"

    def take(self, epoch: int, positions: Tensor) -> Tensor:
        """Return the indices at some positions of an epoch."""
        key = derive_seed(self._seed, "weighted", epoch)
        if self._ends is not None:
            places = _scale(hash_numbers(positions, key), int(self._ends[-1]))
            return torch.searchsorted(self._ends, places, right=True)
        if self._kept is None or self._kept[0] != epoch:
            self._kept = (epoch, self._draw_all(key))
        return pick(self._kept[1], positions)

    def _draw_all(self, key: int) -> Tensor:
        """Return one epoch's samples without replacement."""
        candidates = self._weights.nonzero().flatten()
        # 53 random bits and a half: never 0, never 1.
        bits = (hash_numbers(candidates, key) >> 11) & ((1 << 53) - 1)
        chance = (bits.to(torch.float64) + 0.5) / (1 << 53)
        waits = -_log(chance) / pick(self._weights, candidates)
        return pick(candidates, waits.argsort(stable=True)[: self.num_samples])


#: What stands where in an epoch.
Order = SequentialOrder | ShuffledOrder | LengthGroupedOrder | WeightedOrder


def _check_weights(weights: Tensor, num_samples: int, *, replacement: bool) -> None:
    if weights.dim() != 1 or not bool(torch.isfinite(weights).all()) or not bool((weights >= 0).all()):
        raise UsageError(
            f"weights of shape {tuple(weights.shape)}: they must be one finite number, 0 or more, for each sample",
            hint="look for NaN, infinities and negative numbers among them",
        )
    num_positive = int((weights > 0).sum())
    if num_positive == 0 and num_samples:
        raise UsageError(f"all {len(weights)} weights are 0", hint="at least one sample must have a chance")
    if not replacement and num_samples > num_positive:
        raise UsageError(
            f"num_samples={num_samples} without replacement, and {num_positive} weights are above 0",
            hint="draw fewer, or with replacement=True",
        )


def _round_weights(weights: Tensor) -> Tensor:
    """Return whole numbers in the proportion of the weights, as fine as their sum allows; what is above 0 stays so."""
    if not len(weights):
        return weights.to(torch.int64)
    _, exponent = torch.frexp(weights.max())
    shift = _MOST_BITS - 1 - len(weights).bit_length() - int(exponent)
    # A power of two changes no digit. In two steps, as 2**shift alone may be infinite.
    scaled = torch.ldexp(torch.ldexp(weights, torch.tensor(shift // 2)), torch.tensor(shift - shift // 2))
    return torch.where(weights > 0, scaled.floor().clamp(min=1), 0.0).to(torch.int64)


def _scale(bits: Tensor, total: int) -> Tensor:
    """Return ``floor(total * b / 2**64)`` for 64 random bits b, in halves, as the product has 126 bits."""
    mask = 0xFFFFFFFF
    high, low = (bits >> 32) & mask, bits & mask
    total_high, total_low = total >> 32, total & mask
    middle = high * total_low  # below 2**64: wraps, and is read without a sign
    carry = ((middle & mask) + ((low * total_low) >> 32 & mask) + (low * total_high & mask)) >> 32
    return high * total_high + ((middle >> 32) & mask) + ((low * total_high) >> 32) + carry


def _log(numbers: Tensor) -> Tensor:
    """Return natural logarithms of float64 numbers in (0, 1), by + - * / alone.

    Libraries' logarithms differ in the last digit from processor to processor, and two ranks that sort by them
    might sort differently.
    """
    mantissa, exponent = torch.frexp(numbers)
    ratio = (mantissa - 1) / (mantissa + 1)  # mantissa is 0.5 to 1: -1/3 to 0
    square = ratio * ratio
    total = torch.zeros_like(ratio)
    for odd in range(35, 0, -2):
        total = total * square + 1.0 / odd
    return exponent.to(torch.float64) * 0.6931471805599453 + 2.0 * (ratio * total)
