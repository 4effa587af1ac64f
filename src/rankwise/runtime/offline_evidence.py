"""Has a rank leave evidence in a folder, if RANKWISE_EVIDENCE names one and no launcher of ours looks on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.environ import environ
from rankwise.evidence import offline_setup

if TYPE_CHECKING:
    from rankwise.base.identity import Identity

_armed: set[int] = set()


def leave_evidence(identity: Identity) -> None:
    """Begin to record what this process does with the others, once, if that is wanted.

    Only where it is asked for: it writes files, and a user who has not named a folder would not know of them.

    Args:
        identity: Who this process is.
    """
    env = environ()
    place = env.get(offline_setup.VARIABLE, "")
    if not place or identity.world_size < 2 or os.getpid() in _armed or not offline_setup.is_wanted(env):
        return
    _armed.add(os.getpid())
    if offline_setup.is_recorded():
        return
    try:
        prepared = offline_setup.prepare(Path(place), identity, program=sys.argv[0])
    except OSError as error:
        offline_setup.say(f"[rank {identity.rank}] no evidence is recorded: {error}")
        return
    if identity.rank == 0:
        offline_setup.say(
            f"evidence of this run is written to {prepared.folder}; if it hangs or fails: rankwise report {prepared.folder}"
        )
    offline_setup.arm(prepared)
