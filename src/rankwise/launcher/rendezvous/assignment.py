"""What a rendezvous gives: which ranks are ours, and where all ranks find their store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from rankwise.launcher.node_link import NodeLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """This node's part in one attempt.

    Attributes:
        base_rank: Global rank of our first rank; the others follow.
        listener: The socket that our store process must serve; None if the store is served elsewhere.
        rank0_serves: Whether rank 0 must serve the store itself, as without a launcher.
        secret: That the ranks of all nodes get, where ranks have roles; empty elsewhere, and on one node.
        has_come_anew: Whether the others have met without this node, which joined them later, or it waited for more
            that it could not reach.
        link: To the launchers of other nodes, for what their ranks do; None if there are none, or we watch nothing.
    """

    node_rank: int = 0
    num_nodes: int = 1
    base_rank: int = 0
    world_size: int
    base_role_rank: int = 0
    role_world_size: int
    master_addr: str
    master_port: int
    run_id: str
    listener: socket.socket | None = None
    rank0_serves: bool = False
    secret: str = ""
    has_come_anew: bool = False
    link: NodeLink | None = None


class NotNeeded(Exception):  # noqa: N818 - no error: all places were taken until the end of the job
    """This node has stood by, and the job has ended."""


class Rendezvous(Protocol):
    """A way for nodes to meet."""

    @property
    def run_id(self) -> str:
        """Name of the job."""

    def join(self, restart: int) -> Assignment:
        """Meet, and return our part; called again after every failure.

        Raises:
            RendezvousError: The others did not come, or the place can't be reached.
            NotNeeded: The job is over, and this node was never one too few.
        """

    def nodes_waiting(self) -> int:
        """Return how many nodes want to join."""

    def has_to_regroup(self) -> bool:
        """Whether all ranks have to restart for nodes that join."""

    def nodes_standing_by(self) -> int:
        """Return how many nodes wait for the place of one that is lost."""

    def finish(self, on_tick: Callable[[], None] | None = None) -> bool:
        """Wait until all nodes are through.

        Args:
            on_tick: Called many times a second meanwhile; what it raises ends the wait.

        Returns:
            Whether all are.
        """

    def close(self) -> None:
        """Leave the rendezvous for good."""
