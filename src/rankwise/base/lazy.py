"""Public names of a room that are imported when somebody asks for them (PEP 562): looking at the room needs no torch."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def find_homes(names: Mapping[str, str]) -> dict[str, str]:
    """Return the module of each name.

    Args:
        names: The names of each module, with blanks between.
    """
    return {name: module for module, several in names.items() for name in several.split()}


def make_getattr(room: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return a room's ``__getattr__``; the package itself has its own, as it loads no other module.

    Args:
        room: The package's full name.
        homes: The module of each name.
    """

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        value: object = getattr(import_module(homes[name]), name)
        vars(sys.modules[room])[name] = value  # asked for once
        return value

    return find
