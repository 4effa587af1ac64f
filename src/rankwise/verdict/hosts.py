"""Where the ranks that a finding names are, in a job of several hosts: ``rank 5 (host b, local rank 1)``."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.verdict.finding import JobFinding

_MOST_HOSTS = 4


def with_hosts(finding: JobFinding, nodes: Sequence[tuple[str, range]]) -> JobFinding:
    """Return a finding whose sentence tells on which hosts its culprits run; as it is where that says nothing.

    Each node has a host's name and its ranks.
    """
    homes = [(host, ranks, own) for host, ranks in nodes if (own := [one for one in finding.culprits if one in ranks])]
    if len(nodes) < 2 or not homes:
        return finding
    hosts = list(dict.fromkeys(host for host, _, _ in homes))
    places = (
        f"host{'s' if len(hosts) > 1 else ''} {', '.join(hosts)}"
        if len(hosts) <= _MOST_HOSTS
        else f"{len(hosts)} hosts"
    )
    if len(finding.culprits) == 1:
        places += f", local rank {finding.culprits[0] - homes[0][1].start}"
    named = name_ranks(finding.culprits)
    # Not where it is the beginning of a longer list.
    text, num = re.subn(
        rf"\b{re.escape(named)}\b(?![-,] ?\d)",
        lambda match: f"{match[0]} ({places})",
        finding.message,
        count=1,
    )
    if not num:
        each = "; ".join(f"{name_ranks(own)}: host {host}" for host, _, own in homes)
        text = f"{finding.message} ({each if len(homes) <= _MOST_HOSTS else f'{named}: {places}'})"
    return replace(finding, message=text)
