"""Gather tensors straight into storage that is already there: no list in between, no padding, and no second copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.base.errors import CollectiveError
from rankwise.runtime import serialization
from rankwise.runtime.eager import eager, outside_graphs
from rankwise.runtime.groups import Group, choose_carrier, resolve_group
from rankwise.runtime.nested import (
    count_rows,
    describe_leaf,
    describe_rows,
    describe_structure,
    find_unfit,
    open_tree,
)
from rankwise.runtime.reductions import check_root
from rankwise.runtime.signature import agree, format_leaf, locate, naming, show_site
from rankwise.runtime.targets import find_target_fault
from rankwise.runtime.unheld_tensors import find_temporary

if TYPE_CHECKING:
    from collections.abc import Sequence

_SMALL_BYTES = 1 << 20
Pairs = list[tuple[str, Tensor, Tensor | None]]


@outside_graphs
def all_gather_into(out: Any, tree: Any, *, group: Group | None = None, name: str | None = None) -> None:
    """Fill tensors on every rank with the rows of all ranks, in the order of the ranks.

    Args:
        out: A tensor, shape (total, ...), or nested containers of such; contiguous; ``total`` is the sum of the ranks'
            rows. After an error its content is undefined.
        tree: This rank's tensors, shape (rows, ...), in the same containers; the number of rows may differ between
            ranks. A 0-d tensor counts as one row. Not modified.
        group: The group; None: all ranks.
        name: Compared between the ranks instead of the line of the call.

    Raises:
        CollectiveError: The ranks call different things; or ``out`` does not fit, on whichever rank: says both sizes.
        CollectiveTimeoutError: Some rank did not call; names it.

    Collective: every rank of the group must call this, in the same order.
    """
    temporary = find_temporary(out)
    _gather_into(out, tree, None, temporary, group=group, name=name)


@outside_graphs
def gather_into(out: Any, tree: Any, *, root: int = 0, group: Group | None = None, name: str | None = None) -> None:
    """Fill tensors on one rank with the rows of all ranks, in the order of the ranks.

    Args:
        out: On the root as for ``all_gather_into``; elsewhere ignored, and may be None.
        tree: As for ``all_gather_into``.
        root: Global rank that gets the rows.
        group: The group; None: all ranks.
        name: Compared between the ranks instead of the line of the call.

    Raises:
        CollectiveError: As for ``all_gather_into``; or the ranks name different roots, or one outside the group.
        CollectiveTimeoutError: Some rank did not call; names it.

    Collective: every rank of the group must call this, in the same order.
    """
    temporary = find_temporary(out)
    _gather_into(out, tree, root, temporary, group=group, name=name)


@eager
def _gather_into(
    out: Any, tree: Any, root: int | None, temporary: str | None, *, group: Group | None, name: str | None
) -> None:
    members, site = resolve_group(group), locate(name)
    call = "all_gather_into" if root is None else "gather_into"
    holds = root is None or members.rank == root
    tree, leaves, endless = open_tree(tree)
    out, targets, endless_out = open_tree(out) if holds else (None, [], None)
    fault = endless or endless_out or (None if root is None else check_root(root, members))
    fault = fault or _find_source_fault(leaves)
    if fault is None and holds:
        same = describe_structure(out) == describe_structure(tree)
        fault = _find_fault(leaves, targets, temporary, call.removesuffix("_into"), same=same)
    pairs: Pairs = []
    if fault is None:
        pairs = [(path, leaf, targets[i][1] if holds else None) for i, (path, leaf) in enumerate(leaves)]
    own = [count_rows(leaf) for _, leaf, _ in pairs]
    given = [None if target is None else target.shape[0] for _, _, target in pairs]
    # Told only if it does not fit equal rows: then equal calls have equal texts, and one comparison will do.
    fitting = [mine * members.size for mine in own]
    odd = [None if rows == fits else rows for rows, fits in zip(given, fitting, strict=True)]
    must = {"root": None if root is None else repr(root), "tree": describe_structure(tree)}
    must["leaves"] = [[path, describe_rows(leaf)] for path, leaf in leaves]  # type: ignore[assignment]
    answers = agree(members, call, site=site, must=must, may=[own, odd], fault=fault)
    answers = answers or [[own, odd]] * members.size
    _check_totals(call, site, [path for path, _, _ in pairs], answers, root, members)
    with naming(members.rank, f"{call} at {show_site(site)}"):
        if root is not None:
            serialization.connect(members)
        for index, (_, leaf, target) in enumerate(pairs):
            _move(leaf, target, [rows[index] for rows, _ in answers], root, members)


def _find_source_fault(leaves: Sequence[tuple[str, Any]]) -> CollectiveError | None:
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor):
            return CollectiveError(
                f"{path or 'the value'} is a {type(leaf).__name__} ({repr(leaf)[:60]})",
                hint="pass tensors; all_gather takes anything",
            )
        if (unfit := find_unfit(leaf, path)) is not None:
            return unfit
    return None


def _find_fault(
    leaves: Sequence[tuple[str, Any]],
    targets: Sequence[tuple[str, Any]],
    temporary: str | None,
    functional: str,
    *,
    same: bool,
) -> CollectiveError | None:
    if not same:
        return CollectiveError("out and tree are nested differently", hint="pass the same containers and keys in both")
    if (fault := find_target_fault(list(targets), temporary, functional)) is not None:
        return CollectiveError(f"out: {fault.message}", hint=fault.hint)
    for (path, leaf), (_, target) in zip(leaves, targets, strict=True):
        where = f"out{path} is {format_leaf(describe_leaf(target))}"
        if target.dtype != leaf.dtype or target.device.type != leaf.device.type:
            return CollectiveError(
                f"{where}, but what is gathered is {format_leaf(describe_leaf(leaf))}",
                hint="make out of the same dtype and device",
            )
        if target.dim() == 0 or target.shape[1:] != leaf.shape[1:]:
            wanted = ", ".join(["total", *map(str, leaf.shape[1:])])
            return CollectiveError(
                f"{where}, but must be ({wanted}{',' * (leaf.dim() <= 1)})",
                hint="only dim 0 grows: the ranks' rows are concatenated",
            )
        if not target.is_contiguous():
            return CollectiveError(
                f"{where} and not contiguous",
                hint="make it with torch.empty, or gather into out.contiguous() and copy",
            )
    return None


def _check_totals(
    call: str, site: str, paths: Sequence[str], answers: Sequence[Any], root: int | None, group: Group
) -> None:
    """Compare what the ranks give with the room that holders have; every rank comes to the same end."""
    for position, rank in enumerate(group.ranks):
        if root is not None and rank != root:
            continue
        rows, odd = answers[position]
        for index, path in enumerate(paths):
            parts = [one[0][index] for one in answers]
            room = rows[index] * group.size if odd[index] is None else odd[index]
            if room != sum(parts):
                shown = " + ".join(map(str, parts[:8])) + (" + ..." if len(parts) > 8 else "")
                raise CollectiveError(
                    f"{call} at {show_site(site)}: out{path} has {room} rows on rank {rank}, but the ranks pass {sum(parts)} ({shown})",
                    rank=group.rank,
                    hint="make dim 0 of out the sum of the ranks' rows",
                )


def _move(leaf: Tensor, target: Tensor | None, rows: Sequence[int], root: int | None, group: Group) -> None:
    carrier = choose_carrier(group, leaf.device.type)
    data = serialization.as_bytes(leaf.detach()).to(carrier)
    # Gloo copies what it gathers once more, and NCCL does the same by itself: for large parts a message each is better.
    as_one = root is not None and len(set(rows)) == 1 and data.numel() <= _SMALL_BYTES
    if target is None:
        if as_one:
            dist.gather(data, None, dst=root, group=group.process_group)
        else:
            serialization.send_and_receive([(int(root or 0), data)], [], group)
        return
    row_bytes = target[:1].numel() * target.element_size()
    sizes = [row_bytes * count for count in rows]
    direct = target.device.type == carrier.type
    room = target.detach() if direct else torch.empty_like(target, device=carrier)
    flat = serialization.as_bytes(room)
    if group.size == 1:
        flat.copy_(data)
    elif root is None:
        serialization.all_gather_into_bytes(flat, data, sizes, group)
    elif as_one:
        parts = list(flat.split(sizes)) if data.numel() else [data] * group.size
        dist.gather(data, parts, dst=root, group=group.process_group)
    else:
        parts = list(flat.split(sizes))
        parts[group.position].copy_(data)
        others = [(rank, part) for rank, part in zip(group.ranks, parts, strict=True) if rank != root]
        serialization.send_and_receive([], others, group)
    if not direct:
        with torch.no_grad():
            target.copy_(room)
