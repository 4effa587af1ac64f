"""The probes that a launcher runs: before the start those that take no time, after a failure or a hang those that fit it.

A launcher says only what is surely wrong. What may be right on some hosts is for `rankwise doctor` to tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rankwise.doctor import registry
from rankwise.doctor.examine import examine
from rankwise.doctor.host import Host, JobShape
from rankwise.doctor.probe import Reading, first_step
from rankwise.doctor.torch_facts import TorchFacts, query_torch

#: Asked before each start: they read some files.
_BEFORE = ("disk-space", "shared-memory")
#: And these if a variable begins so: without one they have nothing to say, and importing them takes longer than asking.
#: Names and firewalls are not asked at all: that takes time, and several nodes may be played by one host.
_BEFORE_IF_SET = {
    "gloo-variables": ("GLOO_",),
    "launcher-variables": ("SLURM_STEP", "PET_", "PMI", "OMPI_", "MPI_", "CUDA_VISIBLE_DEVICES", "ACCELERATE_", "JOB_COMPLETION_INDEX"),
    "nccl-variables": ("NCCL_",),
    "torch-variables": ("TORCH_", "PYTORCH_"),
}  # fmt: skip
#: What any job dies of, whatever it says itself.
_VITAL = ("disk-space", "memory", "shared-memory")
#: What may stand behind a failure of a class, beside that class itself: ranks that do not come may have been kept away.
_BEHIND: dict[str, tuple[str, ...]] = {
    "I1": ("I2", "I3", "I4", "I5", "I6", "I8", "I22", "I24"),
    "I2": ("I3", "I4", "I5", "I8", "I9", "I22"),
    "I5": ("I6", "I8"),
    "I7": ("I8", "R11"),
    "I9": ("R5",),
    "R3": ("X16",),
    "R9": ("I7", "I8", "R11", "R12", "R13"),
    "R10": ("I5", "I6", "I8"),
}
#: Nobody waits longer for the doctor than this, before the start and at the end.
_MOST_BEFORE_S, _MOST_AFTER_S = 0.5, 5.0


def make_host(job: JobShape, env: Mapping[str, str] | None = None) -> Host:
    """Return this host as a launcher looks at it, with its ranks' environment: torch is not asked, as importing it takes a second."""
    return Host(job=job, env=env, answers={query_torch: TorchFacts(python=job.python, why="not asked")})


def look_before(host: Host) -> list[Reading]:
    """Return what will surely break the job that is about to start; milliseconds."""
    asked = [name for name, heads in _BEFORE_IF_SET.items() if any(one.startswith(heads) for one in host.env)]
    found = examine(host, registry.find(*_BEFORE, *asked), most_s=_MOST_BEFORE_S)
    return [one for one in found if one.verdict == "fail"]


def look_after(host: Host, *, class_id: str | None, reported: str = "") -> list[Reading]:
    """Return what is wrong with the host that fits how a job has failed, or hangs; a few seconds at most.

    What surely breaks jobs; and what is doubtful, if it leads to the verdict's failure class or to one that may stand
    behind it. What the verdict says already (``reported``) is not said again.
    """
    classes = {class_id, *_BEHIND.get(class_id, ())} if class_id else set[str]()
    probes = [it for it in registry.all_probes() if it.id in _VITAL or (it.look and classes & {*it.classes})]
    found = examine(host, probes, most_s=_MOST_AFTER_S)
    bad = [it for it in found if it.verdict == "fail" or (it.verdict == "warn" and it.class_id in classes)]
    return [one for one in bad if one.what not in reported]


def find_host_problems(host: Host) -> list[Reading]:
    """Return what any job dies of on this host; milliseconds, so that it can be asked while a job hangs."""
    found = examine(host, registry.find(*_VITAL), most_s=_MOST_BEFORE_S)
    return [one for one in found if one.verdict == "fail"]


def format_readings(readings: Iterable[Reading]) -> tuple[str, ...]:
    """Return readings as sentences with the way out, for a report."""
    steps = ((one.what, first_step(one.fix)) for one in readings)
    return tuple(what + f" -> {step}" * bool(step) for what, step in steps)
