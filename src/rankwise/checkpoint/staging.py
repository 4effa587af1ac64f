"""Host memory that a rank's tensors are copied into, so that training goes on while they are written.

The copies lie as they will in the file. The memory is kept between saves: memory that is new costs more than the copy.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, final

import torch

from rankwise.base.memory import view_memory
from rankwise.checkpoint.plan import find_box

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.checkpoint.shard import Box


#: Memory comes in lines of so many bytes; a piece is what one thread copies at a time; more threads don't copy faster.
_LINE, _PIECE, _MOST_THREADS = 64, 4 << 20, 8


@final
class Staging:
    """The memory of one rank for one folder."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, boxes: Sequence[Box], tensors: Mapping[str, torch.Tensor]) -> memoryview:
        """Copy boxes, one behind the other; valid until the next call.

        Args:
            boxes: In the order of ``lay_out``.
            tensors: Where their values are, on any device.
        """
        sources = [find_box(tensors, box).detach().resolve_conj().resolve_neg() for box in boxes]
        size = sum(box.size for box in boxes)
        devices = {source.device for source in sources if source.device.type != "cpu"}
        if self._buffer.numel() < size or (devices and torch.cuda.is_available() and not self._buffer.is_pinned()):
            # From pinned memory a GPU copies by itself, several times faster, while the next copy is already prepared.
            is_pinned = any(device.type == "cuda" for device in devices)
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        at = 0
        moves: list[tuple[int, int, int]] = []
        for box, source in zip(boxes, sources, strict=True):
            if box.size and source.device.type == "cpu" and source.is_contiguous():
                moves += _cut(self._buffer.data_ptr() + at, source.data_ptr(), box.size)
            elif box.size:
                target = self._buffer[at : at + box.size].view(source.dtype).view(box.shape)
                target.copy_(source, non_blocking=True)
            at += box.size
        _move(moves)
        for device in devices:
            torch.accelerator.synchronize(device)
        return view_bytes(self._buffer[:size])


def _cut(target: int, source: int, size: int) -> list[tuple[int, int, int]]:
    return [(target + at, source + at, min(_PIECE, size - at)) for at in range(0, size, _PIECE)]


def _move(moves: list[tuple[int, int, int]]) -> None:
    """Copy in as many threads as torch may use: a copy of each tensor by torch takes a third longer, for many small waits."""
    left = iter(moves)

    def work() -> None:
        for target, source, size in left:
            ctypes.memmove(target, source, size)  # lets go of the interpreter's lock

    number = min(torch.get_num_threads(), len(moves), _MOST_THREADS)
    threads = [threading.Thread(target=work, name="rankwise-copy") for _ in range(number - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()


def lay_out(boxes: Sequence[Box]) -> list[Box]:
    """Return boxes in the order of a file, where they lie one behind the other.

    Whole numbers of cache lines come first, so that all of these begin at one: a copy to elsewhere takes a third
        longer.
    Of the others those of large elements come first, so that each begins at a multiple of its own element's size.
    """
    return sorted(
        boxes,
        key=lambda box: (box.size % _LINE != 0, -getattr(torch, box.dtype).itemsize, box.tensor, box.offsets),
    )


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a flat tensor of bytes as memory; the tensor must outlive it.

    Not by numpy(): torch may be without NumPy.
    """
    return view_memory(tensor.data_ptr(), tensor.numel())
