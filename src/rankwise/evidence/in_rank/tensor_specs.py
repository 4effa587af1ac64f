"""What the tensors of a call are, in the few bytes that a record has for it; worked out once for each kind.

This file stands alone, as ``rank_exit.py`` does.
"""

from __future__ import annotations

from typing import Any

_MOST_FORMS = 4096


class TensorSpecs:
    """The forms that this process has met."""

    def __init__(self, ring: Any) -> None:
        self._ring = ring
        self._known: dict[Any, bytes] = {}

    def describe(self, tensors: Any) -> bytes:
        """Return the form of a tensor, or of tensors in lists."""
        if tensors.__class__ is list and len(tensors) == 1:
            tensors = tensors[0]
        try:
            key = (tensors.shape, tensors.dtype)
            form = self._known.get(key)
            if form is not None:
                return form
            flat = [tensors]
        except AttributeError:
            key, flat = None, list(_flatten(tensors))
        form = self._ring.describe_form([(tuple(one.shape), str(one.dtype)[6:]) for one in flat])
        return self._keep(key, bytes(form)) if key is not None else bytes(form)

    def add_split_sizes(self, form: bytes, known: Any, counts: tuple[list[int], list[int]]) -> bytes:
        """Return a form with what was counted by rank in the group, by ascending global rank.

        Args:
            form: Of the tensors.
            known: The group, as ``process_groups`` has it.
            counts: What each member is given, and what it gives.
        """
        key = (form, known.order is None or id(known), *counts[0], *counts[1])
        added = self._known.get(key)
        if added is not None:
            return added
        sides = counts if known.order is None else [[side[at] for at in known.order] for side in counts]
        return self._keep(key, bytes(self._ring.add_split_sizes(form, self._ring.describe_split_sizes(*sides))))

    def _keep(self, key: Any, form: bytes) -> bytes:
        if len(self._known) >= _MOST_FORMS:
            self._known.clear()
        self._known[key] = form
        return form


def _flatten(tensors: Any) -> Any:
    for one in tensors:
        if isinstance(one, list | tuple):
            yield from _flatten(one)
        else:
            yield one
