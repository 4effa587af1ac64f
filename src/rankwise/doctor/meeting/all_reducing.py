"""An all-reduce by torch over all hosts: the last thing that is tried, and the one that is most like a job."""

from __future__ import annotations

import json
import socket
import statistics
import sys
from typing import TYPE_CHECKING, cast

from rankwise.base.deadline import OverdueError, call_within
from rankwise.doctor.meeting.together import AllReduce, Together
from rankwise.doctor.meeting.wire import entries, number, parts, text, texts, whole
from rankwise.engine import ALL_REDUCE_PROCESS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.doctor.host import Host
    from rankwise.doctor.meeting.wire import Message

#: For so long torch may import itself, meet and reduce; then it is killed.
BOUND_S = 60.0
_TORCH_S = 90.0


def describe_torch(host: Host) -> Message:
    """Tell whether this host's torch can take part, and where rank 0 could listen."""
    try:
        facts = call_within(_TORCH_S, lambda: host.torch)
    except OverdueError as error:
        return {"why": f"torch did not answer: {error}"}
    with socket.socket() as sock:
        sock.bind(("", 0))
        port = int(sock.getsockname()[1])
    return {
        "why": facts.why, "backends": list(facts.backends), "devices": len(facts.devices), "port": port, "backend": host.job.backend,
    }  # fmt: skip


def find_obstacle(found: Together, torch: Mapping[str, Message]) -> AllReduce | None:
    """Return why an all-reduce makes no sense; None if it does.

    Args:
        found: What was found of the hosts.
        torch: What those that are here say of their torch, by name.
    """
    lacking = [name for name, told in torch.items() if not texts(told, "backends")]
    if len(torch) < 2:
        return AllReduce(why="it takes two hosts that are here to the end")
    if lacking:
        first = text(torch[lacking[0]], "why")
        return AllReduce(
            why=f"there is no torch with torch.distributed on {', '.join(lacking)}"
            + (f": {first}" if first else "")
        )
    alive = set(torch)
    shut = [
        one
        for one in found.links
        if one.outcome not in {"ok", "not tried"}
        and {one.source, one.target} <= alive
        and one.plane != "nccl"
    ]
    if shut:
        return AllReduce(
            why=f"the link from {shut[0].source} to {shut[0].target} does not open: it would hang"
        )
    return None


def plan_reduce(torch: Mapping[str, Message], address: str) -> dict[str, Message]:
    """Return what each host is told.

    Args:
        torch: What the hosts say of their torch, by name; the first one serves the store.
        address: Where the others reach the first one.

    Returns:
        Orders by name: one rank on each host with Gloo, one for each GPU with NCCL.
    """
    told = list(torch.values())
    is_nccl = all(
        "nccl" in texts(one, "backends") and number(one, "devices") > 0 and text(one, "backend") != "gloo"
        for one in told
    )
    counts = [int(number(one, "devices")) if is_nccl else 1 for one in told]
    orders: dict[str, Message] = {}
    for index, name in enumerate(torch):
        orders[name] = {
            "do": "all-reduce", "backend": "nccl" if is_nccl else "gloo", "first_rank": sum(counts[:index]), "ranks": counts[index],
            "world": sum(counts), "address": address, "port": whole(told[0], "port"),
        }  # fmt: skip
    return orders


def run_all_reduce(host: Host, order: Message) -> Message:
    """Start this host's ranks, and return what they say; who is late is killed."""
    count = whole(order, "ranks") or 1
    names: Message = {
        "RANK": whole(order, "first_rank"), "RANKS": count, "WORLD_SIZE": whole(order, "world"), "MASTER_ADDR": text(order, "address"),
        "MASTER_PORT": whole(order, "port"), "BACKEND": text(order, "backend"),
    }  # fmt: skip
    given = [f"{name}={value}" for name, value in names.items()] + ["LOCAL_RANK=0"] * (count == 1)
    python = host.job.python or sys.executable
    ran = host.run(python, str(ALL_REDUCE_PROCESS), *given, timeout_s=BOUND_S)
    lines = ran.out.strip().splitlines()
    try:
        told = cast("Message", json.loads(lines[-1])) if ran.is_good and lines else {}
    except ValueError:
        told = {}
    if parts(told, "ranks"):
        return {"ranks": entries(told, "ranks")}
    said = [line for line in ran.err.strip().splitlines() if line.strip()]
    return {"ranks": [{"why": ran.why or (said or [f"exit code {ran.code}"])[-1][:500]}]}


def read_reduce(orders: Mapping[str, Message], told: Mapping[str, Message]) -> AllReduce:
    """Return the result of all ranks.

    Args:
        orders: What the hosts were told, by name.
        told: What they answered.
    """
    backend, world = (
        text(next(iter(orders.values())), "backend"),
        whole(next(iter(orders.values())), "world") or 0,
    )
    ranks = [(name, rank) for name, answer in told.items() for rank in parts(answer, "ranks")]
    failed = [(name, text(rank, "why")) for name, rank in ranks if text(rank, "why")]
    absent = [name for name in orders if name not in told]
    if failed or absent or len(ranks) < world:
        # Who says most of the cause: a rank that lost its peer is mostly the consequence.
        name, why = (
            min(failed, key=lambda one: "onnection" in one[1]) if failed else (", ".join(absent), "no answer")
        )
        return AllReduce(backend=backend, num_ranks=world, why=f"{name}: {why}", class_id=_find_class(why))
    first = ranks[0][1]
    waited = dict.fromkeys(orders, 0.0)
    for name, rank in ranks:
        waited[name] = max(waited[name], number(rank, "waited_s"))
    return AllReduce(
        backend=backend, num_ranks=world, latency_s=statistics.median(number(one, "latency_s") for _, one in ranks),
        bytes_per_s=statistics.median(number(one, "bytes_per_s") for _, one in ranks), size_bytes=whole(first, "size_bytes") or 0,
        waited_s=tuple(waited.items()),
    )  # fmt: skip


def _find_class(why: str) -> str:
    for words, class_id in (
        ("connectFullMesh", "I8"),
        ("Unable to find address", "I6"),
        ("client socket has timed out", "I2"),
        ("ncclSystemError", "I7"),
    ):
        if words in why:
            return class_id
    return ""
