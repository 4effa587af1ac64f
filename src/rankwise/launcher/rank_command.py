"""The command, environment and descriptors that one rank is started with: torchrun's, and the recorder's."""

from __future__ import annotations

import json
import os
import string
from typing import TYPE_CHECKING

from rankwise.base.environ import JOB_SECRET, RankEnv, environ
from rankwise.base.os_calls import ASK_FD, EVIDENCE_FD, IS_LINUX, NOTES_FD, STACK_SIGNAL, STACKS_FD
from rankwise.base.roles import Role
from rankwise.launcher.workers import Command
from rankwise.warm import HOOK_FOLDER

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.evidence.reader.rank_channel import RankChannel
    from rankwise.launcher.output import RankStreams
    from rankwise.launcher.rendezvous.assignment import Assignment
    from rankwise.launcher.spec import LaunchSpec, Program

#: Of all jobs of this launcher on one node; nodes of one job get theirs when they meet.
_SECRET = os.urandom(16).hex()
_RUN_PATH = "import sys, runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def build_argv(program: Program, python: str, local_rank: int) -> tuple[str, ...]:
    """Return the words of a rank's command; ``${local_rank}`` in the script's arguments is filled in."""
    args = [string.Template(arg).safe_substitute(local_rank=local_rank) for arg in program.args]
    front = {
        "script": (python, "-u", *program.flags),
        "module": (python, "-u", "-m"),
        "program": (),
        "run_path": (python, "-u", "-c", _RUN_PATH),
    }
    return (*front[program.how], program.script, *args)


def build_rank_env(
    spec: LaunchSpec,
    part: Assignment,
    *,
    local_rank: int,
    num_ranks: int,
    restart: int,
    error_file: Path | None,
    num_threads: int | None,
) -> dict[str, str | None]:
    """Return what a rank's environment has beyond ours; ``num_threads`` counts only where the user set none."""
    number = part.base_rank + local_rank
    role = spec.find_role(number) or Role(spec.role, part.base_role_rank + local_rank, part.role_world_size)
    rank = RankEnv(
        rank=number,
        local_rank=local_rank,
        world_size=part.world_size,
        local_world_size=num_ranks,
        group_rank=part.node_rank,
        group_world_size=part.num_nodes,
        role_name=role.name,
        role_rank=role.index,
        role_world_size=role.size,
        master_addr=part.master_addr,
        master_port=part.master_port,
        restart_count=restart,
        max_restarts=spec.max_restarts,
        run_id=part.run_id,
        use_agent_store=not part.rank0_serves,
        error_file=str(error_file or ""),
        signals_to_handle=",".join(spec.signals),
        local_rank_shown=0 if spec.virtual_local_rank else None,
    )
    env = {**build_shared_env(num_threads), **dict(spec.variables), **rank.to_env()}
    # To a job without roles nothing is added that a script could see.
    if spec.role_counts and not environ().get(JOB_SECRET):
        env.setdefault(JOB_SECRET, part.secret or _SECRET)
    if spec.virtual_local_rank:
        visible = environ().get("CUDA_VISIBLE_DEVICES")
        env["CUDA_VISIBLE_DEVICES"] = str(local_rank) if visible is None else visible.split(",")[local_rank]
    return env


def build_shared_env(num_threads: int | None) -> dict[str, str | None]:
    """Return what all ranks of this node have beyond our environment; libraries read some of it at their import."""
    outer = environ()
    env: dict[str, str | None] = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": outer.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if num_threads is not None:
        env["OMP_NUM_THREADS"] = outer.get("OMP_NUM_THREADS", str(num_threads))
    if os.name == "nt":
        env["USE_LIBUV"] = outer.get("USE_LIBUV", "0")
    return env


def hook_env(
    notes: int | str,
    stacks: int | str,
    identities: tuple[int, ...] = (),
    evidence: dict[str, object] | None = None,
    end_mark: bytes | None = None,
) -> dict[str, str | None]:
    """Return what makes Python arm the recorder before the script's first line."""
    orders: dict[str, object] = {
        "notes": notes,
        "stacks": stacks,
        "stack_signal": STACK_SIGNAL,
        "lifeline": None,
        "identities": identities,
        "end_mark": None if end_mark is None else end_mark.decode(),
    }
    if evidence is not None:
        orders["evidence"] = evidence
    return {"RANKWISE_RANK": json.dumps(orders), **hook_path_env()}


def hook_path_env() -> dict[str, str | None]:
    """Return what makes Python import our hook; the hook takes it away again."""
    outer = environ().get("PYTHONPATH")
    env: dict[str, str | None] = {"PYTHONPATH": os.pathsep.join([str(HOOK_FOLDER), *([outer] if outer else [])])}
    if outer == "":
        env["RANKWISE_EMPTY_PYTHONPATH"] = "1"
    return env


def build_rank_command(
    argv: tuple[str, ...],
    env: dict[str, str | None],
    streams: RankStreams,
    *,
    notes_fd: int,
    stacks_fd: int,
    evidence: RankChannel | None = None,
) -> Command:
    """Put a rank's command together; ``evidence`` is where it records its collectives, if it does."""
    if IS_LINUX:
        fds: tuple[tuple[int, int], ...] = ((NOTES_FD, notes_fd), (STACKS_FD, stacks_fd))
        found: dict[str, object] | None = None
        if evidence is not None:
            fds += tuple(zip((EVIDENCE_FD, ASK_FD), evidence.rank_fds, strict=True))
            found = {"file": EVIDENCE_FD, "asks": ASK_FD, "identities": _identify(evidence.rank_fds)}
            if streams.tell_passed is not None:
                found["passed_at"] = evidence.passed_at
        return Command(
            argv=argv,
            env={
                **env,
                **hook_env(
                    NOTES_FD,
                    STACKS_FD,
                    _identify((notes_fd, stacks_fd, streams.stdio[2])),
                    found,
                    streams.end_mark,
                ),
            },
            stdio=streams.stdio,
            extra_fds=fds,
            forks="script",
        )
    # Without a supervisor nobody moves descriptors: the recorder opens files by their names.
    notes, stacks = str(streams.folder / "notes.jsonl"), str(streams.folder / "stacks.txt")
    return Command(argv=argv, env={**env, **hook_env(notes, stacks)}, stdio=streams.stdio)


def _identify(fds: tuple[int, ...]) -> tuple[int, ...]:
    """Return device and inode of each, by which a rank knows that a number is still our file."""
    files = [os.fstat(fd) for fd in fds]
    return tuple(number for file in files for number in (file.st_dev, file.st_ino))
