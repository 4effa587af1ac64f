"""Incomplete sets of variables: a node's number without a launcher, a local rank without a rank, a rank without a size.

Nobody reads them as a rank, and yet such a process is not alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rankwise.base.identity import read_all
from rankwise.doctor.probe import Reading, warn
from rankwise.doctor.variables.places import Place, find_endpoint, find_place, number, write_static


def find_half_set(env: Mapping[str, str]) -> Iterator[Reading]:
    """Yield the warning of a lone LOCAL_RANK or PMIX_RANK, or of a node's number beyond the nodes, if there is one."""
    if find_place(env) is not None or next(read_all(env), None) is not None:
        return
    node, nodes = number(env, "NODE_RANK"), number(env, "NNODES", "NUM_NODES")
    if node is not None and nodes is not None and node >= nodes > 1:
        yield warn(
            f"NODE_RANK={node}, but there are {nodes} nodes: they are numbered 0 to {nodes - 1}",
            "a launcher with this number is refused, or the others wait for a node that never arrives", "# count NODE_RANK from 0", "I11"
        )  # fmt: skip
        return
    if find_exported_node(env) is not None:
        return
    local, pmix = number(env, "LOCAL_RANK"), number(env, "PMIX_RANK")
    if pmix is not None and pmix >= 0:
        yield warn(
            f"PMIX_RANK={pmix} is set, but no variable says how many processes there are",
            "a process manager that speaks PMIx has started this one, perhaps among others: each believes it is the only one",
            "export RANK=$PMIX_RANK WORLD_SIZE=N MASTER_ADDR=HOST MASTER_PORT=29500  # in what each process runs; HOST: where rank 0 is"
        )  # fmt: skip
    elif local is not None and local >= 0:
        yield warn(
            f"LOCAL_RANK={local} is set, but neither RANK nor WORLD_SIZE is",
            f"libraries treat the process as one of several (accelerate: `environment variable RANK expected, but not set`), and scripts take GPU {local}",
            "unset LOCAL_RANK  # if it is left over from an export; if a launcher has set it, export RANK and WORLD_SIZE as well"
        )  # fmt: skip


def find_exported_node(env: Mapping[str, str]) -> Place | None:
    """Return the place for a launcher that NODE_RANK and NNODES tell, as scripts set them by hand; None if they don't.

    Nobody but such scripts knows these names, so only who asks for a command gets one: no probe waits for other hosts
        by them.
    """
    node, nodes = number(env, "NODE_RANK"), number(env, "NNODES", "NUM_NODES")
    # What lies around by itself says nothing; node 0 of several is told where the others come, as they are.
    is_met = node == 0 and nodes is None and bool(env.get("MASTER_ADDR")) and find_endpoint(env)[0] != "NODE0"
    if not (nodes is None or nodes > 1) or not ((nodes or 0) > 1 or (node or 0) > 0 or is_met):
        return None
    if node is not None and not 0 <= node < (nodes or node + 1):
        return None
    count = "NNODES" if number(env, "NNODES") is not None else "NUM_NODES"
    names = [name for name, value in (("NODE_RANK", node), (count, nodes)) if value is not None]
    names += ["MASTER_ADDR"] if is_met else []
    lacking = "" if nodes else "no variable says how many nodes there are: replace NODES with their number"
    if node is None:
        lacking = "no variable says which node this is: replace NODE with its number, counted from 0"
    addr, port = find_endpoint(env)
    return Place(
        source=" and ".join(names), what="one of several nodes, by " + " and ".join(names), node_rank=node, num_nodes=nodes,
        command=write_static(str(nodes or "NODES"), "NODE" if node is None else str(node), addr, str(port), "auto"), note=lacking,
    )  # fmt: skip
