"""A real Ray cluster on this host, for tests: a head without CPUs, and some raylets; it lasts until standard input ends."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from typing import Any

# Where several tests run at once, a raylet takes its time.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_IMPORT_WARNING="1", RAY_LOG_TO_STDERR="0")


def main(port: int, num_nodes: int) -> None:
    """Start it, say so, and wait."""
    from ray.cluster_utils import Cluster

    # Short: sockets lie there, whose names may have 107 bytes.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": port, "temp_dir": folder}
    memory: dict[str, Any] = {"object_store_memory": 80 * 2**20}
    cluster: Any = None
    try:
        cluster = Cluster(initialize_head=True, head_node_args={**head, **memory})
        for _ in range(num_nodes):
            cluster.add_node(num_cpus=2, **memory)
        cluster.wait_for_nodes(timeout=120)
        print("up", flush=True)
        sys.stdin.read()
    finally:
        if cluster is not None:
            cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
