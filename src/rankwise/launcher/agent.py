"""One launch: the signals, the ranks' Python, the warm server; then the attempts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.base import environ
from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import LaunchError, RankwiseError, UsageError
from rankwise.base.events import EventLog
from rankwise.base.host import share_cores
from rankwise.base.os_calls import IS_LINUX, raise_file_limit
from rankwise.base.requeue import REQUEUE
from rankwise.launcher.helper import Helper, InterruptedByUser
from rankwise.launcher.interpreter import find_interpreter
from rankwise.launcher.job import Job, make_folder
from rankwise.launcher.memory_folder import open_memory_folder
from rankwise.launcher.signals import Signals
from rankwise.launcher.timers import are_asked_for, open_timers
from rankwise.launcher.warm_start import Host, WarmStart, plan_warm_start
from rankwise.verdict.exit_codes import name_signal

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from rankwise.base.clock import Clock
    from rankwise.launcher.console import Console
    from rankwise.launcher.interpreter import Interpreter
    from rankwise.launcher.spec import LaunchSpec
    from rankwise.launcher.workers import Workers
    from rankwise.warm.plan import Plan

#: From here on an exit code stands for a signal, to a rank or to us.
_SIGNALS_FROM = 128


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
    signals, workers = Signals(spec.signals), None
    closings: list[Callable[[], None]] = []
    code = 0
    try:
        interpreter = find_interpreter(needs_torch=spec.program.how != "program")
        if not interpreter.is_ours:
            console.say(f"rankwise: the ranks run in {interpreter.path} (torch {interpreter.torch_version})")
        host, helper = find_host(spec, interpreter, signals, closings)
        plan = plan_warm_start(spec, host)
        supervisor = ask_resident(spec, host, plan, signals, console)
        workers = open_workers(signals, SYSTEM_CLOCK, supervisor)
        raise_file_limit()  # after the supervisor's fork: the ranks keep the limit that the user gave them
        warm = WarmStart(spec, host, workers, console, plan=plan, is_forked=supervisor is not None)
        job = _prepare(spec, console, warm, workers, signals, closings, host=host, helper=helper)
        from rankwise.launcher.attempt_loop import run_attempts  # noqa: PLC0415 - it is there by now

        code = run_attempts(job)
        if job.check is not None and code != REQUEUE and 0 < code < _SIGNALS_FROM:
            job.check.wait(lambda: signals.has_pending)
    except InterruptedByUser:
        return _interrupted(spec, signals, console)
    except RankwiseError as error:
        _report_failure(spec, console, error.message, error.exit_code, fix=error.hint or "")
        raise
    finally:
        if workers is not None:
            workers.close()
        for close in reversed(closings):
            close()
        signals.close(deaf=code == REQUEUE)  # whoever sent a notice may send it again
    return code


def find_host(
    spec: LaunchSpec, interpreter: Interpreter, signals: Signals, closings: list[Callable[[], None]]
) -> tuple[Host, Helper | None]:
    """Find how many ranks this host gets, and what stands before their commands.

    Args:
        spec: What is launched.
        interpreter: The ranks' Python.
        signals: End the wait for an answer.
        closings: Gets what is to be called in the end.

    Returns:
        The host, and the process that was asked, if one was.
    """
    helper = None
    # What is to be done before the ranks, or beside them, and needs torch.
    if spec.num_ranks is None or not spec.is_one_node or spec.numa_binding is not None or are_asked_for():
        helper = Helper(interpreter.path, signals, SYSTEM_CLOCK)
        closings.append(helper.close)
    num_ranks, prefixes = _ask_host(spec, helper)
    num_threads = share_cores(num_ranks)
    return Host(interpreter=interpreter, num_ranks=num_ranks, prefixes=prefixes, num_threads=num_threads), helper


def ask_resident(
    spec: LaunchSpec, host: Host, plan: Plan, signals: Signals, console: Console
) -> tuple[int, socket.socket] | None:
    """Return a supervisor that a resident server has forked, with its socket, if the user wants that and the script can have it."""
    if not IS_LINUX or plan.cold or not (spec.resident or environ.is_on("RANKWISE_RESIDENT")):
        return None
    from rankwise.launcher.resident import is_wanted, open_run  # noqa: PLC0415 - only where it is asked for

    if not is_wanted(console, flag=spec.resident):
        return None
    return open_run(spec, host, plan, signals, console, meanwhile=_import_the_rest)


def _import_the_rest() -> None:
    """Import what comes after the warm server's start: it takes as long as a fork."""
    import rankwise.launcher.attempt_loop  # noqa: PLC0415
    import rankwise.launcher.entry_check  # noqa: PLC0415
    import rankwise.launcher.host_check  # noqa: F401, PLC0415


def _prepare(
    spec: LaunchSpec,
    console: Console,
    warm: WarmStart,
    workers: Workers,
    signals: Signals,
    closings: list[Callable[[], None]],
    *,
    host: Host,
    helper: Helper | None,
) -> Job:
    """Bring together what the attempts of a launch share; ``closings`` gets what is to be called at its end, last first."""
    # While the server imports torch: what follows costs 0.04 s before the first rank.
    from rankwise.launcher.attempt_loop import open_rendezvous  # noqa: PLC0415
    from rankwise.launcher.entry_check import EntryCheck  # noqa: PLC0415
    from rankwise.launcher.host_check import HostCheck  # noqa: PLC0415

    check, host_check = EntryCheck(spec, console), HostCheck(spec, host.num_ranks, host.interpreter.path)
    closings.append(check.close)
    if spec.strict:
        check.start()
    host_check.tell_before(console)
    rendezvous = open_rendezvous(spec, host, helper, console, host_check)
    folder = make_folder(spec.logs, rendezvous.run_id)
    if (memory := open_memory_folder(pid=workers.supervisor_pid)) is not None:
        closings.append(memory.drop)
    if (timers := open_timers(helper, rendezvous.run_id)) is not None:
        closings.append(timers.close)
        spec = replace(spec, variables=(*spec.variables, *timers.variables))
    job = Job(
        spec=spec, host=host, warm=warm, folder=folder, rendezvous=rendezvous, workers=workers, signals=signals, console=console,
        clock=SYSTEM_CLOCK, events=EventLog(folder / "events.jsonl"), host_check=host_check, timers=timers, check=check,
    )  # fmt: skip
    if spec.strict:
        check.refuse_errors()
    return job


def _explain_device(device: str, text: str) -> UsageError:
    """Return why torch can't count the devices of a kind."""
    if "Unsupported nproc_per_node" in text:
        return UsageError(
            f"--nproc-per-node {device!r} is neither a number nor a kind of device that torch knows",
            hint="a number above 0, gpu, cpu, xpu or auto",
        )
    if text.endswith("is not available."):
        return UsageError(
            f"--nproc-per-node {device}: torch finds no such device on this host",
            hint="a number, or auto for what this host has; `rankwise doctor --only gpu,torch-build` says why there is no GPU",
        )
    return UsageError(f"--nproc-per-node {device}: {text}", hint="a number, or auto for what this host has")


def _ask_host(spec: LaunchSpec, helper: Helper | None) -> tuple[int, tuple[tuple[str, ...], ...]]:
    """Return the number of ranks and the words before each one's command."""
    num_ranks = spec.num_ranks or 1
    if spec.num_ranks is None and helper is not None:
        try:
            num_ranks = int(str(helper.ask("count", timeout_s=120, what=spec.nproc_per_node)["count"]))
        except LaunchError as error:
            raise _explain_device(spec.nproc_per_node, error.message) from error
        if num_ranks < 1:
            raise UsageError(f"--nproc-per-node {spec.nproc_per_node}: this host has none")
    if spec.numa_binding is None or helper is None:
        return num_ranks, ((),) * num_ranks
    try:
        answer = helper.ask("numa", timeout_s=120, mode=spec.numa_binding, num_ranks=num_ranks)["prefixes"]
    except LaunchError as error:
        raise UsageError(
            f"--numa-binding {spec.numa_binding} can't be done here: {error.message.partition(': ')[2] or error.message}",
            hint="it needs a CUDA GPU for each rank, and the program numactl",
        ) from error
    prefixes = answer if isinstance(answer, list) else []
    return num_ranks, tuple(tuple(str(word) for word in prefix) for prefix in prefixes)


def _interrupted(spec: LaunchSpec, signals: Signals, console: Console) -> int:
    number = next((number for number in signals.take() if number not in signals.passed_on), 15)
    message = f"stopped by {name_signal(number)} while no rank was running"
    console.say(f"rankwise: {message}")
    _report_failure(spec, console, message, 128 + number)
    return 128 + number


def _report_failure(spec: LaunchSpec, console: Console, message: str, exit_code: int, fix: str = "") -> None:
    """Write the report of a job that never came to start a rank."""
    if spec.report is None:
        return
    from rankwise.launcher.publish import write_report  # noqa: PLC0415 - not before the server's start
    from rankwise.verdict.case import Verdict  # noqa: PLC0415

    verdict = Verdict(kind="failure", message=message, fix=fix, exit_code=exit_code)
    write_report(spec.report, verdict, attempt=0, console=console)


def open_workers(signals: Signals, clock: Clock, supervisor: tuple[int, socket.socket] | None = None) -> Workers:
    """Return what runs processes best on this system; ``supervisor`` is one that is there already."""
    if IS_LINUX:
        from rankwise.launcher.supervised_workers import SupervisedWorkers  # noqa: PLC0415 - only where it can work

        return SupervisedWorkers(signals, clock, supervisor)
    from rankwise.launcher.direct_workers import DirectWorkers  # noqa: PLC0415 - only where it is needed

    return DirectWorkers(signals, clock)
