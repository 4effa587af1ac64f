"""Checksums of a model's parameters, in a rank: equal bits give equal numbers, and of large tensors only parts are read.

On the CPU the bytes are read where they lie, without any function of torch. On a GPU a few kernels add up the bits behind the
work that is queued there already, and nobody waits for the result: it is picked up later. This file stands alone, as
``rank_exit.py`` does.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import zlib
from importlib import import_module
from typing import Any

#: Elements that are read of all parameters of a model together, and at least of each; so many parts a large one is read
#: in.
_MOST_READ, _FEWEST_READ, _NUM_PARTS = 1 << 20, 256, 8
#: By element size, what torch calls whole numbers of that size.
_WHOLE = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}
_DEVICES = {"cpu", "cuda"}
#: How the bits of an element are to be read; "?" for those that nobody compares as numbers.
_KINDS = {"torch.float32": "f", "torch.float64": "d", "torch.float16": "e", "torch.bfloat16": "b"}


def is_readable(tensor: Any) -> bool:
    """Whether the elements lie side by side in memory, all there, on a device that is known here."""
    if tensor.device.type not in _DEVICES or tensor.element_size() not in _WHOLE or not tensor.numel():
        return False
    if not tensor.is_contiguous():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if last + 1 != tensor.numel():
            return False
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return bool(tensor.untyped_storage().nbytes() >= end)


def find_kind(tensor: Any) -> str:
    """Return a letter for how the bits of an element are to be read."""
    return _KINDS.get(str(tensor.dtype), "?")


@functools.cache
def describe_machine(device: Any) -> str:
    """Return what decides how numbers are rounded."""
    torch: Any = import_module("torch")
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        pass
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def read(tensors: list[Any], turn: int) -> Pending:
    """Begin to read the checksums of tensors.

    Args:
        tensors: Readable ones.
        turn: Which parts of the large ones are read; all are if the turns go on.
    """
    quota = max(_FEWEST_READ, _MOST_READ // len(tensors))
    pending = Pending(len(tensors))
    there: dict[tuple[Any, int], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            pending.sums[place], pending.samples[place] = _read_here(tensor, _cut(tensor.numel(), quota, turn))
        else:
            there.setdefault((tensor.device, tensor.element_size()), []).append(place)
    for (_, size), places in there.items():
        pending.wait_for(places, size, *_read_there([tensors[place] for place in places], quota, turn))
    return pending


class Pending:
    """Checksums, of which some may still be on their way from a GPU.

    Attributes:
        sums: One for each tensor.
        samples: The bits of the middle element of each, or its most significant four bytes.
    """

    def __init__(self, num: int) -> None:
        self.sums, self.samples = [0] * num, [b""] * num
        self._coming: list[tuple[list[int], int, Any, Any]] = []

    def wait_for(self, places: list[int], size: int, numbers: Any, event: Any) -> None:
        """Remember what is on its way."""
        self._coming.append((places, size, numbers, event))

    def is_complete(self) -> bool:
        """Whether all are there; never waits."""
        while self._coming and self._coming[-1][3].query():
            places, size, numbers, _ = self._coming.pop()
            sums, middles = numbers.tolist()
            for place, total, middle in zip(places, sums, middles, strict=True):
                self.sums[place] = (total ^ (total >> 32)) & 0xFFFF_FFFF
                self.samples[place] = _shorten(struct.pack("<q", middle)[:size])
        return not self._coming

    def pack(self) -> tuple[bytes, bytes]:
        """Return all sums and all samples, four bytes each."""
        return struct.pack(f"<{len(self.sums)}I", *self.sums), b"".join(self.samples)


def _cut(num: int, quota: int, turn: int) -> list[tuple[int, int]]:
    """Return where the parts begin that are read of a tensor, and how long they are."""
    if num <= quota:
        return [(0, num)]
    length = quota // _NUM_PARTS
    room = num - length + 1
    return [((part * (num // _NUM_PARTS) + turn * length) % room, length) for part in range(_NUM_PARTS)]


def _read_here(tensor: Any, parts: list[tuple[int, int]]) -> tuple[int, bytes]:
    at, size, total = tensor.data_ptr(), tensor.element_size(), 0
    for begin, length in parts:
        total = zlib.crc32(ctypes.string_at(at + begin * size, length * size), total)
    return total, _shorten(ctypes.string_at(at + tensor.numel() // 2 * size, size))


def _read_there(tensors: list[Any], quota: int, turn: int) -> tuple[Any, Any]:
    """Queue the reading of tensors of one GPU and one element size; return where the numbers will be, and what tells that they are."""
    torch: Any = import_module("torch")
    with torch.no_grad(), torch.cuda.device(tensors[0].device):
        found = add_up(tensors, quota, turn, lambda ends: torch.tensor(ends, device="cpu").pin_memory())
        numbers = torch.empty(found.shape, dtype=torch.int64, device="cpu", pin_memory=True)
        numbers.copy_(found, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return numbers, event


def add_up(tensors: list[Any], quota: int, turn: int, to_numbers: Any) -> Any:
    """Return the sum of the bits of each tensor's parts, and below it the bits of its middle element, where the tensors are.

    Args:
        tensors: Of one device and one element size.
        quota: How many elements to read of each at most.
        turn: Which parts.
        to_numbers: Makes a tensor of numbers from which a device can copy without anybody waiting.
    """
    torch: Any = import_module("torch")
    device, whole = tensors[0].device, getattr(torch, _WHOLE[tensors[0].element_size()])
    pieces, middles, ends, end = [], [], [], 0
    for tensor in tensors:
        flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(whole)
        for begin, length in _cut(tensor.numel(), quota, turn):
            pieces.append(flat[begin : begin + length])
            end += length
        middle = tensor.numel() // 2
        middles.append(flat[middle : middle + 1])
        ends.append(end - 1)
    # Whole numbers add up to the same in any order, as a GPU takes it.
    running = torch.cat(pieces).cumsum(0, dtype=torch.int64)
    sums = running[to_numbers(ends).to(device, non_blocking=True)]
    sums[1:] -= sums[:-1].clone()
    return torch.stack((sums, torch.cat(middles).to(torch.int64)))


def _shorten(raw: bytes) -> bytes:
    return raw[-4:].rjust(4, b"\0")
