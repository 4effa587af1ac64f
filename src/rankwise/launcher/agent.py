"""The launcher's loop: meet, start, watch, decide; again, or the report and the exit code."""

from __future__ import annotations

import errno
import itertools
from typing import TYPE_CHECKING

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import LaunchError, RankwiseError, UsageError
from rankwise.base.events import EventLog
from rankwise.base.host import count_cores
from rankwise.base.osdoor import IS_LINUX, fill_standard_streams, raise_file_limit
from rankwise.launcher.attempt import Attempt, Outcome
from rankwise.launcher.helper import Helper, InterruptedByUser
from rankwise.launcher.interpreter import find_interpreter
from rankwise.launcher.job import Job, drop_folder, make_folder
from rankwise.launcher.output import relay_in_background
from rankwise.launcher.policy import Failure, GiveUp, decide
from rankwise.launcher.publish import publish, write_report
from rankwise.launcher.rendezvous.several import SeveralNodes
from rankwise.launcher.rendezvous.single import SingleNode
from rankwise.launcher.signals import Signals
from rankwise.launcher.warm_start import Host, WarmStart
from rankwise.verdict.case import Verdict
from rankwise.verdict.exits import name_signal
from rankwise.verdict.judge import judge

if TYPE_CHECKING:
    from rankwise.base.clock import Clock
    from rankwise.launcher.console import Console
    from rankwise.launcher.rendezvous.assignment import Assignment, Rendezvous
    from rankwise.launcher.spec import LaunchSpec
    from rankwise.launcher.workers import Workers


def launch(spec: LaunchSpec, console: Console) -> int:
    """Run a job to its end on this node.

    Args:
        spec: What to run.
        console: Where to speak.

    Returns:
        The exit code: 0, or the first cause's.

    Raises:
        RankwiseError: The job could not be started.
    """
    fill_standard_streams()
    signals, clock = Signals(spec.signals), SYSTEM_CLOCK
    workers = _open_workers(signals, clock)
    raise_file_limit()  # after the keeper's fork: the ranks keep the limit that the user gave them
    helper: Helper | None = None
    try:
        interpreter = find_interpreter(needs_torch=spec.program.how != "program")
        if not interpreter.is_ours:
            console.say(f"rankwise: the ranks run in {interpreter.path} (torch {interpreter.torch_version})")
        if spec.num_ranks is None or not spec.is_one_node or spec.numa_binding is not None:
            helper = Helper(interpreter.path, signals, clock)
        num_ranks, prefixes = _ask_host(spec, helper)
        num_threads = max(1, count_cores() // num_ranks)
        host = Host(interpreter=interpreter, num_ranks=num_ranks, prefixes=prefixes, num_threads=num_threads)
        warm = WarmStart(spec, host, workers, console)
        rendezvous: Rendezvous
        if spec.is_one_node or helper is None:
            rendezvous = SingleNode(spec, num_ranks, rank0_serves=interpreter.torch_version is None)
        else:
            rendezvous = SeveralNodes(spec, num_ranks, helper, console)
        folder = make_folder(spec.logs, rendezvous.run_id)
        job = Job(
            spec=spec, python=interpreter.path, num_ranks=num_ranks, prefixes=prefixes, num_threads=num_threads, warm=warm, folder=folder, rendezvous=rendezvous,
            workers=workers, signals=signals, console=console, clock=clock, events=EventLog(folder / "events.jsonl"),
        )  # fmt: skip
        return _run_attempts(job)
    except InterruptedByUser:
        return _interrupted(spec, signals, console)
    except RankwiseError as error:
        if spec.report is not None:
            verdict = Verdict(
                kind="failure", message=error.message, fix=error.hint or "", exit_code=error.exit_code
            )
            write_report(spec.report, verdict, attempt=0, console=console)
        raise
    finally:
        workers.close()
        if helper is not None:
            helper.close()
        signals.close()


def _run_attempts(job: Job) -> int:
    failures: list[Failure] = []
    for index in itertools.count():
        try:
            part = job.rendezvous.join(len(failures))
        except RankwiseError:
            if not index:
                drop_folder(job.spec.logs, job.folder)  # nothing ran: there is nothing to look at
            raise
        outcome = _run_attempt(job, part, index=index, restarts=len(failures))
        verdict = judge(outcome.case)
        if verdict.kind == "ok" and not outcome.regroup:
            job.rendezvous.finish()
            job.rendezvous.close()
            publish(job, verdict, attempt=index)
            if job.workers.leave():
                relay_in_background(outcome.open_streams)
            drop_folder(job.spec.logs, job.folder)
            return 0
        if outcome.regroup:
            job.console.say("rankwise: another node joins, all ranks start again")
            continue
        # Which of several ranks came first is chance: the error itself is compared, not who raised it.
        told = verdict.message.partition(": ")[2] or verdict.message
        failures.append(Failure(message=told, where=_place(verdict), lasted_s=outcome.lasted_s))
        decision = decide(failures, job.spec.max_restarts)
        if outcome.case.interrupted is not None or outcome.case.keeper_lost:
            decision = GiveUp()
        if isinstance(decision, GiveUp):
            job.rendezvous.close()
            publish(job, verdict, attempt=index, reason=decision.reason)
            if verdict.stopped_by and not verdict.notes:
                drop_folder(job.spec.logs, job.folder)  # nothing failed: there is nothing to look at
            return verdict.exit_code
        again = f"restart {len(failures)} of {job.spec.max_restarts}"
        publish(job, verdict, attempt=index, reason=again, is_final=False)
    raise AssertionError("the attempts of a job never run out by themselves")


def _place(verdict: Verdict) -> str | None:
    """Return where an attempt failed, or by which exit code; None if it was killed from outside."""
    return verdict.where or (f"exit code {verdict.exit_code}" if verdict.exit_code < 128 else None)


def _run_attempt(job: Job, part: Assignment, *, index: int, restarts: int) -> Outcome:
    try:
        return Attempt(job, part, index=index, restarts=restarts).run()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise LaunchError(
                f"the ranks could not be started: {error}", hint="check the folder and its disk"
            ) from error
        hint = "allow more open files: ulimit -n 4096"
        raise LaunchError(f"too many open files for {job.num_ranks} ranks on this node", hint=hint) from error


def _ask_host(spec: LaunchSpec, helper: Helper | None) -> tuple[int, tuple[tuple[str, ...], ...]]:
    """Return the number of ranks and the words before each one's command."""
    num_ranks = spec.num_ranks or 1
    if spec.num_ranks is None and helper is not None:
        try:
            num_ranks = int(str(helper.ask("count", timeout_s=120, what=spec.nproc_per_node)["count"]))
        except LaunchError as error:
            raise UsageError(
                f"--nproc-per-node {spec.nproc_per_node}: {error.message}",
                hint="give a number, or auto for what this host has",
            ) from error
        if num_ranks < 1:
            raise UsageError(f"--nproc-per-node {spec.nproc_per_node}: this host has none")
    if spec.numa_binding is None or helper is None:
        return num_ranks, ((),) * num_ranks
    try:
        answer = helper.ask("numa", timeout_s=120, mode=spec.numa_binding, num_ranks=num_ranks)["prefixes"]
    except LaunchError as error:
        raise UsageError(f"--numa-binding {spec.numa_binding} can't be done here: {error.message}",
                         hint="it needs a CUDA GPU for each rank, and the program numactl") from error  # fmt: skip
    prefixes = answer if isinstance(answer, list) else []
    return num_ranks, tuple(tuple(str(word) for word in prefix) for prefix in prefixes)


def _interrupted(spec: LaunchSpec, signals: Signals, console: Console) -> int:
    number = next((number for number in signals.take() if number not in signals.passed_on), 15)
    message = f"stopped by {name_signal(number)} while no rank was running"
    console.say(f"rankwise: {message}")
    if spec.report is not None:
        write_report(
            spec.report,
            Verdict(kind="failure", message=message, exit_code=128 + number),
            attempt=0,
            console=console,
        )
    return 128 + number


def _open_workers(signals: Signals, clock: Clock) -> Workers:
    """Return what runs processes best on this system."""
    if IS_LINUX:
        from rankwise.launcher.kept import KeptWorkers  # noqa: PLC0415 - only where it can work

        return KeptWorkers(signals, clock)
    from rankwise.launcher.plain import PlainWorkers  # noqa: PLC0415 - only where it is needed

    return PlainWorkers(signals, clock)
