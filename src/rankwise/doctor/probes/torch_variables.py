"""The variables of torch: names, values, and what is left over from debugging.

**Why it matters.** `CUDA_LAUNCH_BLOCKING=1` and `TORCH_DISTRIBUTED_DEBUG=DETAIL` find faults, and make every step slow for as long as they
are set; with DETAIL, torch 2.13 without CUDA crashes when a model is wrapped in DistributedDataParallel. A wrong value of
`TORCH_DISTRIBUTED_DEBUG` ends every program that imports torch.distributed. A misspelt `TORCH_NCCL_...` silently does nothing.

**How it is checked.** The environment is compared with the names and values that torch 2.13 reads.

**What to do.** Unset the variable, or spell it as reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rankwise.doctor.host import Host
from rankwise.doctor.network.gloo_nccl import uses_nccl
from rankwise.doctor.probe import Probe, Reading, Verdict, ok
from rankwise.doctor.variables.table import report_misspellings

_OURS = re.compile(r"TORCH_(NCCL|DISTRIBUTED|DIST|CPP_LOG|GLOO)_|(CUDA_LAUNCH_BLOCKING|USE_LIBUV|OMP_NUM_THREADS)$")
_ON = r"\s*(1|true|yes|on|y)\s*"
#: A variable, the pattern of a value that is wrong or slow (in any case), how bad that is, what stands behind the
#: value, what comes of it, the fix.
_RULES: tuple[tuple[str, str, Verdict, str, str, str], ...] = (
    (
        "TORCH_DISTRIBUTED_DEBUG", r"(?!(OFF|INFO|DETAIL)$).+", "fail", " is not one of OFF, INFO, DETAIL",
        "importing torch.distributed fails: `The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL.`", "unset",
    ), (
        "TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warn", "",
        "every collective is compared among all ranks first: slow; and torch 2.13 without CUDA crashes in DistributedDataParallel", "unset",
    ), (
        "TORCH_CPP_LOG_LEVEL", r"(?!(INFO|WARNING|ERROR|FATAL|[0-3])$).+", "warn", " is not one of INFO, WARNING, ERROR, FATAL",
        "torch warns, and continues without it", "export TORCH_CPP_LOG_LEVEL=INFO",
    ),
    ("CUDA_LAUNCH_BLOCKING", _ON, "warn", "", "every kernel launch is synchronous: training is slow, and collectives never overlap with the backward", "unset"),
    ("NCCL_BLOCKING_WAIT", _ON, "warn", "", "every collective blocks: slow", "unset"),
    ("NCCL_ASYNC_ERROR_HANDLING", r"\s*0\s*", "warn", "", "no timeout ends a collective: when a rank is gone, the others wait forever", "unset"),
    *(
        (name, r"(?!\s*0*[1-9]\d*\s*(,\s*0*[1-9]\d*\s*)*$).*\S.*", "warn", " is not a number above 0", "it is ignored, and each rank starts as many threads as the host has cores", "unset")
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    ),
)  # fmt: skip


def look(host: Host) -> Iterator[Reading]:
    wrong = [*report_misspellings(host.env, prefixes=("TORCH_",)), *_judge_values(host)]
    info = ", ".join(f"{name}={value}" for name, value in sorted(host.env.items()) if _OURS.match(name))
    yield from wrong or [ok(info or "no variable of torch.distributed is set")]


def _judge_values(host: Host) -> Iterator[Reading]:
    for known, pattern, verdict, remark, why, fix in _RULES:
        # torch reads the old name, NCCL_..., where the new one is not set.
        is_switch = known.startswith("NCCL_")
        name = f"TORCH_{known}" if is_switch and f"TORCH_{known}" in host.env else known
        value = host.env.get(name, "")
        if re.fullmatch(pattern, value, re.IGNORECASE) and (not is_switch or uses_nccl(host)):
            yield Reading(
                verdict, f"{name}={value.strip()}{remark}", why, f"unset {name}" if fix == "unset" else fix, "X17" if "threads" in why else ""
            )  # fmt: skip


PROBE = Probe("torch-variables", "variables of torch", "environment", "instant", look)
