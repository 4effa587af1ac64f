"""Give each rank its own of several values: scatter from one rank, or from every rank to every other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.runtime import serialization
from rankwise.runtime.data_movement import copy_tree, find_unfit_leaf, serialize_or_explain
from rankwise.runtime.eager import eager
from rankwise.runtime.groups import Group, choose_carrier, resolve_group
from rankwise.runtime.reductions import check_root, cut_slots
from rankwise.runtime.signature import agree, locate, naming, show_site

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.base.errors import CollectiveError


@eager
def scatter(
    slots: Sequence[Any] | Tensor | None,
    *,
    root: int = 0,
    group: Group | None = None,
    name: str | None = None,
) -> Any:
    """Give each rank its own of the root's values.

    Args:
        slots: On the root one value for each rank of the group, in its order, of any kinds and shapes; or one tensor,
            shape (num_ranks * n, ...), which is split along dim 0. Elsewhere it is not looked at and may be None.
        root: Global rank whose values they are.
        group: The group; None: all ranks.
        name: Compared between the ranks instead of the line of the call.

    Returns:
        This rank's value; a copy, except on the root.

    Raises:
        CollectiveError: The ranks call different things, or name different roots, or there are not as many slots as
            ranks.
        CollectiveTimeoutError: Some rank did not call; names it.

    Collective: every rank of the group must call this, in the same order.
    """
    members, site = resolve_group(group), locate(name)
    is_root, fault = members.rank == root, check_root(root, members)
    cut: list[Any] = []
    if is_root and fault is None:
        cut, fault = cut_slots(slots, members)
    payloads, fault = _load_slots(cut, members, fault)
    agree(members, "scatter", site=site, must={"root": repr(root)}, fault=fault)
    if members.size == 1:
        return cut[0]
    with naming(members.rank, f"scatter at {show_site(site)}"):
        serialization.connect(members)
        lengths = [len(payload.manifest) for payload in payloads] or [0] * members.size
        sizes = torch.tensor(lengths, device=choose_carrier(members, "cpu"))
        serialization.broadcast_bytes(sizes, root, members)
        if not is_root:
            return serialization.swap({}, {root: int(sizes[members.position])}, members)[root]
        pairs = zip(members.ranks, payloads, strict=True)
        serialization.swap({rank: payload for rank, payload in pairs if rank != root}, {}, members)
    return cut[members.position]


@eager
def all_to_all(slots: Sequence[Any] | Tensor, *, group: Group | None = None, name: str | None = None) -> list[Any]:
    """Give each rank its own value of every rank's.

    Args:
        slots: One value for each rank of the group, in its order, of any kinds and shapes; or one tensor, shape
            (num_ranks * n, ...), which is split along dim 0. Not modified.
        group: The group; None: all ranks.
        name: Compared between the ranks instead of the line of the call.

    Returns:
        What each rank sent to this one, in the group's order.

    Raises:
        CollectiveError: The ranks call different things, or there are not as many slots as ranks.
        CollectiveTimeoutError: Some rank did not call; names it.

    Collective: every rank of the group must call this, in the same order.
    """
    members, site = resolve_group(group), locate(name)
    cut, fault = cut_slots(slots, members)
    payloads, fault = _load_slots(cut, members, fault)
    agree(members, "all_to_all", site=site, must={}, fault=fault)
    if members.size == 1:
        return [copy_tree(cut[0])]
    with naming(members.rank, f"all_to_all at {show_site(site)}"):
        serialization.connect(members)
        own = [len(payload.manifest) for payload in payloads]
        lengths = torch.tensor(own, device=choose_carrier(members, "cpu"))
        sizes = torch.empty_like(lengths)
        dist.all_to_all_single(sizes, lengths, group=members.process_group)
        sends = dict(zip(members.ranks, payloads, strict=True))
        found = serialization.swap(sends, dict(zip(members.ranks, sizes.tolist(), strict=True)), members)
    return [found[rank] for rank in members.ranks]


def _load_slots(
    slots: Sequence[Any], group: Group, fault: CollectiveError | None
) -> tuple[list[Any], CollectiveError | None]:
    payloads: list[Any] = []
    for slot in slots:
        fault = fault or find_unfit_leaf(slot)
        payload, unpicklable = (None, None) if fault else serialize_or_explain(slot, group)
        fault = fault or unpicklable
        payloads.append(payload)
    return payloads, fault
