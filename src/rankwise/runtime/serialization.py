"""Move bytes between ranks: every dtype, sizes that differ, no padding that anybody sees, and no copy of what is large."""

from __future__ import annotations

import pickle
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.base.errors import CollectiveError
from rankwise.base.memory import view_memory
from rankwise.runtime.groups import choose_carrier, find_home
from rankwise.runtime.nested import flatten, from_tensor, kind_of, to_tensor, unflatten
from rankwise.runtime.wire import fill_buckets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.runtime.groups import Group

#: Inside a bucket every tensor begins where each dtype may.
_ALIGN = 16
#: Up to this much in all, uneven parts are padded and gathered in one go; above, each is sent at its own size.
_PAD_BYTES = 1 << 20
#: Keeps our messages apart from the user's own between the same two ranks.
_TAG = 7301
#: all_gather_into_tensor is called all_gather_single since torch 2.13, where the old name warns.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_connected: weakref.WeakSet[Any] = weakref.WeakSet()


@final
@dataclass(frozen=True, slots=True)
class SerializedTree:
    """What one rank sends: a manifest, small and pickled, and flat buffers of the tensors.

    Attributes:
        manifest: Structure, metas of the tensors (dtype, shape, device type, kind), and the values of all other leaves.
        buffers: uint8, on devices that the backend takes; they may share memory with the leaves.
    """

    manifest: bytes
    buffers: list[Tensor]


def serialize(tree: Any, group: Group, *, announced: bool = True) -> SerializedTree:
    """Serialize a tree; not modified.

    Args:
        tree: Anything.
        group: Among whom it travels.
        announced: Whether the receivers need a manifest, because they can't know what comes.

    Returns:
        What to send.

    Raises:
        CollectiveError: A leaf or a container can't be pickled.
    """
    leaves = [(kind_of(leaf), leaf) for _, leaf in flatten(tree)]
    marks: list[Any] = [None if kind in {"tensor", "array"} else (leaf,) for kind, leaf in leaves]
    moved = [(to_tensor(leaf), kind) for kind, leaf in leaves if kind in {"tensor", "array"}]
    metas = [_meta_of(tensor, kind) for tensor, kind in moved]
    buffers = [_join([moved[i][0] for i in bucket]) for bucket in plan(metas)]
    carried = [buffer.to(choose_carrier(group, buffer.device.type)) for buffer in buffers]
    manifest = b""
    try:
        if announced:
            manifest = pickle.dumps((unflatten(tree, range(len(marks))), marks, metas))
    except Exception as error:  # whatever the object's own code raises
        raise CollectiveError(
            f"an object can't be pickled: {type(error).__name__}: {error}",
            hint="send its data, not objects with files, locks or lambdas",
        ) from error
    return SerializedTree(manifest, carried)


def deserialize(manifest: bytes, buffers: Sequence[Tensor], group: Group) -> Any:
    """Rebuild a tree from what arrived; its tensors lie on our own device of the kind that they were on at the sender."""
    # The manifest comes from a process of this very job, which runs the user's code anyway.
    skeleton, marks, metas = pickle.loads(manifest)  # noqa: S301
    return _assemble(skeleton, marks, metas, buffers, group)


def deserialize_like(tree: Any, buffers: Sequence[Tensor], group: Group) -> Any:
    """Rebuild a tree from what arrived from a rank whose tree is like ours, tensors only."""
    metas = [_meta_of(to_tensor(leaf), kind_of(leaf)) for _, leaf in flatten(tree)]
    return _assemble(tree, [None] * len(metas), metas, buffers, group)


def _meta_of(tensor: Tensor, kind: str) -> tuple[torch.dtype, tuple[int, ...], str, str]:
    return tensor.dtype, tuple(tensor.shape), tensor.device.type, kind


def _assemble(
    skeleton: Any, marks: Sequence[Any], metas: Sequence[Any], buffers: Sequence[Tensor], group: Group
) -> Any:
    tensors: list[Any] = [None] * len(metas)
    for bucket, buffer in zip(plan(metas), buffers, strict=True):
        here = buffer.to(find_home(group, metas[bucket[0]][2]))
        for index, tensor in zip(bucket, _split(here, [metas[i] for i in bucket]), strict=True):
            tensors[index] = from_tensor(tensor, metas[index][3])
    queue = iter(tensors)
    return unflatten(skeleton, [next(queue) if mark is None else mark[0] for mark in marks])


def _size_bytes(meta: Any) -> int:
    return int(meta[0].itemsize * torch.Size(meta[1]).numel())


def plan(metas: Sequence[Any]) -> list[list[int]]:
    """Return which tensors travel in one buffer: small ones from one kind of device; equal wherever metas are."""
    return fill_buckets((meta[2], -(-_size_bytes(meta) // _ALIGN) * _ALIGN) for meta in metas)


def list_buffers(metas: Sequence[Any], group: Group) -> list[tuple[int, torch.device]]:
    """Return the bytes of each buffer that ``plan`` makes, and the device that it arrives on."""
    sizes = [_size_bytes(meta) for meta in metas]
    padded = [-(-size // _ALIGN) * _ALIGN for size in sizes]
    plans = plan(metas)
    totals = [sizes[one[0]] if len(one) == 1 else sum(padded[i] for i in one) for one in plans]
    return [(total, choose_carrier(group, metas[one[0]][2])) for total, one in zip(totals, plans, strict=True)]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat uint8 view of a tensor, or of a copy if it is not contiguous."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.stride(0) != 1:  # a lone element of a column is contiguous, with the column's stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return as_bytes(tensors[0])
    parts = []
    for tensor in tensors:
        part = as_bytes(tensor)
        parts += [part, part.new_zeros(-part.numel() % _ALIGN)]
    return torch.cat(parts)


def _split(buffer: Tensor, metas: Sequence[Any]) -> list[Tensor]:
    if len(metas) == 1:
        return [_view(buffer, metas[0])]
    found, start = [], 0
    for meta in metas:
        size = _size_bytes(meta)
        found.append(_view(buffer[start : start + size].clone(), meta))  # it keeps no bucket alive
        start += -(-size // _ALIGN) * _ALIGN
    return found


def _view(data: Tensor, meta: Any) -> Tensor:
    if data.storage_offset() % _ALIGN:
        data = data.clone()  # a row of a gathered buffer may begin where its dtype may not
    return data.view(meta[0]).view(meta[1])


# ------------------------------------------------------------------ bytes over the ranks


def tell_sizes(size: int, group: Group) -> list[int]:
    """Give every rank the number of each."""
    carrier = choose_carrier(group, "cpu")
    sizes = torch.empty(group.size, dtype=torch.int64, device=carrier)
    _all_gather_flat(sizes, torch.tensor([size], device=carrier), group=group.process_group)
    return [int(number) for number in sizes.tolist()]


def to_wire(data: bytes, group: Group) -> Tensor:
    """Return bytes as a tensor that the backend takes."""
    carrier = choose_carrier(group, "cpu")
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=carrier)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(carrier)


def to_bytes(data: Tensor) -> bytes:
    """Undo ``to_wire``."""
    host = data.cpu().contiguous()
    return bytes(view_memory(host.data_ptr(), host.numel()))


def all_gather_bytes(data: Tensor, sizes: Sequence[int], group: Group) -> list[Tensor]:
    """Give every rank the flat tensor of each; the i-th is ``sizes[i]`` long. The dtype is the same on all ranks."""
    out = data.new_empty(sum(sizes))
    all_gather_into_bytes(out, data, sizes, group)
    return list(out.split(list(sizes)))


def all_gather_into_bytes(out: Tensor, data: Tensor, sizes: Sequence[int], group: Group) -> None:
    """Fill a flat tensor with the data of all ranks, on every rank."""
    longest = max(sizes)
    if min(sizes) == longest:
        if longest:
            _all_gather_flat(out, data, group=group.process_group)
    elif longest * group.size * data.element_size() <= _PAD_BYTES:
        padded = torch.cat([data, data.new_zeros(longest - data.numel())])
        rows = data.new_empty(group.size * longest)
        _all_gather_flat(rows, padded, group=group.process_group)
        torch.cat([row[:size] for row, size in zip(rows.split(longest), sizes, strict=True)], out=out)
    else:
        gather_into_parts(data, out.split(list(sizes)), group)


def gather_into_parts(data: Tensor, parts: Sequence[Tensor], group: Group) -> None:
    """Fill ``parts[i]``, contiguous, with the data of the i-th rank, on every rank: one broadcast of its own size each."""
    parts[group.position].view(-1).copy_(data.view(-1))
    works = [
        dist.broadcast(part, rank, group=group.process_group, async_op=True)
        for rank, part in zip(group.ranks, parts, strict=True)
        if part.numel()
    ]
    for work in works:
        work.wait()


def broadcast_bytes(data: Tensor, root: int, group: Group) -> None:
    """Fill a flat tensor with the root's."""
    if data.numel():
        dist.broadcast(data, root, group=group.process_group)


def connect(group: Group) -> None:
    """Let NCCL connect all ranks: its first call in a group must not be a send that some of them take no part in.

    Collective: every rank of the group must call this.
    """
    if group.device.type in {"cpu", "meta"} or group.control in _connected:
        return
    nothing = torch.zeros(1, device=choose_carrier(group, group.device.type))
    dist.all_reduce(nothing, group=group.process_group)
    _connected.add(group.control)


def send_and_receive(sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], group: Group) -> None:
    """Send tensors to global ranks, and fill others from them; both sides must name the same, in the same order."""
    pg = group.process_group
    for device_type in sorted({tensor.device.type for _, tensor in [*sends, *receives]}):
        ops = [
            dist.P2POp(call, tensor, rank, group=pg, tag=_TAG)
            for call, pairs in ((dist.isend, sends), (dist.irecv, receives))
            for rank, tensor in pairs
            if tensor.numel() and tensor.device.type == device_type
        ]
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()


def swap(sends: Mapping[int, SerializedTree], sizes: Mapping[int, int], group: Group) -> dict[int, Any]:
    """Send a tree to each of some ranks, and return by rank what comes; what a rank has for itself is copied.

    Args:
        sends: By global rank.
        sizes: By global rank, how many bytes the manifest has that comes from it.
        group: Among whom; the ranks are connected.
    """
    room = partial(torch.empty, dtype=torch.uint8, device=choose_carrier(group, "cpu"))
    wires = {rank: room(size) for rank, size in sizes.items() if rank != group.rank}
    others = {rank: payload for rank, payload in sends.items() if rank != group.rank}
    announced = [(rank, to_wire(payload.manifest, group)) for rank, payload in others.items()]
    send_and_receive(announced, list(wires.items()), group)
    manifests = {rank: to_bytes(wire) for rank, wire in wires.items()}
    rows = {rank: new_buffers(read_metas(manifest), group) for rank, manifest in manifests.items()}
    send_and_receive(
        [(rank, buffer) for rank, payload in others.items() for buffer in payload.buffers],
        [(rank, buffer) for rank, row in rows.items() for buffer in row],
        group,
    )
    if group.rank in sends:
        own = sends[group.rank]  # whose buffers may share memory with the input
        manifests[group.rank], rows[group.rank] = own.manifest, [buffer.clone() for buffer in own.buffers]
    return {rank: deserialize(manifest, rows[rank], group) for rank, manifest in manifests.items()}


def new_buffers(metas: Sequence[Any], group: Group) -> list[Tensor]:
    """Return empty buffers for what a manifest announces."""
    return [torch.empty(size, dtype=torch.uint8, device=device) for size, device in list_buffers(metas, group)]


def read_metas(manifest: bytes) -> list[Any]:
    """Return what tensors a manifest announces."""
    metas: list[Any] = pickle.loads(manifest)[2]  # noqa: S301 - from a process of this very job
    return metas
