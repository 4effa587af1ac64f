"""Who a process is, as one record, and how variables are read into it: each value remembers which variable told it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Below the range from which kernels hand out ports by themselves (Linux: 32768 and up).
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000
#: More than any job has: a list of them is nonsense, and must not fill the memory.
_MOST_NODES, _MOST_DIGITS = 1 << 20, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a process is. What the variables don't tell is None: the handshake finds it out by the hosts' names.

    Attributes:
        rank: Global rank. It may be wrong (``>= world_size``): the handshake tells all ranks.
        world_size: How many ranks the job has.
        local_rank: Rank among those of this host.
        local_world_size: How many ranks this host has.
        node_rank: Which host this is.
        num_nodes: How many hosts the job has.
        master_addr: Where the store is, or None where only a file or a given store is used.
        master_port: Its port.
        source: Who told, in words: "torchrun's variables", "Slurm", …
        names: The variables that told rank and world size.
        origins: How each of the values above is known, by its name here: ``SLURM_PROCID=3``.
        role: What it is among servers of parameters and workers; None where there are no such servers.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    source: str
    names: tuple[str, str] = ("RANK", "WORLD_SIZE")
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    role: str | None = None


@final
class Traces:
    """Reads the variables of one launcher, and keeps which one told what.

    Attributes:
        origins: What ``Identity.origins`` is to say.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self.origins: dict[str, str] = {}

    def number(self, what: str, *names: str) -> int | None:
        """Return the first of some variables that is set, as a number; ``what`` is the value's name in Identity."""
        for name in names:
            value = read_int(self.env, name)
            if value is not None:
                return self.derive(what, value, f"{name}={value}")
        return None

    def derive(self, what: str, value: int | None, how: str) -> int | None:
        """Return a number, and keep how it came about; it may be None."""
        if value is not None:
            self.origins[what] = how
        return value

    def addr(self, derived: str | None = None, how: str = "") -> str | None:
        """Return MASTER_ADDR, else the address that the launcher lets us derive."""
        value = self.env.get("MASTER_ADDR")
        if value:
            self.origins["master_addr"] = f"MASTER_ADDR={value}"
        elif derived:
            self.origins["master_addr"] = how
        return value or derived or None

    def port(self, seed: str = "", how: str = "") -> int | None:
        """Return MASTER_PORT, else a port that all processes of a job derive alike from ``seed``; None if nothing tells jobs apart."""
        found = self.number("master_port", "MASTER_PORT")
        return self.derive("master_port", derive_port(seed), f"derived from {how}") if found is None else found


def read_int(env: Mapping[str, str], name: str) -> int | None:
    """Return a variable as a number.

    Args:
        env: The environment.
        name: The variable.

    Returns:
        The number; None if the variable is not set, or empty.

    Raises:
        UsageError: It is something else.
    """
    text = env.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"{name}={text!r} is not a whole number", hint=f"set {name} to a number, or unset it"
        ) from None


def expand_tasks(per_node: str) -> list[int]:
    """Return the tasks of each node from Slurm's short form: ``4(x2),1`` is 4, 4, 1; nothing if it is something else."""
    found: list[int] = []
    for part in per_node.split(",") if per_node else []:
        number, _, times = part.partition("(x")
        repeat = times.rstrip(")") or "1"
        if not (number.isdecimal() and repeat.isdecimal()) or max(len(number), len(repeat)) > _MOST_DIGITS:
            return []
        if len(found) + int(repeat) > _MOST_NODES:
            return []
        found += [int(number)] * int(repeat)
    return found


def derive_port(seed: str) -> int | None:
    """Return a port that all processes of a job find by themselves; None if nothing tells jobs apart."""
    return _FIRST_PORT + zlib.crc32(seed.encode()) % _NUM_PORTS if seed.strip(". ") else None
