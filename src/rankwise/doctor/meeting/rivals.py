"""Looks for another meeting at the master's address, where this host holds one as node 0 and that address is not its own."""

from __future__ import annotations

from contextlib import suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, final

from rankwise.base.deadline import OverdueError
from rankwise.doctor.meeting.arriving import connect, is_own, read_refusal
from rankwise.doctor.meeting.border import one_line
from rankwise.doctor.meeting.proof import mark
from rankwise.doctor.meeting.tether import Tether
from rankwise.doctor.meeting.wire import GREETING, VERSION, GoneError, text

if TYPE_CHECKING:
    from rankwise.doctor.host import Host
    from rankwise.doctor.meeting.plan import MeetingError, Plan
    from rankwise.doctor.meeting.wire import Message

_AGAIN_S, _WORD_S = 1.0, 5.0
_CLASS = "I10"


@final
class Rivals:
    """Asks at the endpoint, again and again while hosts arrive, in a thread of its own.

    Two hosts that both claim node rank 0 would each wait in a meeting of their own. But an address that is not ours may still lead
    here (address translation, the service of a cluster): who answers is asked whether it is ourselves.

    Args:
        host: This host.
        plan: The plan.
        secret: By which our own meeting knows us; empty if we hold none.
    """

    def __init__(self, host: Host, plan: Plan, secret: str) -> None:
        self._host, self._plan, self._secret = host, plan, secret
        self._found: MeetingError | None = None
        self._is_over = Event()

    def start(self) -> None:
        """Begin, if there can be any."""
        if self._secret and self._plan.is_holder and not self._plan.listen_address:
            Thread(target=self._run, name="rankwise-rivals", daemon=True).start()

    def check(self) -> None:
        """Tell of a rival.

        Raises:
            MeetingError: Another host holds the meeting: this one is sent away.
        """
        if self._found is not None:
            raise self._found

    def close(self) -> None:
        """Stop."""
        self._is_over.set()

    def _run(self) -> None:
        if is_own(self._plan.endpoint_host):
            return
        clock = self._host.clock
        until_s = clock.monotonic() + self._plan.arrival_timeout_s
        while not self._is_over.is_set() and clock.monotonic() < until_s:
            with suppress(GoneError, OSError, UnicodeError, OverdueError):
                told = self._ask()
                if told is not None and "no" in told:
                    if text(told, "class") == _CLASS:
                        self._found = read_refusal(told)
                    return
            self._is_over.wait(_AGAIN_S)

    def _ask(self) -> Message | None:
        hello: Message = {
            GREETING: VERSION, "mark": mark(self._plan.token), "name": one_line(self._host.name), "node_rank": self._plan.node_rank,
            "num_hosts": self._plan.num_hosts, "holds": self._secret,
        }  # fmt: skip
        tether = Tether(connect(self._plan.endpoint_host, self._plan), hello, self._host.clock, _WORD_S)
        try:
            return tether.next(_WORD_S)
        finally:
            tether.close()
