"""Shuffle any number of samples without a list of them: where position p stands is computed from p and a key.

A shuffled list of 10**12 numbers needs 8 TB. A *keyed permutation* needs nothing: it is a cipher whose texts are the
numbers below n, and the order of an epoch is what it makes of 0, 1, 2, ... Up to ``TABLE_SIZE`` samples a list is
cheap, and sorting by a hash gives it without a doubt. Above, this is a Feistel network (Luby & Rackoff, "How to
construct pseudorandom permutations from pseudorandom functions", 1988) on the next power of two, whose results are
enciphered again while they lie outside: "cycle walking" (Black & Rogaway, "Ciphers with arbitrary finite domains",
2002). Only whole numbers are added, multiplied and shifted, with overflow, so that the order is the same on every
machine.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

#: Up to here a permutation is a table: 512 KiB, sorted in a few milliseconds once an epoch.
TABLE_SIZE = 1 << 16
#: Halves of a number have 31 bits at most, so that the round function never runs out of bits.
MAX_SIZE = 1 << 62
#: In worlds of 64 numbers, four rounds are seen by counting over 4000 keys, six over 20000, eight not.
NUM_ROUNDS = 8


def _signed(number: int) -> int:
    """Return the int64 that has the same 64 bits."""
    return number - (1 << 64) if number >> 63 else number


# Multipliers of splitmix64 (Steele, Lea & Flood 2014; constants of Vigna's public-domain version): odd, well mixed.
_GOLDEN, _FIRST, _SECOND = (_signed(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def permute(positions: Tensor, size: int, key: int) -> Tensor:
    """Return what stands at ``positions`` of the permutation of 0 to ``size - 1`` that belongs to ``key``.

    Args:
        positions: int64, any shape, each 0 to ``size - 1``; not modified.
        size: How many numbers are permuted, 0 to ``MAX_SIZE``.
        key: Any whole number; its lowest 64 bits count.

    Returns:
        int64, the same shape, each 0 to ``size - 1``; different positions give different numbers.

    Raises:
        UsageError: There are too many numbers.
    """
    flat = positions.flatten()
    if size <= TABLE_SIZE:
        return pick(_build_table(size, key), flat).view(positions.shape)
    if size > MAX_SIZE:
        raise UsageError(f"{size} samples can't be shuffled, at most {MAX_SIZE} can", hint="check the data set's len()")
    num_bits, round_keys = (size - 1).bit_length(), _derive_round_keys(key)
    found = encipher(flat, num_bits, round_keys)
    outside = (found >= size).nonzero().flatten()
    while outside.numel():
        walked = encipher(pick(found, outside), num_bits, round_keys)
        found.index_copy_(0, outside, walked)
        outside = pick(outside, (walked >= size).nonzero().flatten())
    return found.view(positions.shape)


def pick(numbers: Tensor, places: Tensor) -> Tensor:
    """Return the numbers at some places, in one thread: ``numbers[places]`` takes several, which wait for each other.

    Args:
        numbers: Shape (N, ...).
        places: int64, shape (M,), each 0 to ``N - 1``.

    Returns:
        Shape (M, ...).
    """
    return numbers.index_select(0, places)


def encipher(numbers: Tensor, num_bits: int, round_keys: Tensor) -> Tensor:
    """Permute the numbers of ``num_bits`` bits by a Feistel network, one round for each key.

    Each round changes one half by what a hash makes of the other, in turn; halves may differ by a bit.

    Args:
        numbers: int64, shape (N,), each below ``2**num_bits``; not modified.
        num_bits: 2 to 62.
        round_keys: int64, shape (R,); at least two rounds are needed to change all of a number.

    Returns:
        int64, shape (N,), each below ``2**num_bits``.
    """
    low_bits = num_bits // 2
    high_bits = num_bits - low_bits
    # Halves are held as signed numbers: a shift of a hash, which copies its sign, is one too, and needs no mask.
    low = (numbers << (64 - low_bits)) >> (64 - low_bits)
    high = (numbers << (64 - num_bits)) >> (64 - high_bits)
    for number, key in enumerate(round_keys.unbind()):
        if number % 2 == 0:
            high ^= _hash_half(low, key) >> (64 - high_bits)
        else:
            low ^= _hash_half(high, key) >> (64 - low_bits)
    return ((high << low_bits) & ((1 << num_bits) - 1)) | (low & ((1 << low_bits) - 1))


def _hash_half(half: Tensor, key: Tensor) -> Tensor:
    """Return 64 bits, of which the highest depend on all bits of ``half`` and ``key``."""
    mixed = half * _FIRST
    mixed += key
    mixed ^= mixed >> 32
    mixed *= _SECOND
    return mixed


def hash_numbers(numbers: Tensor, key: int) -> Tensor:
    """Return 64 bits for each number, as splitmix64 seeded with ``key`` makes them: different for different numbers.

    Args:
        numbers: int64, any shape; not modified.
        key: Any whole number; its lowest 64 bits count.

    Returns:
        int64, the same shape; all 64 bits are random, the sign too.
    """
    # The shift of an int64 copies its sign: a mask makes a logical shift of it.
    mixed = (numbers + 1).mul_(_GOLDEN).add_(_signed(key % (1 << 64)))
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed ^= (mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        mixed *= factor
    mixed ^= (mixed >> 31).bitwise_and_((1 << 33) - 1)
    return mixed


def checksum(numbers: Tensor) -> str:
    """Return 16 hexadecimal digits that tell one list of numbers from another.

    Args:
        numbers: int64 or float64, shape (N,).

    Returns:
        The digits; the same on every machine.
    """
    bits = numbers.contiguous().view(torch.int64)
    places = hash_numbers(torch.arange(len(bits), device="cpu"), key=0)
    return f"{int(hash_numbers(bits ^ places, key=len(bits)).sum()) % (1 << 64):016x}"


@lru_cache(maxsize=4)
def _build_table(size: int, key: int) -> Tensor:
    return hash_numbers(torch.arange(size, device="cpu"), key).argsort(stable=True)


@lru_cache(maxsize=16)
def _derive_round_keys(key: int) -> Tensor:
    digest = hashlib.blake2b((key % (1 << 64)).to_bytes(8, "little"), digest_size=8 * NUM_ROUNDS).digest()
    return torch.tensor(struct.unpack(f"<{NUM_ROUNDS}q", digest), device="cpu")
