"""Reduce nested containers of tensors and numbers over the ranks: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.base.errors import CollectiveError
from rankwise.base.rank_names import name_ranks
from rankwise.runtime.eager import eager, outside_graphs
from rankwise.runtime.groups import Group, resolve_group
from rankwise.runtime.nested import describe_leaf, describe_structure, flatten, kind_of, open_tree, unflatten
from rankwise.runtime.signature import agree, locate, naming, show_site
from rankwise.runtime.targets import Leaves, find_cast, find_shared, find_target_fault
from rankwise.runtime.unheld_tensors import find_temporary
from rankwise.runtime.wire import (
    Op,
    Wire,
    check_leaf,
    check_op,
    encode,
    find_nan,
    has_nan,
    may_overflow,
    native_op,
    pack,
    plan_buckets,
    put_nan,
    read_op,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: In torch 2.8 Gloo's reduce_scatter sums, whatever is asked for: a maximum of 2, 3 and 4 is 9.
_GLOO_SCATTERS_SUMS = torch.torch_version.TorchVersion(torch.__version__) < (2, 9)
#: reduce_scatter_tensor is called reduce_scatter_single since torch 2.13, where the old name warns.
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@eager
def all_reduce(
    tree: Any, op: Op = "sum", *, precise: bool = False, group: Group | None = None, name: str | None = None
) -> Any:
    """Reduce every leaf over the ranks and give the result to all of them.

    Small tensors of one dtype are sent together. Python's ints are added exactly, its floats in float64. The mean of
    integers and bools is a float (of tensors: float64); the sum of bools counts them. A sum that does not fit a
    narrow integer dtype is an error. Results carry no gradient: see ``all_reduce_with_grad``.

    Args:
        tree: Tensors, numbers and NumPy arrays of equal shapes on all ranks, in nested dicts, lists, tuples, named
            tuples and dataclasses; not modified.
        op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"``, ``"product"``; for bools ``"any"`` and ``"all"``. NaN wins as
            in ``torch.max``. torch's ``ReduceOp.SUM`` and the like are understood too.
        precise: Add floats of all widths in float64, and return them so; for metrics.
        group: The group; None: all ranks.
        name: Compared between the ranks instead of the line of the call, for calls that match from different lines.

    Returns:
        A new tree of the same structure; numbers come back as numbers.

    Raises:
        CollectiveError: The ranks call different things, or with leaves that differ in path, dtype or shape; says who
            has what.
        CollectiveTimeoutError: Some rank did not call; names it.

    Collective: every rank of the group must call this, in the same order.
    """
    members, site, op = resolve_group(group), locate(name), read_op(op)
    tree, leaves, endless = open_tree(tree)
    odd = _agree(members, "all_reduce", site, tree, leaves, op=op, fault=endless)
    what = f"all_reduce at {show_site(site)}"
    masks = _reduce_masks(members, what, leaves, odd)
    return unflatten(tree, _put_nan(_reduce_leaves(members, what, leaves, op, precise=precise), masks))


@outside_graphs
def all_reduce_(tree: Any, op: Op = "sum", *, group: Group | None = None, name: str | None = None) -> None:
    """Reduce tensors over the ranks in place.

    Where the ranks' calls differ, nothing is changed. Floats that are sent alone are reduced in place, without a copy:
    if a rank is lost meanwhile, they are undefined.

    Args:
        tree: A tensor, or nested containers of tensors only.
        op: As for ``all_reduce``.
        group: The group; None: all ranks.
        name: As for ``all_reduce``.

    Raises:
        CollectiveError: As for ``all_reduce``; or a leaf is a number, a temporary whose result could not be read, or
            part of a graph that autograd is recording.
        CollectiveTimeoutError: Some rank did not call; names it.

    Collective: every rank of the group must call this, in the same order.
    """
    temporary = find_temporary(tree)
    _all_reduce_in_place(tree, temporary, op, group, name)


@eager
def _all_reduce_in_place(tree: Any, temporary: str | None, op: Any, group: Group | None, name: str | None) -> None:
    members, site, op = resolve_group(group), locate(name), read_op(op)
    tree, leaves, endless = open_tree(tree)
    fault = endless or find_target_fault(leaves, temporary, "all_reduce") or find_cast(leaves, op)
    firsts, overlap = ([], False) if fault else find_shared(leaves)
    tied = [[i, first] for i, first in enumerate(firsts) if i != first]
    odd = _agree(members, "all_reduce_", site, tree, leaves, op=op, fault=fault, tied=tied)
    # A tensor that is there twice, as tied weights are, is reduced once.
    odd = sorted({firsts[index] for index in odd})
    places = [i for i, first in enumerate(firsts) if i == first]
    leaves = [leaves[i] for i in places]
    with torch.no_grad():
        # A sum that does not fit is known afterwards only: then nothing may have been overwritten.
        may_fail = any(not (leaf.is_floating_point() or leaf.is_complex()) for _, leaf in leaves)
        what = f"all_reduce_ at {show_site(site)}"
        masks = _reduce_masks(members, what, leaves, [places.index(index) for index in odd])
        in_place = not (may_fail or overlap)
        results = _reduce_leaves(members, what, leaves, op, precise=False, in_place=in_place)
        for (_, target), result in zip(leaves, _put_nan(results, masks), strict=True):
            if result.data_ptr() != target.data_ptr():
                target.copy_(result)


@eager
def reduce(
    tree: Any,
    op: Op = "sum",
    *,
    root: int = 0,
    precise: bool = False,
    group: Group | None = None,
    name: str | None = None,
) -> Any:
    """Reduce every leaf over the ranks and give the result to one of them.

    Args:
        tree: As for ``all_reduce``; not modified.
        op: As for ``all_reduce``.
        root: Global rank that gets the result.
        precise: As for ``all_reduce``.
        group: The group; None: all ranks.
        name: As for ``all_reduce``.

    Returns:
        On the root a new tree, elsewhere None: what torch leaves there are partial sums.

    Raises:
        CollectiveError: As for ``all_reduce``; or the ranks name different roots, or one outside the group.
        CollectiveTimeoutError: Some rank did not call; names it.

    Collective: every rank of the group must call this, in the same order.
    """
    members, site, op = resolve_group(group), locate(name), read_op(op)
    tree, leaves, endless = open_tree(tree)
    fault = endless or check_root(root, members)
    odd = _agree(members, "reduce", site, tree, leaves, op=op, fault=fault, root=repr(root))
    what = f"reduce at {show_site(site)}"
    masks = _reduce_masks(members, what, leaves, odd)
    with _telling_all(members, "reduce", site, leaves, op):
        results = _reduce_leaves(members, what, leaves, op, precise=precise, root=root)
    return unflatten(tree, _put_nan(results, masks)) if members.rank == root else None


@eager
def reduce_scatter(
    slots: Sequence[Any] | Tensor,
    op: Op = "sum",
    *,
    precise: bool = False,
    group: Group | None = None,
    name: str | None = None,
) -> Any:
    """Reduce one tree for each rank, and give each rank its own.

    Args:
        slots: A tree for each rank of the group, in its order; slots may differ from each other in shape, but not
            between ranks. Or one tensor, shape (num_ranks * n, ...), which is split along dim 0. Not modified.
        op: As for ``all_reduce``.
        precise: As for ``all_reduce``.
        group: The group; None: all ranks.
        name: As for ``all_reduce``.

    Returns:
        The reduced tree of this rank's slot.

    Raises:
        CollectiveError: As for ``all_reduce``; or there are not as many slots as ranks.
        CollectiveTimeoutError: Some rank did not call; names it.

    Collective: every rank of the group must call this, in the same order.
    """
    members, site, op = resolve_group(group), locate(name), read_op(op)
    cut, fault = cut_slots(slots, members)
    cut, leaves, endless = open_tree(cut)
    odd = _agree(members, "reduce_scatter", site, cut, leaves, op=op, fault=fault or endless)
    what = f"reduce_scatter at {show_site(site)}"
    masks = _reduce_masks(members, what, leaves, odd)
    per_slot = [_encode_all(flatten(slot), op, members, precise=precise) for slot in cut]
    own = per_slot[members.position]
    with naming(members.rank, what):
        flats = _scatter_sums(members, per_slot)
    with _telling_all(members, "reduce_scatter", site, leaves, op):
        results = _finish(members, what, own, plan_buckets(own), flats)
    start = sum(len(wires) for wires in per_slot[: members.position])
    mine = {index - start: mask for index, mask in masks.items() if start <= index < start + len(own)}
    return unflatten(cut[members.position], _put_nan(results, mine))


def cut_slots(slots: Any, group: Group) -> tuple[list[Any], CollectiveError | None]:
    """Return a tree for each rank, and what is wrong with them."""
    if isinstance(slots, Tensor):
        if slots.dim() == 0 or slots.shape[0] % group.size:
            text = f"a tensor of shape {tuple(slots.shape)}, whose dim 0 can't be split into {group.size} equal parts"
            return [], CollectiveError(f"got {text}", hint="pass a list with one tensor for each rank")
        whole = slots.detach()
        return list(whole.chunk(group.size)) if len(whole) else [whole] * group.size, None
    if not isinstance(slots, (list, tuple)):
        text = f"got a {type(slots).__name__} instead of a list with one slot for each rank"
    elif len(slots) != group.size:
        text = f"got {len(slots)} slots for {group.size} ranks"
    else:
        return list(slots), None
    return [], CollectiveError(text, hint="pass a list with one entry for each rank of the group, in its order")


def check_root(root: Any, group: Group) -> CollectiveError | None:
    """Return the error for a root that is no member; roots are global ranks."""
    if isinstance(root, int) and not isinstance(root, bool) and root in group.ranks:
        return None
    return CollectiveError(
        f"root {root!r} is not in the group, whose members are {name_ranks(group.ranks)}",
        hint="root is a global rank, not an index in the group",
    )


def _agree(
    group: Group,
    call: str,
    site: str,
    tree: Any,
    leaves: Leaves,
    *,
    op: str,
    fault: CollectiveError | None = None,
    **more: Any,
) -> list[int]:
    """Compare the call; return the leaves that hold NaN on some rank, where that matters."""
    unfit = (check_leaf(path, leaf, op) for path, leaf in leaves)
    wrong = fault or check_op(op) or next(filter(None, unfit), None)
    must = {
        "op": op,
        "tree": describe_structure(tree),
        "leaves": [
            [path, describe_leaf(leaf) if kind_of(leaf) != "object" else ["object", None, None]]
            for path, leaf in leaves
        ],
        **more,
    }
    # Backends lose NaN in a minimum or maximum, or keep it, by the order of the ranks; torch.max keeps it.
    own = None
    if op in {"min", "max"}:
        own = [i for i, (_, leaf) in enumerate(leaves) if not wrong and has_nan(leaf)]
    answers = agree(group, call, site=site, must=must, may=own, fault=wrong)
    return sorted({index for one in answers if one for index in one}) if answers else own or []


def _reduce_masks(group: Group, what: str, leaves: Leaves, odd: Sequence[int]) -> dict[int, Tensor]:
    """Return where some rank holds NaN, for the leaves that do."""
    masks = [(leaves[index][0], find_nan(leaves[index][1])) for index in odd]
    return dict(zip(odd, _reduce_leaves(group, what, masks, "any", precise=False), strict=True))


def _put_nan(results: list[Any], masks: Mapping[int, Tensor]) -> list[Any]:
    return [put_nan(result, masks[i]) if i in masks else result for i, result in enumerate(results)]


@contextmanager
def _telling_all(group: Group, call: str, site: str, leaves: Leaves, op: str) -> Iterator[None]:
    """Raise on all ranks what only the holder of a result finds out: that it does not fit a narrow integer."""
    fault = None
    try:
        yield
    except CollectiveError as error:
        if "ends at" not in error.message:
            raise
        fault = CollectiveError(error.message.partition(": ")[2], hint=error.hint)
    if any(may_overflow(leaf, op) for _, leaf in leaves):
        # `may` is there so that they meet where comparing is off, too.
        agree(group, f"the result of {call}", site=site, must={}, may="", fault=fault)


def _reduce_leaves(
    group: Group,
    what: str,
    leaves: Leaves,
    op: str,
    *,
    precise: bool,
    root: int | None = None,
    in_place: bool = False,
) -> list[Any]:
    wires = _encode_all(leaves, op, group, precise=precise)
    plan = plan_buckets(wires)
    flats = [pack([wires[index] for index in bucket], in_place=in_place) for bucket in plan]
    if group.size > 1:
        with naming(group.rank, what):
            pairs = zip(flats, plan, strict=True)
            _wait([_launch(flat, wires[one[0]].op, group, root) for flat, one in pairs if flat.numel()])
    if root is not None and group.rank != root:
        return []
    return _finish(group, what, wires, plan, flats)


def _encode_all(leaves: Leaves, op: str, group: Group, *, precise: bool) -> list[Wire]:
    return [encode(path, leaf, op, group, precise=precise) for path, leaf in leaves]


def _launch(flat: Tensor, op: str, group: Group, root: int | None) -> Any:
    if root is None:
        return dist.all_reduce(flat, native_op(op), group=group.process_group, async_op=True)
    return dist.reduce(flat, root, native_op(op), group=group.process_group, async_op=True)


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _finish(group: Group, what: str, wires: list[Wire], plan: list[list[int]], flats: list[Tensor]) -> list[Any]:
    results: list[Any] = [None] * len(wires)
    try:
        for bucket, flat in zip(plan, flats, strict=True):
            for index, result in zip(bucket, unpack([wires[index] for index in bucket], flat), strict=True):
                results[index] = result
    except CollectiveError as error:
        raise CollectiveError(f"{what}: {error.message}", rank=group.rank, hint=error.hint) from None
    return results


def _scatter_sums(group: Group, per_slot: list[list[Wire]]) -> list[Tensor]:
    """Reduce each slot's buckets to its rank; returns our own slot's."""
    plans = [plan_buckets(wires) for wires in per_slot]
    slots = list(zip(plans, per_slot, strict=True))
    packed = [[pack([wires[i] for i in bucket]) for bucket in plan] for plan, wires in slots]
    own = packed[group.position]
    if group.size == 1:
        return own
    ops = [[wires[bucket[0]].op for bucket in plan] for plan, wires in slots]
    layouts = [[(flat.shape, flat.dtype, flat.device) for flat in flats] for flats in packed]
    is_even = all(layout == layouts[0] for layout in layouts) and all(names == ops[0] for names in ops)
    only_sums = _GLOO_SCATTERS_SUMS and any(flat.device.type == "cpu" for flat in own)
    if is_even and not (only_sums and {*ops[0]} != {"sum"}):
        results = [torch.empty_like(flat) for flat in own]
        joined = [torch.cat(flats) for flats in zip(*packed, strict=True)]
        send = partial(_reduce_scatter_flat, group=group.process_group, async_op=True)
        triples = zip(results, joined, ops[0], strict=True)
        _wait([send(to, source, native_op(op)) for to, source, op in triples if to.numel()])
        return results
    works = []
    for root, flats, names in zip(group.ranks, packed, ops, strict=True):
        pairs = zip(flats, names, strict=True)
        works += [_launch(flat, op, group, root) for flat, op in pairs if flat.numel()]
    _wait(works)
    return own
