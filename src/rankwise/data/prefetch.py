"""Copies the next batch to the device while the model works on this one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rankwise.runtime.nested import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rankwise.data.batches import WorkerBatch


def bring(
    worker_batches: Iterable[WorkerBatch], device: torch.device, *, pins: bool = False
) -> Iterator[WorkerBatch]:
    """Return the worker batches with their batches on the device.

    Args:
        worker_batches: From the workers; on CUDA best in pinned memory, from which a copy needs nobody to wait.
        device: Where to; nothing is copied to the CPU.
        pins: Whether to pin here what is in the host's memory; what a data set has put on the device already stays as it is.

    Returns:
        Each worker batch; on CUDA one behind what was read.
    """
    if device.type == "cpu":
        return iter(worker_batches)
    if device.type == "cuda":
        return _bring_beside(worker_batches, device, pins=pins)
    return (move(batch_of_worker, device) for batch_of_worker in worker_batches)


def _bring_beside(
    worker_batches: Iterable[WorkerBatch], device: torch.device, *, pins: bool = False
) -> Iterator[WorkerBatch]:
    """Copy on a stream of its own, one worker batch ahead."""
    beside = torch.cuda.Stream(device)
    waiting: tuple[WorkerBatch, torch.cuda.Event] | None = None
    for batch_of_worker in worker_batches:
        with torch.cuda.stream(beside):
            copied = _change(batch_of_worker, lambda leaf: _copy(leaf, device, pins=pins))
            done = beside.record_event()
        if waiting is not None:
            yield _take_over(*waiting, device)
        waiting = copied, done
    if waiting is not None:
        yield _take_over(*waiting, device)


def _take_over(batch_of_worker: WorkerBatch, done: torch.cuda.Event, device: torch.device) -> WorkerBatch:
    """Let the current stream wait for the copy, and the memory's owner know that it is used there."""
    current = torch.cuda.current_stream(device)
    current.wait_event(done)
    for _, leaf in flatten([batch_of_worker.batches, batch_of_worker.empty]):
        if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
            # Else the allocator may give it to the next copy as soon as Python lets go of it, while kernels still read.
            leaf.record_stream(current)
    # What has a `to` of its own goes now, on this stream: nobody could tell the owner of its memory.
    return move(batch_of_worker, device)


def move(batch_of_worker: WorkerBatch, device: torch.device) -> WorkerBatch:
    """Return the worker batch with the tensors of its batches on the device; what has a ``to`` of its own is asked to go."""
    return _change(batch_of_worker, lambda leaf: _send(leaf, device))


def move_tree(tree: Any, device: torch.device) -> Any:
    """Return nested containers with their tensors on the device; what has a ``to`` of its own is asked to go."""
    return unflatten(tree, [_send(leaf, device) for _, leaf in flatten(tree)])


def _change(batch_of_worker: WorkerBatch, change: Callable[[Any], Any]) -> WorkerBatch:
    tree = [batch_of_worker.batches, batch_of_worker.empty]
    batches, empty = unflatten(tree, [change(leaf) for _, leaf in flatten(tree)])
    return batch_of_worker._replace(batches=batches, empty=empty)


def _copy(leaf: Any, device: torch.device, *, pins: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if pins and leaf.device.type == "cpu":
        leaf = leaf.pin_memory()
    return leaf.to(device, non_blocking=True)


def _send(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(device, non_blocking=True)
    if hasattr(leaf, "to") and callable(leaf.to):
        return leaf.to(device)
    return leaf
