"""Which rank this process is by its environment: each value with the variable that it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, final

from rankwise.base.errors import UsageError
from rankwise.base.identity import Identity, read_all, read_identity
from rankwise.doctor.variables.contradictions import find_half_set
from rankwise.doctor.variables.masking import mask_text, mask_value
from rankwise.doctor.variables.places import Place, find_exported_node, find_place

#: ``rank``: one of several; ``node``: a launcher is to be started here; ``alone``: nothing says anything; ``unclear``:
#: what is said can't be right, or is half of it.
Role = Literal["rank", "node", "alone", "unclear"]
VALUES = tuple("rank world_size local_rank local_world_size node_rank num_nodes master_addr master_port".split())  # noqa: SIM905
_LAUNCHERS = {
    "RANK and WORLD_SIZE": "whatever set RANK and WORLD_SIZE",
    "Slurm": "srun (Slurm)",
    "Open MPI": "mpirun (Open MPI)",
    "MPICH": "mpiexec (MPICH)",
    "Intel MPI": "mpirun (Intel MPI)",
    "MVAPICH2": "mpirun_rsh (MVAPICH2)",
    "PALS": "mpiexec (PALS)",
    "PMI": "a process manager that speaks PMI",
    "Flux": "flux run",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value by its name in Identity, and how it is known: ``SLURM_PROCID=3``; None and empty if nothing tells it."""

    name: str
    value: int | str | None
    how: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Understood:
    """All that is known of this process's place in its job; no secret is in it, and what nothing tells is empty.

    Attributes:
        launcher: Who has started it, in words; ``source``: whose variables say so, as in Identity.
        values: Who it is, or would be if a script were started here without a launcher.
        place: Where a launcher is to be started.
        others: Other sources, which are farther away, and what each says: rank and world size, or why it can't be read.
        problem: Why it is unclear; ``hint``: what to do about it.
    """

    role: Role
    launcher: str = ""
    source: str = ""
    values: tuple[Value, ...] = ()
    place: Place | None = None
    others: tuple[tuple[str, str], ...] = ()
    problem: str = ""
    hint: str = ""


def understand(env: Mapping[str, str]) -> Understood:
    """Return what an environment says of the process that has it."""
    place = _mask(find_place(env))
    try:
        it = read_identity(env)
    except UsageError as error:
        role: Role = "unclear" if place is None else "node"
        hint = mask_text(error.hint or "")
        return Understood(role=role, place=place, problem=mask_text(error.message), hint=hint)
    others = tuple(_describe(one) for one in read_all(env) if it is None or getattr(one, "source", "") != it.source)
    if it is None:
        half = next(find_half_set(env), None)
        if half is not None:
            return Understood(role="unclear", others=others, problem=mask_text(half.what), hint=mask_text(half.fix))
        place = place or _mask(find_exported_node(env))
        return Understood(role="alone" if place is None else "node", place=place, others=others)
    is_rank = place is None or place.is_rank_too
    return Understood(
        role="rank" if is_rank else "node", launcher=_name_launcher(it, env), source=it.source, values=tuple(_values(it)), place=place, others=others,
    )  # fmt: skip


def _mask(place: Place | None) -> Place | None:
    return place and replace(place, command=mask_text(place.command))


def _values(it: Identity) -> list[Value]:
    found = {name: getattr(it, name) for name in VALUES} | {
        "master_addr": it.master_addr and mask_value("MASTER_ADDR", it.master_addr)
    }
    how = {name: mask_text(it.origins.get(name, "")) if value is not None else "" for name, value in found.items()}
    return [Value(name=name, value=value, how=how[name]) for name, value in found.items()]


def _describe(info: Identity | UsageError) -> tuple[str, str]:
    if isinstance(info, UsageError):
        return "unreadable", mask_text(info.message)
    rank, world = info.origins.get("rank", ""), info.origins.get("world_size", "")
    return info.source, mask_text(f"rank {info.rank} of {info.world_size} ({rank}, {world})")


def _name_launcher(it: Identity, env: Mapping[str, str]) -> str:
    if it.source != "torchrun's variables":
        return _LAUNCHERS.get(it.source, it.source)
    if "/rankwise_" in env.get("TORCHELASTIC_ERROR_FILE", ""):
        return "rankwise run"
    return "torchrun, or a launcher that is built on it"
