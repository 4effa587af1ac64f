"""Copies the next batch to the device while the model works on this one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rankwise.runtime.nested import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rankwise.data.batches import WorkerBatch


def bring(worker_batches: Iterable[WorkerBatch], device: torch.device, *, pins: bool = False) -> Iterator[WorkerBatch]:
    """Return the worker batches with their batches on the device.

    Args:
        worker_batches: From the workers; on CUDA best in pinned memory, from which a copy needs nobody to wait.
        device: Where to; nothing is copied to the CPU.
        pins: Whether to pin here what is in the host's memory; what a data set has put on the device already stays as
            it is.

    Returns:
        Each worker batch; on CUDA one behind what was read.
    """
    if device.type == "cpu":
        return iter(worker_batches)
    if device.type == "cuda":
        return _bring_beside(worker_batches, device, pins=pins)
    return (_move(made, device) for made in worker_batches)


def _bring_beside(
    worker_batches: Iterable[WorkerBatch], device: torch.device, *, pins: bool = False
) -> Iterator[WorkerBatch]:
    """Copy on a stream of its own, one worker batch ahead."""
    beside = torch.cuda.Stream(device)
    waiting: tuple[WorkerBatch, torch.cuda.Event] | None = None
    for made in worker_batches:
        with torch.cuda.stream(beside):
            copied = _move(made, device, pins=pins, asks=False)
            done = beside.record_event()
        if waiting is not None:
            yield _take_over(*waiting, device)
        waiting = copied, done
    if waiting is not None:
        yield _take_over(*waiting, device)


def _take_over(made: WorkerBatch, done: torch.cuda.Event, device: torch.device) -> WorkerBatch:
    """Let the current stream wait for the copy, and the memory's owner know that it is used there."""
    current = torch.cuda.current_stream(device)
    current.wait_event(done)
    for _, leaf in flatten([made.batches, made.empty]):
        if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
            # Else the allocator may give it to the next copy as soon as Python lets go of it, while kernels still read.
            leaf.record_stream(current)
    # What has a `to` of its own goes now, on this stream: nobody could tell the owner of its memory.
    return _move(made, device)


def _move(made: WorkerBatch, device: torch.device, **how: bool) -> WorkerBatch:
    """Return the worker batch with the tensors of its batches on the device, as ``move_tree`` moves them."""
    batches, empty = move_tree([made.batches, made.empty], device, **how)
    return made._replace(batches=batches, empty=empty)


def move_tree(tree: Any, device: torch.device, *, pins: bool = False, asks: bool = True) -> Any:
    """Return nested containers with their tensors on the device.

    Args:
        tree: The containers.
        device: Where to.
        pins: Whether to pin what is in the host's memory.
        asks: Whether what has a ``to`` of its own is asked to go.
    """

    def send(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            pinned = leaf.pin_memory() if pins and leaf.device.type == "cpu" else leaf
            return pinned.to(device, non_blocking=True)
        return leaf.to(device) if asks and callable(getattr(leaf, "to", None)) else leaf

    return unflatten(tree, [send(leaf) for _, leaf in flatten(tree)])
