"""The node that serves the rendezvous is lost, and started again, before the nodes have met for the first time."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from torch.distributed import TCPStore

from rankwise.base.clock import SystemClock
from rankwise.launcher.command import parse
from rankwise.launcher.helper import Helper
from rankwise.launcher.rendezvous.multi_node import SeveralNodes
from support import free_port, make_env, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.launcher.console import Console
    from rankwise.launcher.signals import Signals

pytestmark = [pytest.mark.linux, pytest.mark.slow]

#: Serves the rendezvous, meets the others, and is gone before ranks are numbered.
MEETS_AND_DIES = """
import os, sys
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
registry.get_rendezvous_handler(
    RendezvousParameters("c10d", f"localhost:{sys.argv[1]}", "first", 2, 2, is_host="1")
).next_rendezvous()
os._exit(0)
"""


class Node:
    """One launcher's way into the rendezvous, up to the numbers of its ranks.

    Args:
        backend: torch's rendezvous.
        port: Where the nodes meet.
        script: What they run.
        serves: Whether this node's host is the one that serves.

    Attributes:
        lines: What it has said.
        assignment: What it has got.
    """

    def __init__(self, backend: str, port: int, script: Path, *, serves: bool) -> None:
        words = ["--nnodes", "2", "--node-rank", str(1 - serves), "--rdzv-backend", backend, "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "first"]  # fmt: skip
        self._spec = parse([*words, "--rdzv-conf", f"is_host={int(serves)}", str(script)])
        self.helper = Helper(sys.executable, cast("Signals", SimpleNamespace(has_pending=False)), SystemClock())  # fmt: skip
        self.lines: list[str] = []
        self.assignment: Any = None
        self.error: Exception | None = None
        threading.Thread(target=self._join, daemon=True).start()

    def _join(self) -> None:
        try:
            console = cast("Console", SimpleNamespace(say=self.lines.append))
            self.assignment = SeveralNodes(self._spec, 1, self.helper, console, lambda: ()).join(0)
        except Exception as error:  # noqa: BLE001 - shown by the test
            self.error = error

    def has_said(self, text: str) -> bool:
        """Tell whether a line says so; its error is the test's."""
        return any(text in line for line in self.check().lines)

    def check(self) -> Node:
        """Raise its error, if it has one."""
        if self.error is not None:
            raise self.error
        return self


def _is_waiting(store: TCPStore, backend: str) -> bool:
    if backend == "static":
        return store.check(["first/torchelastic/role_info/1"])
    key = "torch.rendezvous.first"
    return store.check([key]) and len(store.get(key)) > 100


def _list_assignments(nodes: list[Node]) -> list[Any]:
    """Return those of all; nothing before each has one."""
    found = [node.assignment for node in nodes if node.check().assignment is not None]
    return found if len(found) == len(nodes) else []


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_the_others_wait_until_it_is_there_again(backend: str, tmp_path: Path) -> None:
    """It goes while they wait for more nodes, then when all have met and no rank has its number: they meet where it serves anew, each of them once."""
    script, port = tmp_path / "train.py", free_port()
    script.touch()
    # Nodes of a static rendezvous go on to their numbers as soon as the store is there.
    was_lost = "before the nodes had met" if backend == "c10d" else "before all ranks were numbered"
    nodes: list[Node] = []
    store: Any = TCPStore("localhost", port, 2, is_master=True, wait_for_workers=False)
    try:
        nodes.append(Node(backend, port, script, serves=False))
        wait_until(lambda: _is_waiting(store, backend), 30, "a node that waits")
        store = None
        wait_until(lambda: nodes[0].has_said(was_lost), 30, "it sees the loss")
        if backend == "c10d":
            subprocess.run([sys.executable, "-c", MEETS_AND_DIES, str(port)], env=make_env(), timeout=60, check=True)  # fmt: skip
            # Or once more before it had met, if that was a moment sooner.
            wait_until(lambda: str(nodes[0].lines).count("was lost before") == 2, 60, "it sees the next")
        nodes.append(Node(backend, port, script, serves=True))
        assignments = wait_until(lambda: _list_assignments(nodes), 60, "both have met")
        assert sorted((one.base_rank, one.world_size) for one in assignments) == [(0, 2), (1, 2)]
        if backend == "c10d":  # torch gives all of them the port that the first one's launcher holds
            (served,) = (one.listener for one in assignments if one.listener is not None)
            assert [one.master_port for one in assignments] == [served.getsockname()[1]] * 2
    finally:
        for node in nodes:
            with contextlib.suppress(OSError):
                node.helper.close()
            if node.assignment is not None and node.assignment.listener is not None:
                node.assignment.listener.close()
