"""The one door to the environment, and what a rank is told through it.

The names are torchrun's, so that every script written for torchrun finds what it expects.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: What only the ranks of one job know, where its launcher, or whoever starts the job, gives it to them.
JOB_SECRET = "RANKWISE_JOB_SECRET"


def environ() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def get(name: str, default: str = "") -> str:
    """Return the variable ``name``, or ``default`` when it is not set."""
    return os.environ.get(name, default)


def is_on(name: str, *, default: bool = False, env: Mapping[str, str] | None = None) -> bool:
    """Read a switch: 0, no, false, off and the empty string mean off; anything else means on."""
    value = (os.environ if env is None else env).get(name)
    return default if value is None else value.strip().lower() not in {"", "0", "no", "false", "off"}


def read_float(name: str, default: float) -> float:
    """Return the variable ``name`` as a number of seconds above 0, or ``default`` when it is not set.

    Raises:
        UsageError: It is something else.
    """
    text = os.environ.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(
            f"{name}={text!r} is not a number of seconds above 0", hint=f"set {name} to a number, or unset it"
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """A rank's identity, in the variables of torchrun 2.13.

    Attributes:
        rank: Global rank, 0..world_size-1.
        local_rank: Rank on this node, 0..local_world_size-1.
        group_rank: Rank of the node; ``role_rank`` counts among ranks of the same role.
        restart_count: How many times the job was started again before this attempt.
        local_rank_shown: What LOCAL_RANK says: 0 for all with a virtual local rank, else ``local_rank``.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int = 0
    group_world_size: int = 1
    role_name: str = "default"
    role_rank: int
    role_world_size: int
    master_addr: str
    master_port: int
    restart_count: int = 0
    max_restarts: int = 0
    run_id: str = "none"
    use_agent_store: bool = True
    error_file: str = ""
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    local_rank_shown: int | None = None

    def to_env(self) -> dict[str, str]:
        """Return the variables in torchrun's names."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank if self.local_rank_shown is None else self.local_rank_shown),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.group_rank),
            "GROUP_WORLD_SIZE": str(self.group_world_size),
            "ROLE_NAME": self.role_name,
            "ROLE_RANK": str(self.role_rank),
            "ROLE_WORLD_SIZE": str(self.role_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self.restart_count),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": str(self.use_agent_store),
            "TORCHELASTIC_ERROR_FILE": self.error_file,
            "TORCHELASTIC_SIGNALS_TO_HANDLE": self.signals_to_handle,
        }
