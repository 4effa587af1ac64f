"""The variables of torch: names, values, and what is left over from debugging.

**Why it matters.** `CUDA_LAUNCH_BLOCKING=1` and `TORCH_DISTRIBUTED_DEBUG=DETAIL` find faults, and make every step slow for as long as they
are set; with DETAIL, torch 2.13 without CUDA crashes when a model is wrapped in DistributedDataParallel. A wrong value of
`TORCH_DISTRIBUTED_DEBUG` ends every program that imports torch.distributed. A misspelt `TORCH_NCCL_...` silently does nothing.

**How it is checked.** The environment is compared with the names and values that torch 2.13 reads.

**What to do.** Unset the variable, or spell it as reported.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankwise.doctor.network.gloo_nccl import uses_nccl
from rankwise.doctor.probe import Probe, Reading, ok
from rankwise.doctor.variables.table import report_misspellings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.doctor.host import Host

_OURS = re.compile(
    r"TORCH_(NCCL|DISTRIBUTED|DIST|CPP_LOG|GLOO)_|(CUDA_LAUNCH_BLOCKING|USE_LIBUV|OMP_NUM_THREADS)$"
)
_DEBUG = ("OFF", "INFO", "DETAIL")
_LOG = ("INFO", "WARNING", "ERROR", "FATAL", "0", "1", "2", "3")


def look(host: Host) -> Iterator[Reading]:
    """Report what torch is told, and what of it is wrong or slow."""
    wrong = report_misspellings(host.env, prefixes=("TORCH_",))
    wrong += [one for check in (_judge_debugging, _judge_waiting, _judge_threads) for one in check(host)]
    info = ", ".join(f"{name}={value}" for name, value in sorted(host.env.items()) if _OURS.match(name))
    yield from wrong or [ok(info or "no variable of torch.distributed is set")]


def _judge_debugging(host: Host) -> Iterator[Reading]:
    debug, log = host.env.get("TORCH_DISTRIBUTED_DEBUG", ""), host.env.get("TORCH_CPP_LOG_LEVEL", "")
    if debug and debug.upper() not in _DEBUG:
        yield Reading(
            verdict="fail", what=f"TORCH_DISTRIBUTED_DEBUG={debug} is not one of {', '.join(_DEBUG)}", fix="unset TORCH_DISTRIBUTED_DEBUG",
            why="importing torch.distributed fails: `The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL.`",
        )  # fmt: skip
    if debug.upper() == "DETAIL":
        yield Reading(
            verdict="warn", what=f"TORCH_DISTRIBUTED_DEBUG={debug}", fix="unset TORCH_DISTRIBUTED_DEBUG",
            why="every collective is compared among all ranks first: slow; and torch 2.13 without CUDA crashes in DistributedDataParallel",
        )  # fmt: skip
    if log and log.upper() not in _LOG:
        yield Reading(
            verdict="warn", what=f"TORCH_CPP_LOG_LEVEL={log} is not one of {', '.join(_LOG[:4])}", why="torch warns, and continues without it",
            fix="export TORCH_CPP_LOG_LEVEL=INFO",
        )  # fmt: skip
    if _is_on(host, "CUDA_LAUNCH_BLOCKING"):
        yield Reading(
            verdict="warn", what=f"CUDA_LAUNCH_BLOCKING={host.env['CUDA_LAUNCH_BLOCKING']}", fix="unset CUDA_LAUNCH_BLOCKING",
            why="every kernel launch is synchronous: training is slow, and collectives never overlap with the backward",
        )  # fmt: skip


def _judge_waiting(host: Host) -> Iterator[Reading]:
    wait, handling = (_find_name(host, name) for name in ("BLOCKING_WAIT", "ASYNC_ERROR_HANDLING"))
    if not {wait, handling} & set(host.env) or not uses_nccl(host):
        return
    if _is_on(host, wait):
        yield Reading(
            verdict="warn", what=f"{wait}={host.env[wait]}", why="every collective blocks: slow", fix=f"unset {wait}"
        )  # fmt: skip
    if host.env.get(handling, "").strip() == "0":
        yield Reading(
            verdict="warn", what=f"{handling}=0", fix=f"unset {handling}",
            why="no timeout ends a collective: when a rank is gone, the others wait forever",
        )  # fmt: skip


def _find_name(host: Host, name: str) -> str:
    """Return the name by which torch reads a switch: the old one, NCCL_..., counts where the new one is not set."""
    old, new = f"NCCL_{name}", f"TORCH_NCCL_{name}"
    return old if old in host.env and new not in host.env else new


def _judge_threads(host: Host) -> Iterator[Reading]:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = host.env.get(name, "").strip()
        if value and not all(part.strip().isdecimal() and int(part) > 0 for part in value.split(",")):
            yield Reading(
                verdict="warn", what=f"{name}={value} is not a number above 0", class_id="X17",
                why="it is ignored, and each rank starts as many threads as the host has cores", fix=f"unset {name}",
            )  # fmt: skip


def _is_on(host: Host, name: str) -> bool:
    return host.env.get(name, "").strip().lower() in {"1", "true", "yes", "on", "y"}


PROBE = Probe("torch-variables", "variables of torch", "environment", "instant", look)
