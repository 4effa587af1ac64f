"""Several hosts examine each other: each of them calls this, and each gets the same result."""

from __future__ import annotations

from threading import Thread
from typing import TYPE_CHECKING

from rankwise.doctor.meeting import together_json
from rankwise.doctor.meeting.arriving import arrive, bind_endpoint, read_refusal
from rankwise.doctor.meeting.border import one_line
from rankwise.doctor.meeting.holding import Holding
from rankwise.doctor.meeting.plan import MeetingError, Plan
from rankwise.doctor.meeting.rivals import Rivals
from rankwise.doctor.meeting.tasks import Tasks
from rankwise.doctor.meeting.wire import INTERRUPTED, GoneError, text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.doctor.host import Host
    from rankwise.doctor.meeting.tether import Tether
    from rankwise.doctor.meeting.together import Together
    from rankwise.doctor.meeting.wire import Message
    from rankwise.doctor.probe import Probe

_STEP_S = 0.5


def examine_together(host: Host, probes: Sequence[Probe], plan: Plan, say: Callable[[str], None]) -> Together:
    """Meet the other hosts, look at this one and at the ways to them, and judge what all of them found.

    Every host of the set calls it at about the same time. Its time is bounded: a host that does not come, dies or freezes is
    named, and the others go on.

    Args:
        host: This host.
        probes: What to look at on each host; the same on all of them.
        plan: Where to meet, and whom.
        say: Told in a line what is waited for, where that takes long; called in this thread.

    Returns:
        The same on each host; where there are more than 32, a host that does not hold the meeting gets of the others only what is not well.

    Raises:
        MeetingError: The meeting can't be found or reached, sent this host away, or has lost the host that held it.
    """
    listener = bind_endpoint(plan)
    holding = Holding(host, probes, plan, listener) if listener is not None else None
    tasks = Tasks(host, probes, plan)
    found: Together | None = None
    rivals = Rivals(host, plan, holding.secret if holding is not None else "")
    why = ""
    try:
        if holding is not None:
            holding.start()
            rivals.start()
        tether = arrive(host, plan, say, own=holding.secret if holding is not None else "")
        try:
            found = _take_part(tether, tasks, plan, say, rivals)
        except (KeyboardInterrupt, MeetingError) as error:
            # The others would take us for dead.
            tether.send({"leaves": error.message if isinstance(error, MeetingError) else INTERRUPTED})
            raise
        finally:
            tether.close()
    except KeyboardInterrupt:
        why = INTERRUPTED
        raise
    except MeetingError as error:
        why = error.message
        raise
    finally:
        rivals.close()
        if holding is not None:
            holding.close(is_over=found is not None, why=why)
        tasks.close()
    return found


def _take_part(
    tether: Tether, tasks: Tasks, plan: Plan, say: Callable[[str], None], rivals: Rivals
) -> Together:
    while True:
        rivals.check()
        try:
            told = tether.next(_STEP_S)
        except GoneError as error:
            raise MeetingError(
                f"the host of the rendezvous at {plan.endpoint} is gone: {error}",
                hint=f"look at the doctor's output on {plan.endpoint_host}, see that it stays up, and start all hosts again",
            ) from error
        if told is None:
            continue
        if "no" in told:
            raise read_refusal(told)
        result = told.get("result")
        if isinstance(result, dict):
            return _read_result(result, plan)
        if "say" in told:
            say(one_line(text(told, "say")))
        elif "do" in told:
            # In a thread of its own: whatever a task waits for, we hear at once if the holder dies.
            Thread(target=_do, args=(tasks, told, tether), name="rankwise-task", daemon=True).start()


def _read_result(told: Message, plan: Plan) -> Together:
    try:
        return together_json.from_json(told)
    except ValueError as error:
        raise MeetingError(
            f"what the host at {plan.endpoint} sent is not a result: {error}",
            hint="use the same version of rankwise on all hosts",
        ) from error


def _do(tasks: Tasks, order: Message, tether: Tether) -> None:
    try:
        answer = tasks.do(order, tether.address)
    except Exception as error:  # noqa: BLE001 - the holder waits for an answer, and tells all of it
        answer = {"answer": text(order, "do"), "broke": f"{type(error).__name__}: {error}"}
    tether.send(answer)
