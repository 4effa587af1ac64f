"""Several hosts examine each other: each of them calls this, and each gets the same result."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

from rankwise.doctor.host import Host
from rankwise.doctor.multi_host import cluster_report, coordinator_client
from rankwise.doctor.multi_host.cluster_report import ClusterReport
from rankwise.doctor.multi_host.connection import Connection
from rankwise.doctor.multi_host.host_tasks import HostTasks
from rankwise.doctor.multi_host.phases import END_S, Phases
from rankwise.doctor.multi_host.plan import JoinError, Plan
from rankwise.doctor.multi_host.wire import INTERRUPTED, GoneError, Message, one_line, text
from rankwise.doctor.probe import Probe

Say: TypeAlias = Callable[[str], None]


def examine_hosts(host: Host, probes: Sequence[Probe], plan: Plan, say: Say) -> ClusterReport:
    """Meet the other hosts, look at this one and at the links to them, and judge what all of them found.

    Every host of the set calls it at about the same time, with the same probes. Its time is bounded: a host that does
    not arrive, dies or freezes is named, and the others continue. ``say`` is called, in this thread, with a line that
    says what is waited for.

    Returns:
        The same on each host; where there are more than 32, a host other than the coordinator gets of the others only
        what is wrong.

    Raises:
        JoinError: The coordinator can't be found or reached, rejected this host, or was lost.
    """
    if sys.platform == "win32":
        # A LinkServer waits for its listeners, which the usual loop there can't.
        asyncio.set_event_loop_policy(asyncio.WindowsSelectorEventLoopPolicy())
    return asyncio.run(_examine(host, probes, plan, say))


async def _examine(host: Host, probes: Sequence[Probe], plan: Plan, say: Say) -> ClusterReport:
    tasks, listener = HostTasks(host, probes, plan), coordinator_client.bind_endpoint(host, plan)
    if listener is None:
        return await _take_part(host, tasks, plan, say, "")
    phases = Phases(host, probes, plan)
    coordinating = asyncio.create_task(phases.run(listener))
    try:
        found = await _take_part(host, tasks, plan, say, phases.secret)
    except BaseException as error:
        # The others are told why this host is gone.
        phases.why = error.message if isinstance(error, JoinError) else INTERRUPTED
        coordinating.cancel()
        raise
    finally:
        await asyncio.wait({coordinating}, timeout=END_S)
    return found


async def _take_part(host: Host, tasks: HostTasks, plan: Plan, say: Say, secret: str) -> ClusterReport:
    try:
        connection = await coordinator_client.join(host, plan, say, secret=secret)
        try:
            return await _obey(connection, host, tasks, plan, say)
        except (asyncio.CancelledError, JoinError) as error:
            # The others would take us for dead.
            connection.send({"leaves": error.message if isinstance(error, JoinError) else INTERRUPTED})
            raise
        finally:
            await connection.wait_closed(coordinator_client.CLOSE_S)
    finally:
        tasks.close()


async def _obey(connection: Connection, host: Host, tasks: HostTasks, plan: Plan, say: Say) -> ClusterReport:
    running: set[asyncio.Task[None]] = set()
    while True:
        try:
            message = await coordinator_client.receive(connection, host.clock, plan.silence_s)
        except GoneError as error:
            what = f"the host of the rendezvous at {plan.endpoint} is gone: {error}"
            fix = f"# look at the doctor's output on {plan.endpoint_host}, see that it stays up, and start all hosts again"
            raise JoinError(what, fix) from error
        if "no" in message:
            raise coordinator_client.read_refusal(message)
        if isinstance(result := message.get("result"), dict):
            try:
                return cluster_report.from_json(result)
            except ValueError as error:
                what = f"what the host at {plan.endpoint} sent is not a result: {error}"
                raise JoinError(what, "# use the same version of rankwise on all hosts") from error
        if "say" in message:
            say(one_line(text(message, "say")))
        elif "do" in message:
            # Beside us: whatever a task waits for, we notice at once if the coordinator dies.
            running.add(task := asyncio.create_task(_do(tasks, message, connection)))
            task.add_done_callback(running.discard)


async def _do(tasks: HostTasks, order: Message, connection: Connection) -> None:
    try:
        answer = await tasks.do(order, connection.local_address)
    except Exception as error:  # noqa: BLE001 - the coordinator waits for an answer, and reports all of it
        answer = {"leaves": f"its doctor failed ({type(error).__name__}: {error}): please report this bug in rankwise"}
    connection.send(answer)
