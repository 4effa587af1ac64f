"""The variables of torch: names, values, and what is left over from debugging.

**Why it matters.** `CUDA_LAUNCH_BLOCKING=1` and `TORCH_DISTRIBUTED_DEBUG=DETAIL` find faults, and make every step slow for as long as they
are set; with DETAIL, torch 2.13 without CUDA crashes when a model is wrapped in DistributedDataParallel. A wrong value of
`TORCH_DISTRIBUTED_DEBUG` ends every program that imports torch.distributed. A misspelt `TORCH_NCCL_...` silently does nothing.

**How it is checked.** The environment is compared with the names and values that torch 2.13 reads.

**What to do.** Unset the variable, or spell it as reported.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from rankwise.doctor.network.nccl import uses_nccl
from rankwise.doctor.probe import Probe
from rankwise.doctor.reading import Reading, ok

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.doctor.host import Host

_NCCL = """ASYNC_ERROR_HANDLING AVOID_RECORD_STREAMS BCAST_UNIQUEID BLOCKING_WAIT COORD_CHECK_MILSEC CUDA_EVENT_CACHE DEBUG_INFO_TEMP_FILE
    DEBUG_INFO_PIPE_FILE DESYNC_DEBUG DUMP_ON_TIMEOUT ENABLE_MONITORING ENABLE_TIMING EXTRA_DUMP_ON_EXEC HEARTBEAT_TIMEOUT_SEC HIGH_PRIORITY
    LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN NAN_CHECK NONBLOCKING_TIMEOUT PROPAGATE_ERROR RANKS_PER_ROOT RETHROW_CUDA_ERRORS SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING
    TRACE_BUFFER_SIZE TRACE_CPP_STACK USE_COMM_NONBLOCKING USE_TENSOR_REGISTER_ALLOCATOR_HOOK WAIT_TIMEOUT_DUMP_MILSEC"""
_KNOWN = [f"TORCH_NCCL_{name}" for name in _NCCL.split()] + [
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_DIST_INIT_BARRIER", "TORCH_GLOO_LAZY_INIT", "TORCH_FR_BUFFER_SIZE",
    "TORCH_FR_CPP_STACK", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_DISTRIBUTED_USE_TORCHCOMMS",
]  # fmt: skip
_OURS = re.compile(r"TORCH_(NCCL|DISTRIBUTED|DIST|CPP_LOG|GLOO)_")
_DEBUG = ("OFF", "INFO", "DETAIL")
_LOG = ("INFO", "WARNING", "ERROR", "FATAL", "0", "1", "2", "3")


def look(host: Host) -> Iterator[Reading]:
    """Tell what torch is told, and what of it is wrong or slow."""
    names = [
        name
        for name in sorted(host.env)
        if _OURS.match(name) or name in {"CUDA_LAUNCH_BLOCKING", "USE_LIBUV", "OMP_NUM_THREADS"}
    ]
    told = (
        ", ".join(f"{name}={host.env[name]}" for name in names) or "no variable of torch.distributed is set"
    )
    wrong = [*_judge_spelling(host), *_judge_debugging(host), *_judge_waiting(host), *_judge_threads(host)]
    yield from wrong or [ok(told)]


def _judge_spelling(host: Host) -> Iterator[Reading]:
    for name in sorted(host.env):
        near = (
            difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.9)
            if _OURS.match(name) and name not in _KNOWN
            else []
        )
        if near and near[0].count("_") == name.count("_"):
            yield Reading(
                verdict="warn", what=f"{name}={host.env[name]}: torch knows no such variable; did you mean {near[0]}?",
                why="torch ignores it silently", fix=f"unset {name}; export {near[0]}={host.env[name]}",
            )  # fmt: skip


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


PROBE = Probe(
    id="torch-variables", title="variables of torch", topic="environment", speed="instant", look=look
)
