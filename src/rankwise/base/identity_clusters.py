"""Who a process is, as told by a cluster that starts one process on each host: TF_CONFIG, SageMaker, Kubernetes, SkyPilot."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rankwise.base.errors import UsageError
from rankwise.base.identity_facts import Identity, Traces

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The port of SageMaker's own launchers; a job has its containers to itself.
_SAGEMAKER_PORT = 7777


def read_tf_config(env: Mapping[str, str]) -> Identity | None:
    """TensorFlow's: parameter servers come first, if there are any; the chief is next, the workers follow; each entry is one process."""
    text = env.get("TF_CONFIG", "").strip()
    if not text:
        return None
    how = 'it is JSON: {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        kind, index = str(task["type"]), int(task["index"])
        servers = [str(entry) for entry in cluster.get("ps", [])]
        chiefs = [str(entry) for entry in cluster.get("chief", cluster.get("master", []))]
        addresses = [*servers, *chiefs, *(str(entry) for entry in cluster.get("worker", []))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"TF_CONFIG can't be read: {type(error).__name__}: {error}", hint=how) from error
    first = {"ps": 0, "chief": len(servers), "master": len(servers), "worker": len(servers) + len(chiefs)}
    if kind not in first:
        raise UsageError(
            f"TF_CONFIG has task type {kind!r}, which is not part of a process group",
            hint="only ps, chief and workers train together",
        )
    rank = index + first[kind]
    if not index >= 0 or rank >= len(addresses) or (kind == "ps" and index >= len(servers)):
        raise UsageError(
            f"TF_CONFIG names task {kind} {index}, but its cluster has {len(servers)} servers, and {len(addresses) - len(servers)} chiefs and workers",
            hint=how,
        )
    hosts = [address.rpartition(":")[0] or address for address in addresses]
    port = addresses[0].rpartition(":")[2]
    order = list(dict.fromkeys(hosts))
    it = Traces(env)
    task_value, cluster_value = (
        f"TF_CONFIG's task {kind} {index}",
        f"{len(addresses)} entries in TF_CONFIG's cluster",
    )
    it.origins = {
        "rank": task_value,
        "world_size": cluster_value,
        "local_rank": f"{task_value}, among those of its host",
        "local_world_size": "entries of its host in TF_CONFIG's cluster",
        "node_rank": f"{task_value}, by its host",
        "num_nodes": "hosts in TF_CONFIG's cluster",
    }
    found = it.port()
    if found is None:
        job = "ps" if servers else "chief" if chiefs else "worker"
        refuse_no_port(job, addresses[0], "TF_CONFIG")
        found = it.derive("master_port", int(port), "first entry of TF_CONFIG's cluster")
    return Identity(
        rank=rank, world_size=len(addresses), local_rank=hosts[:rank].count(hosts[rank]), local_world_size=hosts.count(hosts[rank]),
        node_rank=order.index(hosts[rank]), num_nodes=len(order),
        master_addr=it.addr(hosts[0], "first entry of TF_CONFIG's cluster"), master_port=found,
        source="TF_CONFIG", names=("TF_CONFIG task index", "TF_CONFIG cluster size"), origins=it.origins, role=kind if servers else None,
    )  # fmt: skip


def refuse_no_port(job: str, address: str, where: str) -> None:
    """Refuse an address at which the others can't find a job's first task.

    Args:
        job: As in ``"worker"``.
        address: The task's.
        where: What has the address.

    Raises:
        UsageError: It has no port.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(
            f"{job} 0 has no port in {where}: {address!r}",
            hint=f'"{address.rstrip(":")}:29500", say: a free port on its host',
        )


def read_sagemaker(env: Mapping[str, str]) -> Identity | None:
    """SageMaker's training toolkit: one process a host."""
    found = find_sagemaker_hosts(env)
    if found is None or len(found[1]) < 2:
        return None
    name, hosts, current = found
    # SageMaker documents the list as sorted; some jobs have seen it otherwise, and every host must count alike.
    hosts = sorted(hosts)
    if current not in hosts:
        raise UsageError(
            f"SM_CURRENT_HOST={current} is not one of {name}={', '.join(hosts)}",
            hint=f"unset SM_CURRENT_HOST and {name} if they are left over from another job",
        )
    it = Traces(env)
    place, count = f"place of SM_CURRENT_HOST={current} in {name}", f"{len(hosts)} hosts in {name}"
    it.origins = {
        "rank": place,
        "world_size": f"{count}, one process each",
        "local_rank": "one process a host",
        "local_world_size": "one process a host",
        "node_rank": place,
        "num_nodes": count,
    }
    port = it.port()
    if port is None:
        port = it.derive("master_port", _SAGEMAKER_PORT, "the port of SageMaker's own launchers")
    return Identity(
        rank=hosts.index(current), world_size=len(hosts), local_rank=0, local_world_size=1, node_rank=hosts.index(current), num_nodes=len(hosts),
        master_addr=it.addr(hosts[0], f"first host of {name}"), master_port=port, source="SageMaker", names=("SM_CURRENT_HOST", name), origins=it.origins,
    )  # fmt: skip


def find_sagemaker_hosts(env: Mapping[str, str]) -> tuple[str, list[str], str] | None:
    """Return which variable lists the hosts, the hosts, and the current one; None if SageMaker tells nothing.

    Raises:
        UsageError: A list can't be read.
    """
    if env.get("SM_HOSTS") and env.get("SM_CURRENT_HOST"):
        hosts = _read_json(env, "SM_HOSTS")
        return "SM_HOSTS", _names(hosts, "SM_HOSTS"), env["SM_CURRENT_HOST"].strip().strip('"')
    if env.get("SM_RESOURCE_CONFIG"):
        config = _read_json(env, "SM_RESOURCE_CONFIG")
        if isinstance(config, dict):
            current = str(config.get("current_host", ""))
            return "SM_RESOURCE_CONFIG", _names(config.get("hosts"), "SM_RESOURCE_CONFIG"), current
    return None


def _read_json(env: Mapping[str, str], name: str) -> object:
    try:
        return json.loads(env[name])
    except ValueError as error:
        raise UsageError(f"{name} can't be read: {error}", hint='it is JSON: ["algo-1", "algo-2"]') from error


def _names(value: object, name: str) -> list[str]:
    if not isinstance(value, list):
        raise UsageError(f"{name} has no list of hosts", hint='it is JSON: ["algo-1", "algo-2"]')
    return list(map(str, value))


def read_kubernetes(env: Mapping[str, str]) -> Identity | None:
    """An indexed job: Kubernetes tells the index; the number of pods must be told by WORLD_SIZE."""
    it = Traces(env)
    index, world_size = it.number("rank", "JOB_COMPLETION_INDEX"), it.number("world_size", "WORLD_SIZE")
    if index is None:
        return None
    if world_size is None:
        if index == 0:
            return None
        raise UsageError(
            f"JOB_COMPLETION_INDEX={index} shows that this pod is one of several, but WORLD_SIZE is not set",
            rank=index,
            hint="set WORLD_SIZE to the job's completions in the pod's env",
        )
    return Identity(
        rank=index,
        world_size=world_size,
        master_addr=it.addr(),
        master_port=it.port(),
        source="Kubernetes",
        names=("JOB_COMPLETION_INDEX", "WORLD_SIZE"),
        origins=it.origins,
    )


def read_skypilot(env: Mapping[str, str]) -> Identity | None:
    """A task of SkyPilot on several nodes: one process a node.

    Old versions tell the number of nodes by their addresses only.
    """
    it = Traces(env)
    rank, num_nodes = it.number("rank", "SKYPILOT_NODE_RANK"), it.number("num_nodes", "SKYPILOT_NUM_NODES")
    addresses = env.get("SKYPILOT_NODE_IPS", "").split()
    if num_nodes is None and addresses:
        num_nodes = it.derive("num_nodes", len(addresses), f"{len(addresses)} addresses in SKYPILOT_NODE_IPS")
    if rank is None or num_nodes is None or num_nodes < 2:
        return None
    it.origins |= {
        "world_size": f"{it.origins['num_nodes']}, one process each",
        "local_rank": "one process a node",
        "local_world_size": "one process a node",
        "node_rank": it.origins["rank"],
    }
    task = env.get("SKYPILOT_TASK_ID", "")
    return Identity(
        rank=rank, world_size=num_nodes, local_rank=0, local_world_size=1, node_rank=rank, num_nodes=num_nodes,
        master_addr=it.addr(next(iter(addresses), None), "first address of SKYPILOT_NODE_IPS"), master_port=it.port(task, "SKYPILOT_TASK_ID"),
        source="SkyPilot", names=("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"), origins=it.origins,
    )  # fmt: skip
