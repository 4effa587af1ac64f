"""An all-reduce by torch over all hosts: the last thing that is tried, and the one that is most like a job."""

from __future__ import annotations

import json
import socket
import statistics
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import cast

from rankwise.doctor.host import Host, run_program
from rankwise.doctor.multi_host.cluster_report import AllReduce, ClusterReport
from rankwise.doctor.multi_host.wire import Message, entries, number, one_line, parts, text, texts, whole
from rankwise.doctor.torch_facts import query_torch
from rankwise.engine import ALL_REDUCE_PROCESS

#: For so long torch may import itself, meet and reduce; then it is killed.
BOUND_S = 60.0
#: No host has more GPUs; each rank is a process.
_MOST_RANKS = 128
_MOST_WHY = 500
#: The failure classes of what torch says.
_CLASSES = {
    "connectFullMesh": "I8", "Unable to find address": "I6", "client socket has timed out": "I2", "ncclSystemError": "I7",
}  # fmt: skip


def describe_torch(host: Host) -> Message:
    """Return whether this host's torch can take part, and where rank 0 could listen."""
    facts = host.ask(query_torch)
    with socket.socket() as sock:
        sock.bind(("", 0))
        port = int(sock.getsockname()[1])
    return {
        "why": facts.why, "backends": list(facts.backends), "devices": len(facts.devices), "port": port, "backend": host.job.backend,
    }  # fmt: skip


def find_obstacle(found: ClusterReport, torch: Mapping[str, Message]) -> AllReduce | None:
    """Return why an all-reduce makes no sense, by what was found and what the hosts say of their torch; None if it does."""
    lacking = [name for name, message in torch.items() if not texts(message, "backends")]
    if len(torch) < 2:
        return AllReduce(why="it needs two hosts that stay to the end")
    if lacking:
        first = one_line(text(torch[lacking[0]], "why"), _MOST_WHY)
        return AllReduce(
            why=f"there is no torch with torch.distributed on {', '.join(lacking)}" + (f": {first}" if first else ""),
        )  # fmt: skip
    for one in found.links:
        is_shut = one.outcome not in {"ok", "not tried"} and one.plane != "nccl"
        if is_shut and {one.source, one.target} <= set(torch):
            return AllReduce(why=f"the link from {one.source} to {one.target} does not open: it would hang")
    return None


def plan_reduce(torch: Mapping[str, Message], address: str) -> dict[str, Message]:
    """Return the order for each host by name: one rank on each with Gloo, one for each GPU with NCCL.

    ``torch`` is what the hosts say of theirs; the first one serves the store, at ``address``.
    """

    def may_use_nccl(one: Message) -> bool:
        return "nccl" in texts(one, "backends") and number(one, "devices") > 0 and text(one, "backend") != "gloo"

    is_nccl = all(map(may_use_nccl, torch.values()))
    counts = {name: int(number(one, "devices")) if is_nccl else 1 for name, one in torch.items()}
    orders: dict[str, Message] = {}
    port, first_rank = whole(next(iter(torch.values())), "port"), 0
    for name, count in counts.items():
        orders[name] = {
            "do": "all-reduce", "backend": "nccl" if is_nccl else "gloo", "first_rank": first_rank, "ranks": count, "world": sum(counts.values()),
            "address": address, "port": port,
        }  # fmt: skip
        first_rank += count
    return orders


def run_ranks(host: Host, order: Message) -> Message:
    """Start this host's ranks, and return what they print; those that are late are killed, and they end when this process does."""
    count = whole(order, "ranks") or 1
    if not 0 < count <= _MOST_RANKS:
        return _report_failed(f"{count} ranks on this host were requested; at most {_MOST_RANKS} are started")
    names: Message = {
        "RANK": whole(order, "first_rank"), "RANKS": count, "WORLD_SIZE": whole(order, "world"), "MASTER_ADDR": text(order, "address"),
        "MASTER_PORT": whole(order, "port"), "BACKEND": text(order, "backend"), "LIFELINE": 1,
    }  # fmt: skip
    given = [f"{name}={value}" for name, value in names.items()] + ["LOCAL_RANK=0"] * (count == 1)
    argv = [host.job.python or sys.executable, str(ALL_REDUCE_PROCESS), *given]
    ran = run_program(argv, BOUND_S, lifeline=True)
    with suppress(ValueError, IndexError):
        message = cast("Message", json.loads(ran.out.splitlines()[-1])) if ran.is_good else {}
        if parts(message, "ranks"):
            return {"ranks": entries(message, "ranks")}
    return _report_failed(ran.failure.replace(argv[0], "the ranks", 1))


def _report_failed(why: str) -> Message:
    return {"ranks": [{"why": one_line(why, _MOST_WHY)}]}


def read_reduce(orders: Mapping[str, Message], message: Mapping[str, Message], lost: Collection[str] = ()) -> AllReduce:
    """Return the result of all ranks; where hosts were lost meanwhile, whatever the others say comes of that."""
    if lost:
        return AllReduce(why=f"{', '.join(lost)} was lost while it ran")
    order = next(iter(orders.values()))
    backend, world = text(order, "backend"), whole(order, "world") or 0
    ranks = [(name, rank) for name, answer in message.items() for rank in parts(answer, "ranks")]
    failed = [(name, one_line(text(rank, "why"), _MOST_WHY)) for name, rank in ranks if text(rank, "why")]
    absent = [name for name in orders if name not in message]
    if failed or absent or len(ranks) < world:
        # The error that is closest to the cause: a rank that lost its peer is mostly a consequence.
        name, why = min(failed, key=lambda it: "onnection" in it[1], default=(", ".join(absent), "no answer"))
        class_id = next((class_id for words, class_id in _CLASSES.items() if words in why), "")
        return AllReduce(backend=backend, num_ranks=world, why=f"{name}: {why}", class_id=class_id)
    first = ranks[0][1]
    waited = dict.fromkeys(orders, 0.0)
    for name, rank in ranks:
        waited[name] = max(waited[name], number(rank, "waited_s"))
    return AllReduce(
        backend=backend, num_ranks=world, latency_s=statistics.median(number(one, "latency_s") for _, one in ranks),
        bytes_per_s=statistics.median(number(one, "bytes_per_s") for _, one in ranks), size_bytes=whole(first, "size_bytes") or 0,
        waited_s=tuple(waited.items()),
    )  # fmt: skip
