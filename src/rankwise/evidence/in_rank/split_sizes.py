"""How much a rank gives to each other member in a collective and expects from each, where that may differ from member to member.

This file stands alone, as ``rank_exit.py`` does.
"""

from __future__ import annotations

import math
from typing import Any

#: Members up to which the outputs of a gathering are counted: that takes the rank's time, and there is no room for
#: many.
_MOST_COUNTED = 64
_SINGLES = {"alltoall_base", "all_to_all_single"}
#: ProcessGroup's names of collectives with such parts.
EXCHANGING = frozenset({*_SINGLES, "alltoall", "allgather", "reduce_scatter"})


def count_split_sizes(name: str, args: tuple[Any, ...], num_members: int) -> tuple[list[int], list[int]] | None:
    """Return elements given to each member and got from each, by the arguments of a call, in the order of their ranks in the group; None if that can't be told."""
    came, goes = args[0], args[1]
    if name in _SINGLES:
        gets, gives = _cut(came, args[2], num_members), _cut(goes, args[3], num_members)
    elif name == "alltoall":
        gets, gives = [one.numel() for one in came], [one.numel() for one in goes]
    elif num_members > _MOST_COUNTED:
        return None
    elif name == "allgather":
        gets, gives = _count(came), _count(goes) * num_members
    else:
        gets, gives = _count(came) * num_members, _count(goes)
    return (gives, gets) if len(gives) == len(gets) == num_members else None


def _count(tensors: Any) -> list[int]:
    """Return the elements of each; also of a single one, or of those of the one device that Python gives them for."""
    if tensors.__class__ is not list:
        return [tensors.numel()]
    inside = tensors[0] if tensors and tensors[0].__class__ is list else tensors
    return [one.numel() for one in inside]


def _cut(tensor: Any, lengths: list[int], num_members: int) -> list[int]:
    """Return the elements of the parts of a tensor that is cut along its first dimension; in equal parts without lengths."""
    if not lengths:
        return [tensor.numel() // num_members] * num_members
    row = math.prod(tensor.shape[1:])
    return [length * row for length in lengths]
