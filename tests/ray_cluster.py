"""A real Ray cluster on this host, for tests: a head without CPUs, and some raylets; it lasts until standard input ends.

A line there replaces a node on which a launcher runs: another one is added, and that one is killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

# Where several tests run at once, a raylet takes its time.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_IMPORT_WARNING="1", RAY_LOG_TO_STDERR="0")


def main(port: int, num_nodes: int) -> None:
    """Start it, say so, and wait."""
    # By name: type checkers run where Ray is not installed.
    Cluster = import_module("ray.cluster_utils").Cluster
    list_actors = import_module("ray.util.state").list_actors

    # Two clusters at once on one host use each other's ports: another worker's tests wait for theirs.
    lock = os.open(Path(tempfile.gettempdir(), "rankwise-tests-ray.lock"), os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Ray writes down there which cluster was started last, and makes the folder only for clusters without a temporary folder of their own.
    Path("/tmp/ray").mkdir(exist_ok=True)
    # Short: sockets lie there, whose names may have 107 bytes.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": port, "temp_dir": folder}
    memory: dict[str, Any] = {"object_store_memory": 80 * 2**20}
    cluster: Any = None
    try:
        cluster = Cluster(initialize_head=True, head_node_args={**head, **memory})
        nodes = [cluster.add_node(num_cpus=2, **memory) for _ in range(num_nodes)]
        cluster.wait_for_nodes(timeout=120)
        print("up", flush=True)
        for _ in sys.stdin:
            nodes.append(cluster.add_node(num_cpus=2, **memory))
            actors = list_actors(address=f"http://127.0.0.1:{port}", filters=[("state", "=", "ALIVE")])
            hosts = {actor.node_id for actor in actors if actor.class_name == "NodeLauncher"}
            cluster.remove_node(next(node for node in nodes if node.node_id in hosts), allow_graceful=False)
            print("lost", flush=True)
    finally:
        if cluster is not None:
            cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
