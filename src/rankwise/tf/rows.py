"""Rows of a batch, whatever it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankwise.base.errors import DataError


def count_rows(batch: Any) -> int:
    """Return the size of dim 0 of the first tensor, array or list of plain values in a batch.

    Raises:
        DataError: There is none.
    """
    found = _find_rows(batch)
    if found is None:
        raise DataError(
            f"a batch of type {type(batch).__name__} has no tensor with rows",
            hint="a batch is a tensor, or a dict, list or tuple of tensors, whose dim 0 counts samples",
        )
    return found


def _find_rows(node: Any) -> int | None:
    if getattr(node, "shape", None) is not None:
        return int(node.shape[0]) if len(node.shape) else None
    if _is_column(node):
        return len(node)
    children = list(node.values()) if isinstance(node, Mapping) else node
    if not isinstance(children, (list, tuple)):
        return None
    return next((rows for rows in map(_find_rows, children) if rows is not None), None)


def cut_rows(node: Any, part: slice) -> Any:
    """Return a batch with some of its rows; what has none stays whole.

    Args:
        node: Tensors, arrays, and lists of plain values, in nested dicts, lists and tuples.
        part: Which rows.
    """
    if getattr(node, "shape", None) is not None:
        return node[part] if len(node.shape) else node
    if _is_column(node):
        return node[part]
    if isinstance(node, Mapping):
        return {key: cut_rows(value, part) for key, value in node.items()}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(cut_rows(value, part) for value in node))
    if isinstance(node, (list, tuple)):
        return type(node)(cut_rows(value, part) for value in node)
    return node


def _is_column(node: Any) -> bool:
    """Whether a list holds a plain value for each sample, as texts are collated."""
    return isinstance(node, (list, tuple)) and bool(node) and isinstance(node[0], (str, bytes, int, float))
