"""Variables of which half is missing: a node's number without a launcher, a local rank without a rank, a rank without a size.

Nobody reads them as a rank, and yet such a process is not alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.host import is_loopback, is_unspecified
from rankwise.base.identity import read_all
from rankwise.doctor.reading import Reading
from rankwise.doctor.variables.addresses import find_slip, is_plain
from rankwise.doctor.variables.places import DEFAULT_PORT, Place, find_place, number, write_static

if TYPE_CHECKING:
    from collections.abc import Mapping


def find_half_set(env: Mapping[str, str]) -> Reading | None:
    """Return the warning of a lone LOCAL_RANK or PMIX_RANK, or of a node's number beyond the nodes; None if there is none."""
    if find_place(env) is not None or next(read_all(env), None) is not None:
        return None
    node, nodes = number(env, "NODE_RANK"), number(env, "NNODES", "NUM_NODES")
    if node is not None and nodes is not None and node >= nodes > 1:
        return Reading(
            verdict="warn", what=f"NODE_RANK={node}, and there are {nodes} nodes: they are numbered 0 to {nodes - 1}", class_id="I11",
            why="a launcher with this number is refused, or the others wait for a node that never comes", fix="# count NODE_RANK from 0",
        )  # fmt: skip
    if find_exported_node(env) is not None:
        return None
    local, pmix = number(env, "LOCAL_RANK"), number(env, "PMIX_RANK")
    if pmix is not None and pmix >= 0:
        return Reading(
            verdict="warn", what=f"PMIX_RANK={pmix} is set, and no variable says how many processes there are",
            why="a process manager that speaks PMIx has started this one, perhaps among others: each takes itself for the only one",
            fix="export RANK=$PMIX_RANK WORLD_SIZE=N MASTER_ADDR=HOST MASTER_PORT=29500  # in what each process runs; HOST: where rank 0 is",
        )  # fmt: skip
    if local is not None and local >= 0:
        return Reading(
            verdict="warn", what=f"LOCAL_RANK={local} is set, and neither RANK nor WORLD_SIZE is",
            why="libraries take the process for one of several (accelerate: `environment variable RANK expected, but not set`), "
            f"and scripts take GPU {local}",
            fix="unset LOCAL_RANK  # left over from an export? If this is to be one of several: rankwise run …",
        )  # fmt: skip
    return None


def find_exported_node(env: Mapping[str, str]) -> Place | None:
    """Return the place for a launcher that NODE_RANK and NNODES tell, as scripts set them by hand; None if they don't.

    Nobody but such scripts knows these names, so only who asks for a command gets one: no probe waits for other hosts by them.
    """
    node, nodes = number(env, "NODE_RANK"), number(env, "NNODES", "NUM_NODES")
    if not (nodes is None or nodes > 1) or not ((nodes or 0) > 1 or (node or 0) > 0):
        return None
    if node is not None and not 0 <= node < (nodes or node + 1):
        return None
    count = "NNODES" if number(env, "NNODES") is not None else "NUM_NODES"
    names = [name for name, value in (("NODE_RANK", node), (count, nodes)) if value is not None]
    lacking = (
        "" if nodes else "no variable says how many nodes there are: put their number in the place of NODES"
    )
    if node is None:
        lacking = "no variable says which node this is: put its number, counted from 0, in the place of NODE"
    addr, port = _read_place(env)
    return Place(
        told_by=" and ".join(names), what="one of several nodes, by " + " and ".join(names), node_rank=node, num_nodes=nodes,
        command=write_static(str(nodes or "NODES"), "NODE" if node is None else str(node), addr, str(port), "auto"), note=lacking,
    )  # fmt: skip


def _read_place(env: Mapping[str, str]) -> tuple[str, int]:
    """Return where the nodes are to meet; NODE0 stands for an address that is to be filled in."""
    addr, port = env.get("MASTER_ADDR", ""), number(env, "MASTER_PORT")
    slip = find_slip(addr)
    if slip is not None:
        addr, port = slip.host, port or slip.port
    is_told = is_plain(addr) and not is_loopback(addr) and not is_unspecified(addr)
    return addr if is_told else "NODE0", port or DEFAULT_PORT
