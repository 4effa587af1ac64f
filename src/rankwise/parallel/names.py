"""Names of modules and parameters: patterns that match them, the modules around one, and many of them in a sentence."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from torch import Tensor


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern fits all of a name: ``*`` within one part of it, ``**`` for any number of parts.

    Args:
        pattern: Such as "blocks.*.attn.q_proj" or "**.q_proj"; "" is the model itself.
        name: As in ``named_modules()``.
    """
    return _match_parts(pattern.split("."), name.split("."))


def _match_parts(pattern: Sequence[str], name: Sequence[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_match_parts(pattern[1:], name[start:]) for start in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _match_parts(pattern[1:], name[1:])


def list_owners(name: str) -> Iterator[str]:
    """Yield a name and those of all modules around, the model's own "" last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def find_owner(name: str, among: Container[str]) -> str | None:
    """Return which of some modules a name lies in, or is: the innermost."""
    return next((one for one in list_owners(name) if one in among), None)


def list_holders(tensors: Iterable[tuple[str, Tensor]], among: Container[str]) -> dict[str, list[str | None]]:
    """Return for each tensor, under all of its names, which of some modules hold it by any of them; None for what lies in none.

    Args:
        tensors: As of ``named_parameters(remove_duplicate=False)``.
        among: Names of modules, none of which is inside another.
    """
    pairs = list(tensors)
    holders: dict[int, dict[str | None, None]] = {}
    for name, one in pairs:
        holders.setdefault(id(one), {})[find_owner(name, among)] = None
    return {name: list(holders[id(one)]) for name, one in pairs}


def quote(names: Sequence[str], most: int = 3) -> str:
    """Return names for a sentence: ``'a', 'b', 'c' and 2 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
