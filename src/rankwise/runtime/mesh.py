"""The ranks as a grid: how many share the batch, the weights, and the work of each layer; the only place where degrees are checked.

The axes are those of torchtitan (``ParallelDims``) and of ``torch.distributed.device_mesh``, outermost first: the ranks of the innermost are
neighbours, and on one host where they fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Outermost first: stages of a pipeline; copies of the model; shards of its parameters; parts of each layer.
AXES = ("pipeline", "replicate", "shard", "tensor")
#: Along these the ranks have different samples; along the others the same.
DATA_AXES = ("replicate", "shard")
#: What torchtitan and others call them.
_ALSO = {
    "pp": "pipeline", "dp_replicate": "replicate", "ddp": "replicate", "dp_shard": "shard", "fsdp": "shard", "dp": "shard", "tp": "tensor",
}  # fmt: skip


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mesh:
    """The ranks of a job as a grid; made by ``init(mesh=...)`` or ``ctx.mesh(...)``.

    Attributes:
        degrees: How many ranks each axis has; all of ``AXES``, 1 where nothing is spread.
        position: Where this rank is, on each axis.
        device_mesh: torch's, with the requested axes.
        data_ranks: For each share of the batch the first rank that has it.
    """

    degrees: Mapping[str, int]
    position: Mapping[str, int]
    device_mesh: DeviceMesh = field(repr=False)
    data_ranks: tuple[int, ...] = field(repr=False)

    @property
    def data_size(self) -> int:
        """Into how many shares a batch is split."""
        return len(self.data_ranks)

    @property
    def data_rank(self) -> int:
        """Which share this rank has."""
        return self.position["replicate"] * self.degrees["shard"] + self.position["shard"]

    def of(self, *axes: str) -> DeviceMesh:
        """Return torch's mesh of some axes through this rank.

        Args:
            *axes: Names, outermost first.

        Raises:
            UsageError: The mesh has no such axis.
        """
        names = self.device_mesh.mesh_dim_names or ()
        found = [next((name for name in names if _ALSO.get(name, name) == axis), None) for axis in axes]
        if None in found:
            raise UsageError(
                f"the mesh {show_degrees(self.degrees)} has no axis {axes[found.index(None)]!r}",
                hint="name it: init(mesh={'shard': -1, 'tensor': 2}), where -1 takes the remaining ranks",
            )
        if len(names) == len(found):
            return self.device_mesh
        return self.device_mesh[found[0] if len(found) == 1 else tuple(found)]


def read_degrees(wanted: Mapping[str, int], world_size: int, *, rank: int | None = None) -> dict[str, int]:
    """Return how many ranks each axis has, outermost first.

    Args:
        wanted: By axis; one may be -1.
        world_size: How many ranks there are.
        rank: Ours, for errors.

    Raises:
        UsageError: They don't make up the number of ranks, or an unknown axis.
    """
    if not isinstance(wanted, Mapping):
        raise UsageError(
            f"mesh={wanted!r} is a {type(wanted).__name__}",
            rank=rank,
            hint="a dict: {'replicate': 2, 'shard': -1}",
        )
    named = rename_axes(wanted)
    unknown = [name for name in named if name not in AXES]
    if unknown or len(named) < len(wanted):
        what = f"has an axis {unknown[0]!r}" if unknown else "names an axis twice"
        raise UsageError(
            f"the mesh {dict(wanted)} {what}",
            rank=rank,
            hint=f"axes are {', '.join(AXES)}; or torchtitan's {', '.join(sorted(_ALSO))}",
        )
    wrong = [
        f"{name}={size!r}"
        for name, size in named.items()
        if not isinstance(size, int) or isinstance(size, bool) or size == 0 or size < -1
    ]
    if wrong:
        raise UsageError(
            f"the mesh has {', '.join(wrong)}",
            rank=rank,
            hint="degrees are whole numbers above 0; -1 takes the remaining ranks",
        )
    left = [name for name, size in named.items() if size == -1]
    if len(left) > 1:
        raise UsageError(
            f"the mesh leaves {' and '.join(left)} open",
            rank=rank,
            hint="one axis may be -1: the other must have a number",
        )
    product = math.prod(size for size in named.values() if size != -1)
    if left and world_size % product:
        raise UsageError(
            f"the mesh {dict(wanted)}: {world_size} ranks can't be divided by {product}, and {left[0]} was to take the rest",
            rank=rank,
            hint=_suggest(world_size, product),
        )
    if not left and product != world_size:
        raise UsageError(
            f"the mesh {dict(wanted)} has {product} positions, and the job {world_size} {'rank' if world_size == 1 else 'ranks'}",
            rank=rank,
            hint="set one axis to -1, and it takes the remaining ranks: {'shard': -1}",
        )
    named |= dict.fromkeys(left, world_size // product)
    return {axis: named.get(axis, 1) for axis in AXES}


def show_degrees(degrees: Mapping[str, int]) -> str:
    """Return them as text, ``replicate 2 x shard 4``, those of 1 left out."""
    return " x ".join(f"{axis} {size}" for axis, size in degrees.items() if size > 1) or "of one rank"


def _suggest(world_size: int, product: int) -> str:
    near = world_size - world_size % product
    fitting = f"start {near} or {near + product} ranks" if near else f"start {product} ranks"
    return f"{fitting}, or use degrees that divide {world_size}"


def rename_axes(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return degrees by our names of the axes, where they have those of torchtitan and others."""
    return {_ALSO.get(str(name), str(name)): size for name, size in wanted.items()}
