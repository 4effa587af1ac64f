"""Whether a GPU is being slowed down by heat or by its power supply.

**Why it matters.** All ranks wait for the slowest one at each step. One GPU that has to slow down, because its fan or its power supply fails, makes
a job of a thousand slow, without an error anywhere.

**How it is checked.** The driver says for each GPU whether heat, the power supply or the board slow it down at this moment. The power limits of GPUs
of one model are compared on the host and between hosts. A GPU at its power limit under load is not a fault.

**What to do.** Look at cooling and power; set the same power limit everywhere (`nvidia-smi -pl`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rankwise.doctor.differences import group_hosts, report_difference
from rankwise.doctor.gpu.nvidia import query, query_nvidia, to_int
from rankwise.doctor.host import Host
from rankwise.doctor.probe import Facts, Probe, Reading, ok, skipped, warn

_REASONS = {
    "hw_thermal_slowdown": "it is too hot", "sw_thermal_slowdown": "it is too hot", "hw_power_brake_slowdown": "the power supply asks for it",
    "hw_slowdown": "heat or power",
}  # fmt: skip


def look(host: Host) -> Iterator[Reading]:
    nvidia = host.ask(query_nvidia)
    if not nvidia.gpus:
        yield nvidia.skip()
        return
    info = _query_reasons(host)
    if not info:
        yield skipped(
            "this driver does not report what slows a GPU down", "`nvidia-smi --query-gpu` knows none of the fields",
        )  # fmt: skip
        return
    why, found = "all ranks wait for it at each step", list[Reading]()
    for index, values in info.items():
        reason = next((words for name, words in _REASONS.items() if values.get(name) == "Active"), "")
        if reason:
            what = f"GPU {index} is slowed down at this moment ({reason}), {values['temperature.gpu']} °C"
            fix = f"nvidia-smi -i {index} -q -d PERFORMANCE,TEMPERATURE,POWER"
            found.append(warn(what, why, fix))
    limits = {one.index: to_int(info.get(one.index, {}).get("power.limit", "")) for one in nvidia.gpus}
    # In the order of the limits: the last one of a model is its highest.
    highest = {one.name: limits[one.index] for one in sorted(nvidia.gpus, key=lambda one: limits[one.index])}
    for one in nvidia.gpus:
        if 0 < limits[one.index] < 0.95 * highest[one.name]:
            what = f"GPU {one.index} may use {limits[one.index]} W, others of its model here {highest[one.name]} W"
            fix = f"sudo nvidia-smi -i {one.index} -pl {highest[one.name]}"
            found.append(warn(what, why, fix))
    power = ", ".join(f"{name}: {watts} W" for name, watts in sorted(highest.items()))
    yield from found or [ok(f"no GPU is slowed down; power limits {power}", power=power)]


def compare(facts: Mapping[str, Facts]) -> Iterator[Reading]:
    values = group_hosts(facts, "power")
    if len({tuple(part.rpartition(":")[0] for part in value.split(", ")) for value in values}) == 1:
        why = "all ranks wait for the slowest GPU at each step"
        fix = "sudo nvidia-smi -pl …  # the same on all hosts"
        yield from report_difference(facts, "power", "the power limits of the GPUs differ", why, fix)


def _query_reasons(host: Host) -> dict[int, dict[str, str]]:
    # The first name is that of drivers since 535, the second of those before.
    for prefix in ("clocks_event_reasons.", "clocks_throttle_reasons."):
        info = query(host, "temperature.gpu", "power.limit", *(prefix + name for name in _REASONS))
        if info:
            short = {prefix + name: name for name in _REASONS}
            return {at: {short.get(name, name): one for name, one in row.items()} for at, row in info.items()}
    return {}


PROBE = Probe("gpu-throttle", "GPUs slowed down by heat or power", "gpu", "slow", look, compare=compare)
