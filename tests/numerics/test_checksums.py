"""Checksums of parameters: equal bits and nothing else give equal numbers, and large tensors are read in parts that move on."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rankwise.evidence.in_rank import checksums
from rankwise.evidence.in_rank.digests import Digests, _find_next


def _read(*tensors: torch.Tensor, turn: int = 0) -> checksums.Pending:
    pending = checksums.read(list(tensors), turn)
    assert pending.is_complete()
    return pending


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_one_bit_makes_the_difference(dtype: torch.dtype) -> None:
    """A copy has the same numbers; the next larger value in one place has another sum, and no other tensor's changes."""
    one, two = torch.randn(33).to(dtype), torch.randn(5).to(dtype)
    changed = one.clone()
    changed.view(torch.uint8)[40] ^= 1
    same, other = _read(one.clone(), two), _read(changed, two)
    assert same.pack() == _read(one, two).pack()
    assert same.sums[0] != other.sums[0]
    assert same.sums[1] == other.sums[1]


def test_a_sample_is_the_middle_element() -> None:
    """Four bytes of each: of larger elements the more significant half."""
    raw = _read(torch.tensor([1.0, 2.5, 3.0]), torch.tensor([1.5], dtype=torch.float64)).pack()[1]
    assert torch.frombuffer(bytearray(raw[:4]), dtype=torch.float32).item() == 2.5
    assert torch.frombuffer(bytearray(bytes(4) + raw[4:]), dtype=torch.float64).item() == 1.5


def test_every_part_of_a_large_tensor_has_its_turn() -> None:
    """No more than the quota is read at a time, and a change anywhere is seen at some turn."""
    large = torch.zeros(3 << 20)
    changed = large.clone()
    changed[1_000_003] = 1.0
    seen = [_read(large, turn=turn).sums != _read(changed, turn=turn).sums for turn in range(24)]
    assert any(seen)
    assert not all(seen)


def test_order_in_memory_counts_and_holes_are_not_read() -> None:
    """channels_last lies side by side too; a slice with gaps, an expanded tensor, an empty one and one without storage do not."""
    image = torch.randn(2, 3, 4, 4)
    last = image.to(memory_format=torch.channels_last)
    assert checksums.is_readable(last)
    assert _read(last).sums == _read(image.permute(0, 2, 3, 1).contiguous()).sums
    gone = torch.ones(8)
    gone.untyped_storage().resize_(0)
    for tensor in (torch.ones(4, 4)[:, ::2], torch.ones(1).expand(4), torch.ones(0), gone, torch.ones(3, device="meta")):  # fmt: skip
        assert not checksums.is_readable(tensor)


def test_what_a_gpu_adds_up_is_the_sum_of_the_bits() -> None:
    """The same operations on the CPU: by hand, each tensor's bits as whole numbers, whatever the others hold."""
    tensors = [torch.randn(size).to(torch.bfloat16) for size in (7, 1, 300, 50)]
    sums, middles = checksums.add_up(tensors, 64, 3, torch.tensor).tolist()
    for tensor, total, middle in zip(tensors, sums, middles, strict=True):
        bits = tensor.view(torch.int16).tolist()
        parts = checksums._cut(len(bits), 64, 3)
        assert total == sum(sum(bits[begin : begin + length]) for begin, length in parts)
        assert middle == bits[len(bits) // 2]


def test_what_is_on_its_way_is_picked_up_later() -> None:
    """Nothing is complete until the GPU says so; then sums and samples are in their places, also beside others that were there at once."""
    is_there: list[bool] = []
    event = SimpleNamespace(query=lambda: bool(is_there))
    bits = torch.tensor(2.5).view(torch.int32).item()
    numbers: Any = torch.tensor([[-5, 1 << 33], [bits, -1]])
    pending = checksums.Pending(3)
    pending.sums[1], pending.samples[1] = 9, b"same"
    pending.wait_for([0, 2], 4, numbers, event)
    assert not pending.is_complete()
    is_there.append(True)
    assert pending.is_complete()
    assert pending.sums == [(-5 ^ -1) & 0xFFFF_FFFF, 9, 2]
    assert pending.samples == [bytes(torch.tensor([2.5]).view(torch.uint8).tolist()), b"same", b"\xff" * 4]


def test_digested_steps_are_pairs_and_the_same_for_all() -> None:
    """1 and 2, 4 and 5, … and from 512 on each multiple of it with the step after; wherever one starts to count."""
    due, found = 1, []
    while due <= 1100:
        found.append(due)
        due = _find_next(due)[0]
    assert found == [1, 2, 4, 5, 16, 17, 64, 65, 256, 257, 512, 513, 1024, 1025]
    assert [_find_next(step)[0] for step in (3, 20, 300, 700, 1024)] == [4, 64, 512, 1024, 1025]


def test_a_gpu_is_not_asked_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question about an event would spoil the capture: digests that are on their way are picked up after it."""
    asked: list[bool] = []
    digests: Any = object.__new__(Digests)
    digests._pending, digests._lock, digests._is_on, digests.spent_s = [], threading.Lock(), True, 0.0
    digests._pending.append((SimpleNamespace(is_complete=lambda: asked.append(True)), None, {}))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for is_capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=is_capturing: now)
        digests._collect()
        assert asked == [True] * (not is_capturing)
