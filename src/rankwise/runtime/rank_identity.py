"""Who this process is and where it meets the others: the call, its address and the environment, brought together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.environ import environ
from rankwise.base.errors import UsageError
from rankwise.base.identity import Identity, read_identity, read_int
from rankwise.runtime.stores import Place, find_place, place_from_env

if TYPE_CHECKING:
    import torch.distributed as dist

_TORCH_NAMES = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
}


def identify(
    rank: int | None, world_size: int | None, init_method: str | None, store: dist.Store | None
) -> tuple[Identity, Place]:
    """Bring arguments, address and environment together.

    Args:
        rank: As for ``init()``, and so are the others.
        world_size: How many ranks.
        init_method: Where to meet.
        store: Or a store to meet at.

    Returns:
        Who we are, and where to meet.

    Raises:
        UsageError: They contradict each other, or something lacks.
    """
    place = find_place(init_method, store)
    if place is not None:
        rank = _merge("rank", rank, place.rank, "the call", "its init_method")
        world_size = _merge("world_size", world_size, place.world_size, "the call", "its init_method")
    found = _read(rank, world_size, environ())
    if place is not None and place.kind != "env":
        return found, place
    if found.world_size == 1 and (not found.master_addr or found.master_port is None):
        return found, Place(kind="alone")
    return found, place_from_env(found.master_addr, found.master_port, found.source, found.rank)


def _read(rank: int | None, world_size: int | None, env: dict[str, str]) -> Identity:
    # One half may come from here and the other from there.
    if rank is not None and env.get("WORLD_SIZE") and not env.get("RANK"):
        env = {**env, "RANK": str(rank)}
    elif world_size is not None and env.get("RANK") and not env.get("WORLD_SIZE"):
        env = {**env, "WORLD_SIZE": str(world_size)}
    # Whoever passes both knows better than a cluster's variables: mp.spawn within a step of Slurm. But the names
    # RANK and WORLD_SIZE mean just what the arguments mean.
    given = rank is not None and world_size is not None
    identity = read_identity({name: env[name] for name in _TORCH_NAMES & env.keys()} if given else env)
    if identity is None:
        return _from_arguments(rank, world_size, env)
    _merge(identity.names[0], rank, identity.rank, "the call", "the environment")
    _merge(identity.names[1], world_size, identity.world_size, "the call", "the environment")
    return identity


def _merge(name: str, ours: int | None, theirs: int | None, here: str, there: str) -> int | None:
    if ours is not None and theirs is not None and ours != theirs:
        raise UsageError(
            f"{name} is {ours} in {here} and {theirs} in {there}: two worlds that would never join",
            hint=f"set it in one place: leave it out of {here}, or unset the variable",
        )
    return ours if ours is not None else theirs


def _from_arguments(rank: int | None, world_size: int | None, env: dict[str, str]) -> Identity:
    alone = rank is None and world_size is None
    if rank is None and world_size in {None, 1}:
        rank, world_size = 0, 1
    if rank is None or world_size is None:
        have, lack = ("world_size", "rank") if rank is None else ("rank", "world_size")
        raise UsageError(
            f"{have}={world_size if rank is None else rank} was given, but neither the call nor the environment gives the {lack}",
            hint=f"pass {lack} too, or start the script with `rankwise run`",
        )
    if rank < 0 or world_size < 1:
        raise UsageError(f"rank={rank}, world_size={world_size}", hint="ranks are 0 to world_size - 1")
    return Identity(
        rank=rank, world_size=world_size, local_rank=read_int(env, "LOCAL_RANK"), local_world_size=read_int(env, "LOCAL_WORLD_SIZE"),
        node_rank=read_int(env, "GROUP_RANK"), num_nodes=read_int(env, "GROUP_WORLD_SIZE"), master_addr=env.get("MASTER_ADDR"),
        master_port=read_int(env, "MASTER_PORT"), source="nothing: a world of one" if alone else "the call", names=("rank", "world_size"),
    )  # fmt: skip
