"""The attempts of a launch: meet, start, watch, decide; again, or the report and the exit code."""

from __future__ import annotations

import errno
import itertools
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.base.errors import LaunchError, RankwiseError
from rankwise.launcher.attempt import Attempt, Outcome
from rankwise.launcher.helper import InterruptedByUser
from rankwise.launcher.job import drop_folder
from rankwise.launcher.node_link import EndedElsewhere
from rankwise.launcher.output import relay_in_background
from rankwise.launcher.publish import is_silent, publish, save_evidence
from rankwise.launcher.rendezvous.assignment import NotNeeded
from rankwise.launcher.rendezvous.multi_node import SeveralNodes
from rankwise.launcher.rendezvous.single_node import SingleNode
from rankwise.launcher.restart_policy import decide, to_failure

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from rankwise.launcher.console import Console
    from rankwise.launcher.helper import Helper
    from rankwise.launcher.host_check import HostCheck
    from rankwise.launcher.job import Job
    from rankwise.launcher.rendezvous.assignment import Assignment, Rendezvous
    from rankwise.launcher.restart_policy import Failure
    from rankwise.launcher.spec import LaunchSpec
    from rankwise.launcher.warm_start import Host
    from rankwise.verdict.case import Case, Verdict

    class Publish(Protocol):
        """Tells the world how an attempt ended, as ``publish`` does."""

        def __call__(
            self, job: Job, verdict: Verdict, *, attempt: int, reason: str = "", is_final: bool = True
        ) -> None:
            """Take the verdict on an attempt."""


#: What a job on workers that outlive it leaves behind gets so long to end by itself.
_SWEEP_S = 1.0
#: A node that waits to join is known to all launchers within so long: torch keeps its state for a second.
_JOIN_S, _SOON_S = 2.5, 0.05
#: A host may be lost so often within so long; then each loss counts as a failure.
_MOST_LOSSES, _OF_LATE_S = 3, 600.0


def open_rendezvous(
    spec: LaunchSpec, host: Host, helper: Helper | None, console: Console, host_check: HostCheck | None = None
) -> Rendezvous:
    """Return where the nodes of a job meet; ``host_check`` says, while they don't, what may keep them apart here."""
    if spec.is_one_node or helper is None:
        return SingleNode(spec, host.num_ranks, rank0_serves=host.interpreter.torch_version is None)
    find_causes = (lambda: ()) if host_check is None else host_check.find_obstacles
    return SeveralNodes(spec, host.num_ranks, helper, console, find_causes)


def run_attempts(job: Job, publish: Publish = publish) -> int:
    """Run a job until it is through, or until another attempt is not allowed or would not help.

    Args:
        job: What to run.
        publish: Takes the verdict on each attempt that ends the job, or that failed.

    Returns:
        The exit code: 0, 75 for a requeue, or the first cause's.
    """
    failures: list[Failure] = []
    # Of all ranks: the same number on all nodes, where each counts the failures of its own ranks.
    restarts = 0
    losses: dict[str, list[float]] = {}
    for index in itertools.count():
        part = _join(job, restarts, is_first=not index)
        if part is None:
            return 0
        if part.has_come_anew:  # it was this node that was cut off, and not the hosts that it lost
            losses = {host: times for host, times in losses.items() if not host}
        outcome = _run_attempt(job, part, index=index, restarts=restarts, failures=failures)
        from rankwise.verdict.first_failure import judge  # noqa: PLC0415 - not before the ranks' start

        case, verdict = outcome.case, judge(outcome.case)
        save_evidence(job, case, verdict)
        is_through = (verdict.kind in {"ok", "requeue"} or is_silent(verdict)) and not outcome.regroup
        case = _hear_others(job, outcome, verdict, is_through=is_through)
        if case is not outcome.case:
            verdict = judge(case)
            save_evidence(job, case, verdict)
        if is_through and not case.hung and not case.elsewhere:
            job.rendezvous.close()
            publish(job, verdict, attempt=index)
            _leave(job, outcome, verdict, restarts=len(failures))
            return verdict.exit_code
        why = _find_regroup(job, part, replace(outcome, case=case), verdict)
        if why and _are_rare(case, losses, job.clock.monotonic()):
            job.console.say(f"rankwise: {why}")
            job.events.write("nodes.regroup", attempt=index, message=why)
            continue
        failures.append(to_failure(verdict, lasted_s=outcome.lasted_s))
        if (reason := _decide(job, part, case, failures)) is not None:
            if job.host_check is not None:
                verdict = job.host_check.add_to(verdict, outcome.monitor.host_problems)
            publish(job, verdict, attempt=index, reason=reason)
            job.rendezvous.close()
            if verdict.stopped_by and not verdict.notes and not verdict.culprits:
                drop_folder(job.spec.logs, job.folder)  # nothing failed: there is nothing to look at
            return verdict.exit_code
        again = f"restart {len(failures)} of {job.spec.max_restarts}"
        publish(job, verdict, attempt=index, reason=again, is_final=False)
        restarts += 1
    raise AssertionError("the attempts of a job never run out by themselves")


def _join(job: Job, restarts: int, *, is_first: bool) -> Assignment | None:
    """Meet the other nodes; None where this one has stood by until the end of the job."""
    part = None
    try:
        part = job.rendezvous.join(restarts)
    except NotNeeded as over:
        job.console.say(f"rankwise: {over}; this node stood by")
    finally:
        if part is None and is_first:
            drop_folder(job.spec.logs, job.folder)  # nothing ran: there is nothing to look at
    return part


def _decide(job: Job, part: Assignment, case: Case, failures: list[Failure]) -> str | None:
    """Say why there is no further attempt, None if there is, unless the user, another node, or what happened, has decided already."""
    if case.interrupted is not None or case.supervisor_lost:
        return ""
    if case.hung and job.spec.on_hang == "stop":
        return "--on-hang stop: no restart after a hang" if job.spec.max_restarts else ""
    own = decide(failures, job.spec.max_restarts)
    end = None if part.link is None else part.link.end
    if end is None or (end.gives_up and own is not None):
        return own
    # All nodes do what the one decided that ended the attempt: each counts the failures of its own ranks.
    if not end.gives_up:
        return None
    return "that node does not restart its ranks" if job.spec.max_restarts else ""


def _are_rare(case: Case, losses: dict[str, list[float]], now_s: float) -> bool:
    """Note which hosts are lost; a host that is lost again and again is a failure, and no accident."""
    hosts = [one.host for one in case.lost_nodes] or ([""] if case.given_up else [])
    for host in hosts:
        of_late = [at_s for at_s in losses.get(host, ()) if now_s - at_s < _OF_LATE_S]
        losses[host] = [*of_late, now_s]
    return all(len(losses[host]) <= _MOST_LOSSES for host in hosts)


def _does_one_join(job: Job, part: Assignment, verdict: Verdict) -> bool:
    """Tell whether ranks have lost a peer because its launcher, quicker than this one, makes room for a node that joins."""
    if part.num_nodes >= job.spec.max_nodes or not verdict.lacks_cause:
        return False
    end = job.clock.monotonic() + _JOIN_S
    while job.rendezvous.nodes_waiting() == 0:
        if job.clock.monotonic() > end:
            return False
        job.clock.sleep(_SOON_S)
    return True


def _find_regroup(job: Job, part: Assignment, outcome: Outcome, verdict: Verdict) -> str:
    """Say why all ranks start again without a failure: a node joins, or nodes were lost and enough are left; empty if they don't."""
    case = outcome.case
    end = None if part.link is None else part.link.end
    if outcome.regroup and end is None:
        return "another node joins: all ranks are restarted"
    if job.spec.rendezvous.backend == "static" or case.interrupted is not None or verdict.culprits:
        return ""
    if case.given_up:
        return f"{verdict.message}; its ranks are terminated, and it asks to join again"
    if not case.lost_nodes:
        joins = end is None and _does_one_join(job, part, verdict)
        return "another node joins: all ranks are restarted" if joins else ""
    left, standby = part.num_nodes - len(case.lost_nodes), job.rendezvous.nodes_standing_by()
    if left + standby < job.spec.min_nodes:
        return ""
    nodes = "the remaining node" if left == 1 else f"the {left} remaining nodes"
    if left < job.spec.min_nodes:
        nodes += f" and {min(standby, len(case.lost_nodes))} that stood by"
    return f"{verdict.message}; all ranks restart on {nodes}"


def _hear_others(job: Job, outcome: Outcome, verdict: Verdict, *, is_through: bool) -> Case:
    """Return the case with what other nodes' ranks add to it."""
    if is_through:
        return _finish(job, outcome, is_requeue=verdict.kind == "requeue")
    if outcome.case.elsewhere or not verdict.lacks_cause:
        return outcome.case
    return outcome.monitor.finish(outcome.case, "lost")


def _finish(job: Job, outcome: Outcome, *, is_requeue: bool) -> Case:
    """Wait until the other nodes are through, and return the case with what has come out of it meanwhile."""
    from rankwise.launcher.job_monitor import HungElsewhere  # noqa: PLC0415 - not before the ranks' start

    monitor, case = outcome.monitor, outcome.case
    # After a requeue the reason for it may come a second time, and the exit code must not change for that.
    with suppress(InterruptedByUser):
        try:
            if job.rendezvous.finish(None if is_requeue else monitor.watch_on) and not is_requeue:
                case = monitor.finish(case, "through")
        except HungElsewhere:
            case = monitor.finish(case, "hung")
        except EndedElsewhere:
            case = monitor.add_end(case)
    return case


def _leave(job: Job, outcome: Outcome, verdict: Verdict, *, restarts: int) -> None:
    """Say good-bye when all ranks have left by themselves."""
    if verdict.kind == "ok" and (hint := job.warm.find_hint(outcome.imported, job.num_ranks, restarts=restarts)):
        job.console.say(f"rankwise: hint: {hint}")
    if job.serial is not None:
        job.workers.sweep(_SWEEP_S)
    elif job.workers.leave():
        relay_in_background(outcome.open_streams)
    if not verdict.casualties and verdict.kind != "mismatch":
        drop_folder(job.spec.logs, job.folder)


def _run_attempt(job: Job, part: Assignment, *, index: int, restarts: int, failures: list[Failure]) -> Outcome:
    try:
        return _see_through(lambda: Attempt(job, part, index=index, restarts=restarts, failures=failures), job)
    except RankwiseError as error:
        if part.link is not None:  # without a report, the others would take this node for lost
            part.link.end_attempt(error.message, code=1, gives_up=True)
            job.rendezvous.close()
        raise


def _see_through(make: Callable[[], Attempt], job: Job) -> Outcome:
    try:
        return make().run()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise LaunchError(
                f"the ranks could not be started: {error}", hint="check the folder and its disk"
            ) from error
        hint = "allow more open files: ulimit -n 4096"
        raise LaunchError(f"too many open files for {job.num_ranks} ranks on this node", hint=hint) from error
