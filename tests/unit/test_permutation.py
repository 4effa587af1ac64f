"""The computed permutation: every number once, the same on every machine, and as shuffled as statistics can tell."""

from __future__ import annotations

import hashlib
import math
import runpy
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from rankwise.base.errors import UsageError
from rankwise.data.epoch_order import ShuffledOrder
from rankwise.data.permutation import (
    MAX_SIZE,
    NUM_ROUNDS,
    TABLE_SIZE,
    checksum,
    encipher,
    hash_numbers,
    permute,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    Shuffle = Callable[[Tensor, int, int], Tensor]

MASK = (1 << 64) - 1
_SIZES = [0, 1, 2, 3, 1000, TABLE_SIZE - 1, TABLE_SIZE, TABLE_SIZE + 1, (1 << 17) - 1, 1 << 17, (1 << 17) + 1]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: several would wait for each other where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --------------------------------------------------------------------- a permutation, and always the same


@pytest.mark.parametrize("size", _SIZES)
def test_every_number_comes_once(size: int) -> None:
    """On both sides of the table's end and of powers of two, the result is a permutation."""
    found = permute(torch.arange(size), size, key=5)
    assert torch.equal(found.sort().values, torch.arange(size))


@given(st.integers(2, 12), st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=9))
def test_the_network_is_a_permutation_for_any_keys(num_bits: int, round_keys: list[int]) -> None:
    """Whatever the keys and however uneven the halves, no two numbers become the same."""
    numbers = torch.arange(1 << num_bits)
    assert torch.equal(encipher(numbers, num_bits, torch.tensor(round_keys, dtype=torch.int64)).sort().values, numbers)


@given(st.integers(TABLE_SIZE + 1, MAX_SIZE), st.integers(0, MASK), st.data())
@example(MAX_SIZE, MASK, None)
@settings(max_examples=50, deadline=None)
def test_it_is_what_plain_integers_give(size: int, key: int, data: st.DataObject | None) -> None:
    """At any size up to 2**62 the tensors compute what Python's unbounded integers do: nothing depends on a platform."""
    positions = [0, size // 2, size - 1]
    if data is not None:
        positions += data.draw(st.lists(st.integers(0, size - 1), max_size=3))
    expected = [_permute_plain(position, size, key) for position in positions]
    assert permute(torch.tensor(positions), size, key).tolist() == expected


def _permute_plain(position: int, size: int, key: int) -> int:
    digest = hashlib.blake2b(key.to_bytes(8, "little"), digest_size=64).digest()
    keys = [int.from_bytes(digest[start : start + 8], "little") for start in range(0, 64, 8)]
    num_bits = (size - 1).bit_length()
    low_bits = num_bits // 2
    while True:
        low, high = position % (1 << low_bits), position >> low_bits
        for number, round_key in enumerate(keys):
            if number % 2 == 0:
                high ^= _hash_plain(low, low_bits, round_key) >> (64 - num_bits + low_bits)
            else:
                low ^= _hash_plain(high, num_bits - low_bits, round_key) >> (64 - low_bits)
        position = high << low_bits | low
        if position < size:
            return position


def _hash_plain(half: int, num_bits: int, key: int) -> int:
    if half >> (num_bits - 1):  # a half is a signed number
        half -= 1 << num_bits
    mixed = (half * 0xBF58476D1CE4E5B9 + key) & MASK
    sign = MASK >> 32 << 32 if mixed >> 63 else 0  # and so is what is shifted
    return (mixed ^ (mixed >> 32 | sign)) * 0x94D049BB133111EB & MASK


def test_the_hash_is_splitmix64() -> None:
    """Numbers 0, 1, 2 hash to the first outputs of splitmix64, seeded with the key."""

    def outputs(seed: int) -> list[int]:
        found = []
        for _ in range(3):
            seed = (seed + 0x9E3779B97F4A7C15) & MASK
            mixed = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & MASK
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
            found.append(mixed ^ mixed >> 31)
        return found

    for key in (0, 1234567, MASK):
        assert [number & MASK for number in hash_numbers(torch.arange(3), key).tolist()] == outputs(key)


@pytest.mark.parametrize(
    ("size", "first"),
    [
        (10, [9, 1, 5, 4, 8]),
        (1000, [973, 651, 539, 731, 643]),
        (65_537, [16325, 9849, 15469, 16984, 23890]),
        (10**6, [772474, 761509, 123267, 627443, 17432]),
        (10**12, [705092686448, 839795512744, 784887554976, 168243375310, 504809827868]),
        (
            MAX_SIZE,
            [
                4522199966856910972,
                431018713537920362,
                1226866530642416994,
                3746670384051915161,
                2529005922569284800,
            ],
        ),
    ],
)
def test_golden_values(size: int, first: list[int]) -> None:
    """Epoch 3 of seed 17 begins as it always has: a job that goes on with a later version sees the same order."""
    assert ShuffledOrder(size, seed=17).take(3, torch.arange(5)).tolist() == first


def test_blocks_shapes_and_threads_change_nothing() -> None:
    """Any part of the order, in any shape and with any number of threads, is the same; what is given is not modified."""
    positions = torch.arange(100_000)
    whole = permute(positions, 10**9, key=1)
    assert torch.equal(positions, torch.arange(100_000))
    assert torch.equal(permute(positions.view(10, -1), 10**9, key=1), whole.view(10, -1))
    assert torch.equal(permute(positions[::7], 10**9, key=1), whole[::7])
    torch.set_num_threads(3)
    assert torch.equal(permute(positions, 10**9, key=1), whole)


def test_too_many_numbers_are_refused() -> None:
    """More than 2**62 numbers are an error that tells both."""
    with pytest.raises(UsageError, match=f"{MAX_SIZE + 1} samples"):
        permute(torch.arange(3), MAX_SIZE + 1, key=0)


def test_checksums_tell_lists_apart() -> None:
    """A value, the order and the length of a list each change its checksum, and the checksum is always the same."""
    lists = [[1, 2, 3], [1, 3, 2], [1, 2, 4], [1, 2], [], [0], [0, 0]]
    sums = [checksum(torch.tensor(numbers, dtype=torch.int64)) for numbers in lists]
    assert len(set(sums)) == len(lists)
    assert sums[0] == "d53b8ce13605f9f6"
    assert checksum(torch.tensor([1.0, 2.0], dtype=torch.float64)) != sums[3]


# ------------------------------------------------------------------------------------- how well it shuffles
#
# Each statistic counts things in cells and returns how many standard deviations the sum of squares lies above what
# chance gives (chi-square). Keys are fixed, so a pass is a pass for ever; 5 would be exceeded by chance once in a
# million times. The same statistics are taken of bad shuffles, and must see them.


def _excess(counts: Tensor) -> float:
    counts = counts.to(torch.float64)
    expected = counts.mean()
    freedom = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def _count_pairs(first: Tensor, second: Tensor, size: int, num_cells: int = 32) -> float:
    """Return the excess for pairs of numbers below ``size``, in square cells."""
    cells = first * num_cells // size * num_cells + second * num_cells // size
    return _excess(torch.bincount(cells, minlength=num_cells**2))


def count_positions(shuffle: Shuffle, size: int) -> float:
    """Where do the first 64 positions lead, over 300 keys?"""
    found = torch.stack([shuffle(torch.arange(64), size, key) for key in range(300)])
    cells = found * 16 // size + 16 * torch.arange(64)
    return _excess(torch.bincount(cells.flatten(), minlength=16 * 64))


def count_neighbours(shuffle: Shuffle, size: int) -> float:
    """Are neighbours in the order independent of each other?"""
    number = min(size, 100_000)
    found = torch.stack([shuffle(torch.arange(number), size, key) for key in range(100_000 // number)])
    return _count_pairs(found[:, :-1].flatten(), found[:, 1:].flatten(), size)


def count_distances(shuffle: Shuffle, size: int) -> float:
    """Do positions at a distance of a power of two, where a network has its seams, lead anywhere from each other?"""
    worst, start = -math.inf, torch.arange(min(size // 2, 20_000))
    keys = range(20_000 // len(start))
    for power in range(0, (size // 2).bit_length() - 1, 2):
        near, far = (torch.cat([shuffle(start + shift, size, key) for key in keys]) for shift in (0, 1 << power))
        worst = max(worst, _excess(torch.bincount((near - far) % size * 50 // size, minlength=50)))
    return worst


def count_epochs(shuffle: Shuffle, size: int) -> float:
    """Does a position of one epoch tell where it leads in the next one?"""
    positions = torch.arange(1000)
    found = [shuffle(positions, size, key) for key in range(101)]
    return _count_pairs(torch.cat(found[:-1]), torch.cat(found[1:]), size)


STATISTICS = [count_positions, count_neighbours, count_distances, count_epochs]
#: Up to 10**12: cells are computed as number * 64, which must stay below 2**63.
SIZES = [1000, 60_000, 70_001, 1 << 20, 10**8, 10**12]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("statistic", STATISTICS, ids=lambda statistic: statistic.__name__)
def test_it_shuffles_well(statistic: Callable[[Shuffle, int], float], size: int) -> None:
    """Positions are uniform, neighbours and epochs independent, and no distance betrays the network."""
    assert statistic(permute, size) < 5


def _keep(positions: Tensor, size: int, key: int) -> Tensor:
    return positions


def _rotate(positions: Tensor, size: int, key: int) -> Tensor:
    return (positions + key * 7919 * (size // 10_007 + 1)) % size


def _multiply(positions: Tensor, size: int, key: int) -> Tensor:
    factor = size // 3 + 2 * key + 1
    while math.gcd(factor, size) > 1:
        factor += 1
    return torch.tensor([(position * factor + key) % size for position in positions.tolist()])


def _two_rounds(positions: Tensor, size: int, key: int) -> Tensor:
    return _few_rounds(positions, size, key, 2)


def _three_rounds(positions: Tensor, size: int, key: int) -> Tensor:
    return _few_rounds(positions, size, key, 3)


def _few_rounds(positions: Tensor, size: int, key: int, num_rounds: int) -> Tensor:
    round_keys = hash_numbers(torch.arange(num_rounds), key)
    num_bits = (size - 1).bit_length()
    found = encipher(positions, num_bits, round_keys)
    while bool((found >= size).any()):
        found = torch.where(found >= size, encipher(found, num_bits, round_keys), found)
    return found


@pytest.mark.parametrize(
    ("shuffle", "size", "seen_by"),
    [
        (_keep, 10**6, STATISTICS),
        (_rotate, 10**6, [count_neighbours, count_distances]),
        (_multiply, 10**6, [count_neighbours, count_distances]),
        (_two_rounds, 1 << 20, [count_distances]),
        (_two_rounds, 10**12, [count_distances]),
        (_three_rounds, 1000, [count_distances]),
    ],
)
def test_bad_shuffles_are_seen(shuffle: Shuffle, size: int, seen_by: list[Callable[[Shuffle, int], float]]) -> None:
    """The statistics can fail: identity, rotation, affine maps and networks of few rounds are found out."""
    for statistic in seen_by:
        assert statistic(shuffle, size) > 10, statistic.__name__


def test_all_orders_of_five_are_equally_likely() -> None:
    """Over 12000 epochs each of the 120 orders of five samples comes about 100 times."""
    order, counts = ShuffledOrder(5, seed=0), dict[tuple[int, ...], int]()
    for epoch in range(12_000):
        found = tuple(order.take(epoch, torch.arange(5)).tolist())
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 120
    assert _excess(torch.tensor(list(counts.values()))) < 5


@pytest.mark.parametrize("num_bits", [6, 7, 10])
def test_the_network_holds_in_small_worlds(num_bits: int) -> None:
    """Even where a network is weakest, far below where it is used, pairs half the numbers apart lead anywhere; four rounds don't do.

    The exclusive or of two results is counted over 4000 keys; each pair once.
    """
    half = 1 << (num_bits - 1)

    def count(num_rounds: int) -> float:
        counts = torch.zeros(2 * half, dtype=torch.int64)
        for key in range(4000):
            round_keys = hash_numbers(torch.arange(num_rounds), key)
            found = encipher(torch.arange(2 * half), num_bits, round_keys)
            counts += torch.bincount(found[:half] ^ found[half:], minlength=2 * half)
        return _excess(counts[1:])

    assert count(NUM_ROUNDS) < 5
    assert count(4) > 50


def test_seed_and_epoch_are_not_added() -> None:
    """Epoch 1 of seed 0 is not epoch 0 of seed 1: jobs with neighbouring seeds don't see each other's orders."""
    positions = torch.arange(100)
    first, second = ShuffledOrder(10**6, 0).take(1, positions), ShuffledOrder(10**6, 1).take(0, positions)
    assert len(set(first.tolist()) & set(second.tolist())) < 5


def test_first_parts_of_epochs_overlap_by_chance_only() -> None:
    """The first 1000 of 10**6 have one sample in common with those of the next epoch, on average: 30 to 75 in 50 epochs."""
    order, positions = ShuffledOrder(10**6, seed=2), torch.arange(1000)
    parts = [set(order.take(epoch, positions).tolist()) for epoch in range(51)]
    assert 30 < sum(len(this & following) for this, following in pairwise(parts)) < 75


def test_the_picture_shows_this_permutation() -> None:
    """docs/pictures/permutation.svg is what docs/draw_permutation.py draws now, character by character."""
    docs = Path(__file__).parents[2] / "docs"
    script = runpy.run_path(str(docs / "draw_permutation.py"))
    assert (docs / "pictures" / "permutation.svg").read_text(encoding="utf-8") == script["render"]()
