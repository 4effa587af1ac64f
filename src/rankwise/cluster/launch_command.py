"""The command that starts the ranks of one node, whatever has given us the node."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwise.cluster.job import JobSpec

#: How lines of a rank begin on every cluster: `rankwise logs --rank` reads them by it.
PREFIX = "[${hostname} rank ${rank}]: "
RANK_LINE = re.compile(r"\[[^\]\s]+ rank (\d+)\]:")


class ShellText(str):
    """A word in which the shell is to fill in variables: ``$head:29500``."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousPlace:
    """Where the nodes of a job find each other.

    Attributes:
        endpoint: ``host:port`` of the first one.
        run_id: What only this job has.
        local_addr: Address of this node, if its name does not lead the others to it.
        nodes: How many train, as for ``--nnodes``, where the cluster has decided that; empty: as many as the job says.
    """

    endpoint: str
    run_id: str
    local_addr: str = ""
    nodes: str = ""


def join_endpoint(address: str, port: int) -> str:
    """Return ``host:port``; an address of IPv6 stands in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def build_launch(spec: JobSpec, place: RendezvousPlace | None, *, python: str) -> list[str]:
    """Return the words of `rankwise run` on a node: the same for all of them.

    Args:
        spec: The job.
        place: Where the nodes meet; None: the job has one node.
        python: The cluster's own, where the user names none.
    """
    nodes = str(spec.max_nodes) if spec.min_nodes == spec.max_nodes else f"{spec.min_nodes}:{spec.max_nodes}"
    words = [spec.python or python, "-m", "rankwise", "run"]
    if place is None:
        words.append("--standalone")
    else:
        words += [
            "--nnodes",
            place.nodes or nodes,
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            place.endpoint,
            "--rdzv-id",
            place.run_id,
        ]
        words += ["--local-addr", place.local_addr] if place.local_addr else []
    words += ["--nproc-per-node", spec.ranks_per_node, "--tee", "3", "--log-line-prefix-template", PREFIX]
    # The ranks are killed before the launcher is, which has to say why.
    words += ["--shutdown-timeout", str(max(1, spec.grace_s * 4 // 5))]
    # What the user says of the same comes later, and wins.
    return [*words, *spec.command]


def join_words(words: Iterable[str]) -> str:
    """Return words as a shell reads them; the variables of a `ShellText` are filled in."""
    return " ".join(f'"{word}"' if isinstance(word, ShellText) else shlex.quote(word) for word in words)
