"""The process groups of a rank: their members, backends and counts, without keeping any of them alive.

This file stands alone, as ``rank_exit.py`` does.
"""

from __future__ import annotations

import weakref
from typing import Any


class Group:
    """What is known of a process group; it does not keep the group itself.

    Attributes:
        text: The number of its text.
        members: As global ranks, in the order of their ranks in the group; empty if unknown.
        order: Their places in that order, by ascending global rank; None if that is the same.
        texts: The number of its text by kind of device, where it has different backends for them: each counts for
            itself.
        ahead: By text: what must be added to torch's number to get the flight recorder's, which messages don't count
            for.
        messages: How many there were, by kind and peer.
    """

    __slots__ = ("ahead", "members", "messages", "order", "ref", "text", "texts")

    def __init__(self, ref: Any, members: tuple[int, ...], texts: dict[str, int]) -> None:
        self.ref, self.members, self.texts = ref, members, texts
        self.text = next(iter(texts.values()))
        self.ahead = dict.fromkeys(texts.values(), 0)
        self.messages: dict[tuple[str, int], int] = {}
        order = sorted(range(len(members)), key=members.__getitem__)
        self.order = None if order == list(range(len(members))) else order


class Groups:
    """All groups that this process has used.

    Attributes:
        known: By the id of torch's object.
    """

    def __init__(self, module: Any, ring: Any, writer: Any) -> None:
        self._module, self._ring, self._writer = module, ring, writer
        self.known: dict[int, Group] = {}

    def find(self, group: Any) -> Group:
        """Return what is known of a group that nobody has seen being made, as of one that was split off another."""
        try:
            places = self._module._world.pg_group_ranks.get(group) or {}
            members = tuple(sorted(places, key=places.__getitem__))
        except Exception:
            members = ()
        return self.add(group, members)

    def add(self, group: Any, members: tuple[int, ...]) -> Group:
        """Write a group of torch's down, with its members as global ranks, in the order of their ranks in it."""
        name = str(group.group_name)
        backends = self._read_backends(group)
        spans = f"{self._ring.write_ranks(members)}\t{_find_own(group, members)}"
        mixed = len(set(backends.values())) > 1
        texts = {
            device: self._writer.intern(f"group\t{name}:{backend}\t{backend}\t{spans}" if mixed else f"group\t{name}\t{backend}\t{spans}")
            for device, backend in backends.items()
        }  # fmt: skip
        if not mixed:
            texts = dict(list(texts.items())[:1])
        added = self.known[id(group)] = Group(weakref.ref(group), members, texts)
        return added

    def _read_backends(self, group: Any) -> dict[str, str]:
        """Return the backend of each kind of device, as torch has written it down; or the default one's name."""
        try:
            config = str(self._module._world.pg_backend_config[group])
            found = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
        except Exception:
            found = {}
        if not found:
            try:
                found = {"": str(group._get_backend_name())}
            except Exception:
                found = {"": ""}
        return found


def _find_own(group: Any, members: tuple[int, ...]) -> str:
    """Return the global rank of this process, as the script has told torch; empty if that can't be known."""
    try:
        return str(members[group.rank()])
    except Exception:
        return ""
