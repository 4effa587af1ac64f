"""Move nested containers of tensors, numbers and objects between ranks: broadcast, gather, scatter, all_to_all."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from rankwise.base.errors import CollectiveError
from rankwise.runtime import serialization
from rankwise.runtime.eager import eager, outside_graphs
from rankwise.runtime.groups import Group, choose_carrier, find_home, resolve_group
from rankwise.runtime.nested import (
    describe_leaf,
    describe_rows,
    describe_structure,
    find_unfit,
    flatten,
    kind_of,
    open_tree,
    unflatten,
)
from rankwise.runtime.reductions import check_root
from rankwise.runtime.signature import agree, locate, naming, show_site
from rankwise.runtime.targets import find_target_fault
from rankwise.runtime.unheld_tensors import find_temporary


@eager
def broadcast(tree: Any, *, root: int = 0, group: Group | None = None, name: str | None = None) -> Any:
    """Give every rank the root's value, whatever it is.

    Args:
        tree: On the root, anything: tensors, numbers, objects, nested or not; elsewhere it is ignored and may be
            None. Not modified. Objects are pickled, and unpickled by ranks of this job only.
        root: Global rank whose value it is.
        group: The group; None: all ranks.
        name: Compared between the ranks instead of the line of the call.

    Returns:
        On the root the tree itself; elsewhere a copy, its tensors on the rank's own device of the same kind.

    Raises:
        CollectiveError: The ranks call different things, or name different roots, or one outside the group.
        CollectiveTimeoutError: Some rank did not call; names it.

    Collective: every rank of the group must call this, in the same order.
    """
    members, site = resolve_group(group), locate(name)
    is_root = members.rank == root
    fault = check_root(root, members) or (find_unfit_leaf(tree) if is_root else None)
    payload, unpicklable = serialize_or_explain(tree, members) if is_root and fault is None else (None, None)
    agree(members, "broadcast", site=site, must={"root": repr(root)}, fault=fault or unpicklable)
    if members.size == 1:
        return tree
    with naming(members.rank, f"broadcast at {show_site(site)}"):
        size = torch.tensor([len(payload.manifest) if payload else 0], device=choose_carrier(members, "cpu"))
        serialization.broadcast_bytes(size, root, members)
        manifest = serialization.to_wire(payload.manifest if payload else bytes(int(size)), members)
        serialization.broadcast_bytes(manifest, root, members)
        if payload:
            buffers = payload.buffers
        else:
            found = serialization.to_bytes(manifest)
            buffers = serialization.new_buffers(serialization.read_metas(found), members)
        for buffer in buffers:
            serialization.broadcast_bytes(buffer, root, members)
    return tree if is_root else serialization.deserialize(serialization.to_bytes(manifest), buffers, members)


@outside_graphs
def broadcast_(tree: Any, *, root: int = 0, group: Group | None = None, name: str | None = None) -> None:
    """Overwrite tensors with the root's; after an error they hold what they held.

    Args:
        tree: A tensor, or nested containers of tensors only, of equal dtypes and shapes on all ranks.
        root: Global rank whose values they get.
        group: The group; None: all ranks.
        name: Compared between the ranks instead of the line of the call.

    Raises:
        CollectiveError: As for ``broadcast``; or the trees differ, or a leaf can't be written: see ``all_reduce_``.
        CollectiveTimeoutError: Some rank did not call; names it.

    Collective: every rank of the group must call this, in the same order.
    """
    temporary = find_temporary(tree)
    _broadcast_in_place(tree, temporary, root, group, name)


@eager
def _broadcast_in_place(tree: Any, temporary: str | None, root: int, group: Group | None, name: str | None) -> None:
    members, site = resolve_group(group), locate(name)
    tree, leaves, endless = open_tree(tree)
    fault = endless or check_root(root, members)
    # The root only gives: what it passes may well be a temporary.
    fault = fault or find_target_fault(leaves, None if members.rank == root else temporary, "broadcast")
    must = {
        "root": repr(root),
        "tree": describe_structure(tree),
        "leaves": [[path, describe_leaf(leaf)] for path, leaf in leaves],
    }
    agree(members, "broadcast_", site=site, must=must, fault=fault or find_unfit_leaf(tree))
    if members.size == 1:
        return
    is_root = members.rank == root
    payload = serialization.serialize(tree, members, announced=False)
    buffers = payload.buffers if is_root else [torch.empty_like(buffer) for buffer in payload.buffers]
    with naming(members.rank, f"broadcast_ at {show_site(site)}"):
        for buffer in buffers:
            serialization.broadcast_bytes(buffer, root, members)
    if not is_root:
        with torch.no_grad():
            came = serialization.deserialize_like(tree, buffers, members)
            for (_, target), (_, value) in zip(leaves, flatten(came), strict=True):
                target.copy_(value)


@eager
def all_gather(tree: Any, *, concat: bool = False, group: Group | None = None, name: str | None = None) -> Any:
    """Give every rank the value of each.

    Args:
        tree: Anything; tensors may differ in shape between the ranks, and structures too unless ``concat``.
            Not modified. Objects are pickled, and unpickled by ranks of this job only.
        concat: Join the ranks' tensors along dim 0 (0-d ones are stacked), in the order of the ranks.
        group: The group; None: all ranks.
        name: Compared between the ranks instead of the line of the call.

    Returns:
        A list with the tree of each rank, in the group's order; with ``concat`` one tree whose tensors are joined and
        whose other leaves are lists. Carries no gradient: see ``all_gather_with_grad``.

    Raises:
        CollectiveError: The ranks call different things; with ``concat``, their trees or dims after the first differ.
        CollectiveTimeoutError: Some rank did not call; names it.

    Collective: every rank of the group must call this, in the same order.
    """
    return _gather(tree, None, concat=concat, group=resolve_group(group), site=locate(name))


@eager
def gather(
    tree: Any, *, root: int = 0, concat: bool = False, group: Group | None = None, name: str | None = None
) -> Any:
    """Give one rank the value of each.

    Args:
        tree: As for ``all_gather``.
        root: Global rank that gets them.
        concat: As for ``all_gather``.
        group: The group; None: all ranks.
        name: Compared between the ranks instead of the line of the call.

    Returns:
        On the root as ``all_gather``; elsewhere None.

    Raises:
        CollectiveError: As for ``all_gather``; or the ranks name different roots, or one outside the group.
        CollectiveTimeoutError: Some rank did not call; names it.

    Collective: every rank of the group must call this, in the same order.
    """
    return _gather(tree, root, concat=concat, group=resolve_group(group), site=locate(name))


def _gather(tree: Any, root: int | None, *, concat: bool, group: Group, site: str) -> Any:
    call = "all_gather" if root is None else "gather"
    tree, own, endless = open_tree(tree)
    fault = endless or find_unfit_leaf(tree) or (None if root is None else check_root(root, group))
    payload, unpicklable = serialize_or_explain(tree, group) if fault is None else (None, None)
    must: dict[str, Any] = {"root": None if root is None else repr(root), "concat": bool(concat)}
    if concat:
        must["tree"] = describe_structure(tree)
        must["leaves"] = [[path, describe_rows(leaf, "any")] for path, leaf in own]
    leaves = [leaf for _, leaf in own]
    only_tensors = all(kind_of(leaf) in {"tensor", "array"} for leaf in leaves)
    # Only whether it differs matters here: what it is follows in the manifests.
    layout = json.dumps([describe_structure(tree), [describe_leaf(leaf) for leaf in leaves], only_tensors])
    may = hashlib.blake2b(layout.encode(), digest_size=16).hexdigest()
    answers = agree(group, call, site=site, must=must, may=may, fault=fault or unpicklable)
    assert payload is not None  # noqa: S101 - else there was a fault, and agree() has raised
    trees: list[Any] | None = [copy_tree(tree)] if group.size == 1 else None
    if group.size > 1:
        with naming(group.rank, f"{call} at {show_site(site)}"):
            move = _all_gather_serialized if root is None else _gather_serialized
            trees = move(tree, payload, root, group, alike=answers is None and only_tensors)
    return _concatenate(trees) if concat and trees is not None else trees


def _all_gather_serialized(
    tree: Any, payload: serialization.SerializedTree, _: int | None, group: Group, *, alike: bool
) -> list[Any]:
    if alike:
        columns = [
            serialization.all_gather_bytes(buffer, [buffer.numel()] * group.size, group) for buffer in payload.buffers
        ]
        rows = ([column[i] for column in columns] for i in range(group.size))
        return [serialization.deserialize_like(tree, row, group) for row in rows]
    sizes = serialization.tell_sizes(len(payload.manifest), group)
    wire = serialization.to_wire(payload.manifest, group)
    manifests = [serialization.to_bytes(part) for part in serialization.all_gather_bytes(wire, sizes, group)]
    # Ranks may hold different numbers of tensors: what leaves from one kind of device is one stream.
    found = [serialization.list_buffers(serialization.read_metas(one), group) for one in manifests]
    lengths = [[(size, device.type) for size, device in row] for row in found]
    streams: dict[str, list[Tensor]] = {}
    for device in sorted({name for row in lengths for _, name in row}):
        own = [buffer for buffer in payload.buffers if buffer.device.type == device]
        nothing = torch.empty(0, dtype=torch.uint8, device=find_home(group, device))
        whole = own[0] if len(own) == 1 else torch.cat([nothing, *own])
        totals = [sum(size for size, name in row if name == device) for row in lengths]
        streams[device] = serialization.all_gather_bytes(whole, totals, group)
    trees = []
    for position, (manifest, row) in enumerate(zip(manifests, lengths, strict=True)):
        pieces = {
            device: iter(parts[position].split([size for size, name in row if name == device]))
            for device, parts in streams.items()
        }
        buffers = [next(pieces[device]) for _, device in row]
        trees.append(serialization.deserialize(manifest, buffers, group))
    return trees


def _gather_serialized(
    tree: Any, payload: serialization.SerializedTree, root: int | None, group: Group, *, alike: bool
) -> list[Any] | None:
    serialization.connect(group)
    is_root, to = group.rank == root, int(root or 0)
    if not alike:
        sizes = dict(zip(group.ranks, serialization.tell_sizes(len(payload.manifest), group), strict=True))
        found = serialization.swap({to: payload}, sizes if is_root else {}, group)
        return [found[rank] for rank in group.ranks] if is_root else None
    if not is_root:
        serialization.send_and_receive([(to, buffer) for buffer in payload.buffers], [], group)
        return None
    rows = {
        rank: [buffer.clone() if rank == root else torch.empty_like(buffer) for buffer in payload.buffers]
        for rank in group.ranks  # our own buffers may share memory with the input
    }
    receives = [(rank, buffer) for rank, row in rows.items() if rank != root for buffer in row]
    serialization.send_and_receive([], receives, group)
    return [serialization.deserialize_like(tree, rows[rank], group) for rank in group.ranks]


def _concatenate(trees: list[Any]) -> Any:
    columns = zip(*([leaf for _, leaf in flatten(tree)] for tree in trees), strict=True)
    return unflatten(trees[0], [_join_leaves(list(column)) for column in columns])


def _join_leaves(column: list[Any]) -> Any:
    if isinstance(column[0], Tensor):
        return torch.stack(column) if column[0].dim() == 0 else torch.cat(column)
    if kind_of(column[0]) == "array":
        import numpy  # noqa: PLC0415 - the leaf is NumPy's, so it is loaded

        return numpy.stack(column) if column[0].ndim == 0 else numpy.concatenate(column)
    return column


def find_unfit_leaf(tree: Any) -> CollectiveError | None:
    """Return the error for the first tensor that can't travel at all, or for containers without an end."""
    _, leaves, fault = open_tree(tree)
    return fault or next(filter(None, (find_unfit(leaf, path) for path, leaf in leaves)), None)


def serialize_or_explain(tree: Any, group: Group) -> tuple[serialization.SerializedTree | None, CollectiveError | None]:
    """Serialize a tree, or return why it can not be pickled."""
    try:
        return serialization.serialize(tree, group), None
    except CollectiveError as error:
        return None, error


def copy_tree(tree: Any) -> Any:
    """Return the tree with tensors of their own memory, and the very other leaves."""
    leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for _, leaf in flatten(tree)]
    return unflatten(tree, leaves)
