"""The command that ranks are started with, and what all of them find in their environment: the node's, and the recorder's."""

from __future__ import annotations

import json
import os
import string
from typing import TYPE_CHECKING

from rankwise.base.environ import environ
from rankwise.base.os_calls import STACK_SIGNAL
from rankwise.warm import HOOK_FOLDER

if TYPE_CHECKING:
    from rankwise.launcher.spec import Program

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
