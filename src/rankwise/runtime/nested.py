"""Take nested containers apart into leaves with a path each, and put them together again."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rankwise.base.errors import CollectiveError

#: Deeper than this, a container holds itself.
_MAX_DEPTH = 100


def flatten(tree: Any) -> list[tuple[str, Any]]:
    """List the leaves of nested dicts, lists, tuples, named tuples and dataclasses.

    The order is that of the sorted keys, not that of insertion: ranks that filled a dict in different orders (or from
    a set, whose order follows the process's hash seed) still pair what belongs together. None is part of the structure.

    Args:
        tree: Anything; what is no container is a leaf.

    Returns:
        A path, such as ``['loss'][0].mean``, and a value for each leaf; the path of a lone leaf is empty.

    Raises:
        CollectiveError: A container holds itself.
    """
    found: list[tuple[str, Any]] = []
    _walk(tree, "", found, 0)
    return found


def open_tree(tree: Any) -> tuple[Any, list[tuple[str, Any]], CollectiveError | None]:
    """Return a tree, its leaves, and what is wrong with its containers: then the tree is None, and has no leaves.

    A rank that raised before it has told the others would leave them waiting.
    """
    try:
        return tree, flatten(tree), None
    except CollectiveError as error:
        return None, [], error


def _walk(node: Any, path: str, found: list[tuple[str, Any]], depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise CollectiveError(
            f"containers are nested deeper than {_MAX_DEPTH} at {path[:60]}...",
            hint="does it contain itself?",
        )
    children = list_children(node)
    if children is None:
        found.append((path, node))
        return
    for step, child in children:
        _walk(child, path + step, found, depth + 1)


def list_children(node: Any) -> list[tuple[str, Any]] | None:
    """Return what a container holds, each with its step of the path; None for a leaf."""
    if node is None or isinstance(node, Tensor):
        return [] if node is None else None
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [(f".{name}", value) for name, value in zip(node._fields, node, strict=True)]
    if isinstance(node, (list, tuple)):
        return [(f"[{index}]", value) for index, value in enumerate(node)]
    if isinstance(node, Mapping):  # last, as it takes ten times as long to ask
        return [(f"[{key!r}]", node[key]) for key in _sort_keys(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node)]
    return None


def _sort_keys(node: Mapping[Any, Any]) -> list[Any]:
    keys = list(node)
    if all(type(key) is str for key in keys) or all(type(key) in {int, float} for key in keys):
        return sorted(keys)
    # repr of an object without one of its own holds its address: the ranks then see that their paths differ.
    return sorted(keys, key=lambda key: (type(key).__name__, repr(key)))


def unflatten(tree: Any, leaves: Iterable[Any]) -> Any:
    """Return a new tree of the same structure with other leaves.

    Args:
        tree: Gives the structure; not modified.
        leaves: As many as ``flatten(tree)`` has, in its order.

    Returns:
        New containers of the same types, dicts in the same order; holds nothing of the old leaves.
    """
    return _build(tree, iter(leaves))


def _build(node: Any, leaves: Any) -> Any:
    children = list_children(node)
    if node is None:
        return None
    if children is None:
        return next(leaves)
    values = [_build(child, leaves) for _, child in children]
    if isinstance(node, Mapping):
        built: Any = _copy_mapping(node)
        for key, value in zip(_sort_keys(node), values, strict=True):
            built[key] = value
        return built
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        named: Any = type(node)
        return named._make(values)
    if isinstance(node, (list, tuple)):
        return values if type(node) is list else tuple(values) if type(node) is tuple else type(node)(values)
    built = copy.copy(node)
    for (step, _), value in zip(children, values, strict=True):
        object.__setattr__(built, step[1:], value)  # a frozen dataclass has no other door
    return built


def _copy_mapping(node: Mapping[Any, Any]) -> Any:
    """Return a mapping of the same type that can be written to and shares nothing but values and keys."""
    if not hasattr(node, "__setitem__"):
        return dict(node)
    if isinstance(node, dict) or hasattr(node, "__copy__"):
        return copy.copy(node)
    # A shallow copy of any other class would share the dict that it keeps inside.
    shared = {id(item): item for pair in node.items() for item in pair}
    try:
        return copy.deepcopy(node, shared)
    except (TypeError, copy.Error):  # it holds a lock, say
        return dict(node)


def describe_structure(tree: Any) -> str:
    """Return the containers as text, ``dict(['a']: list([0]: *), ['b']: *)``: equal on two ranks if their trees fit."""
    if tree is None:
        return "None"
    children = list_children(tree)
    if children is None:
        return "*"
    inside = ", ".join(f"{step}: {describe_structure(child)}" for step, child in children)
    return f"{type(tree).__name__}({inside})"


def kind_of(leaf: Any) -> str:
    """Return ``"tensor"``, ``"array"``, ``"scalar"`` (NumPy's), ``"bool"``, ``"int"``, ``"float"``, ``"complex"`` or ``"object"``."""
    if isinstance(leaf, Tensor):
        return "tensor"
    if type(leaf) in {bool, int, float, complex}:
        return type(leaf).__name__
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(leaf, (numpy.ndarray, numpy.generic)) and leaf.dtype.kind in "biufc":
        try:
            torch.from_numpy(numpy.empty(0, dtype=leaf.dtype))
        except TypeError:  # longdouble, other byte orders: torch has no such type
            return "object"
        return "array" if isinstance(leaf, numpy.ndarray) else "scalar"
    return "object"


def to_tensor(leaf: Any) -> Tensor:
    """Return a tensor leaf, detached, or a NumPy leaf as a tensor of its own memory."""
    if isinstance(leaf, Tensor):
        return leaf.detach()
    import numpy  # noqa: PLC0415 - the leaf is NumPy's, so it is loaded

    return torch.from_numpy(numpy.array(leaf))


def from_tensor(tensor: Tensor, kind: str) -> Any:
    """Undo ``to_tensor``: give a tensor back as what the leaf had been."""
    if kind == "tensor":
        return tensor
    array = tensor.cpu().numpy()
    return array if kind == "array" else array[()]


def find_unfit(leaf: Any, path: str = "") -> CollectiveError | None:
    """Return why a tensor can't travel at all; None if it can, or is none."""
    if not isinstance(leaf, Tensor):
        return None
    if hasattr(leaf, "full_tensor") and hasattr(leaf, "to_local"):
        what, hint = (
            "is a DTensor, which is already spread over ranks",
            "pass x.to_local() or x.full_tensor()",
        )
    elif leaf.layout != torch.strided:
        what, hint = f"has layout {leaf.layout}", "pass x.to_dense()"
    elif leaf.device.type == "meta":
        what, hint = "is on the meta device and has no values", "materialise it first, with to_empty()"
    elif leaf.is_quantized:
        what, hint = "is quantised", "pass x.dequantize()"
    else:
        return None
    return CollectiveError(f"{path or 'the value'} {what}", hint=hint)


def describe_leaf(leaf: Any) -> list[Any]:
    """Return ``[dtype or kind, shape or None, device or None]`` of a leaf, as ranks tell each other."""
    kind = kind_of(leaf)
    if kind == "tensor":
        return [str(leaf.dtype).removeprefix("torch."), list(leaf.shape), leaf.device.type]
    if kind in {"array", "scalar"}:
        return [f"numpy {leaf.dtype}", list(leaf.shape), None]
    return [kind if kind != "object" else type(leaf).__name__, None, None]


def describe_rows(leaf: Any, rows: str = "rows") -> list[Any]:
    """As ``describe_leaf``, with a word for dim 0, which may differ."""
    dtype, shape, device = describe_leaf(leaf)
    return [dtype, shape and [rows, *shape[1:]], device]


def count_rows(leaf: Tensor) -> int:
    """Return how many rows a tensor has; one that has no dims is a row."""
    return int(leaf.shape[0]) if leaf.dim() else 1
