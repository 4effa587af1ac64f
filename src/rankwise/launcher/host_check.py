"""What the doctor says of this host, beside a run: above it, what will surely break it; below a failed one, what fits the failure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, final

from rankwise.base.environ import is_on

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.doctor.host import Host
    from rankwise.launcher.console import Console
    from rankwise.launcher.spec import LaunchSpec
    from rankwise.verdict.case import Verdict


@final
class HostCheck:
    """Asks the doctor about the host of one launch; RANKWISE_DOCTOR=0 keeps it silent.

    Args:
        spec: What is launched.
        num_ranks: Ranks on this host.
        python: The interpreter of the ranks.
    """

    def __init__(self, spec: LaunchSpec, num_ranks: int, python: str) -> None:
        self._spec, self._num_ranks, self._python = spec, num_ranks, python
        self._is_on = is_on("RANKWISE_DOCTOR", default=True)

    def tell_before(self, console: Console) -> None:
        """Say above the run what will surely break it; it stops nothing."""
        if not self._is_on:
            return
        from rankwise.doctor.at_launch import look_before  # noqa: PLC0415 - beside the import of torch
        from rankwise.doctor.probe import first_step  # noqa: PLC0415

        for one in look_before(self._host()):
            why = f"; {one.why}" if one.why else ""
            fix = first_step(one.fix)
            console.say(
                f"rankwise: {one.what}{why}"
                + (f"\n  -> {fix}" if fix else "")
                + f"\n  -> more: rankwise rule {one.probe}"
            )

    def find_host_problems(self) -> tuple[str, ...]:
        """Return, while a job hangs or fails, what any job dies of on this host, as sentences."""
        if not self._is_on:
            return ()
        from rankwise.doctor.at_launch import find_host_problems, format_readings  # noqa: PLC0415 - most runs never fail

        return format_readings(find_host_problems(self._host(is_running=True)))

    def find_obstacles(self) -> tuple[str, ...]:
        """Return, while other nodes are waited for, what on this host keeps nodes apart, as sentences; a few seconds at most."""
        if not self._is_on:
            return ()
        from rankwise.doctor.at_launch import format_readings, look_after  # noqa: PLC0415 - most nodes meet at once

        found = format_readings(look_after(self._host(is_running=True), class_id="I3"))
        # The doctor speaks of the variable; what this job was given is a flag.
        is_static = self._spec.rendezvous.backend == "static"
        return found if is_static else tuple(one.replace("export MASTER_ADDR=", "--rdzv-endpoint ") for one in found)

    def add_to(self, verdict: Verdict, host_problems: Sequence[str]) -> Verdict:
        """Return the verdict on a job that has ended with what the hosts' state adds to it.

        Args:
            verdict: What happened.
            host_problems: What was found while the ranks still lived, here and, with their names, on other hosts.
        """
        if not self._is_on or verdict.kind in {"ok", "requeue"} or verdict.stopped_by is not None:
            return verdict
        from rankwise.doctor.at_launch import format_readings, look_after  # noqa: PLC0415 - most runs never fail

        text = " ".join((verdict.message, verdict.reason, *host_problems))
        now = format_readings(look_after(self._host(is_running=True), class_id=verdict.class_id, reported=text))
        notes = tuple(f"also: {one}" for one in dict.fromkeys((*host_problems, *now)) if not _is_reported(one, verdict))
        return replace(verdict, notes=(*verdict.notes, *notes))

    def _host(self, *, is_running: bool = False) -> Host:
        """Return the host; what ranks that run have taken already is not asked for once more."""
        from rankwise.doctor.at_launch import make_host  # noqa: PLC0415 - most runs never fail
        from rankwise.doctor.host import JobShape  # noqa: PLC0415

        spec, is_static = self._spec, self._spec.rendezvous.backend == "static"
        place, _, port = spec.rendezvous.endpoint.rpartition(":")
        return make_host(
            JobShape(
                num_ranks=None if is_running else self._num_ranks, num_nodes=spec.max_nodes, python=self._python, is_launch=True,
                master_addr=(spec.master_addr or "") if is_static else place,
                master_port=spec.master_port if is_static else int(port) if port.isdecimal() else None,
                is_master=spec.node_rank == 0 if is_static and spec.max_nodes > 1 else None,
            )
        )  # fmt: skip


def _is_reported(sentence: str, verdict: Verdict) -> bool:
    """Tell whether the verdict's reason says it already: of /dev/shm it knows itself."""
    return "/dev/shm" in verdict.reason and sentence.startswith("/dev/shm")
