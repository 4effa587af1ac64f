"""Holds the meeting: who arrives, what all do next, who is lost on the way; and at its end what was found, for all."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING, final

from rankwise.doctor.examine import BOUND_S, collect_facts, compare_hosts
from rankwise.doctor.meeting import together_json
from rankwise.doctor.meeting.admitting import Admission
from rankwise.doctor.meeting.all_reducing import find_obstacle, plan_reduce, read_reduce
from rankwise.doctor.meeting.border import BadMessageError
from rankwise.doctor.meeting.gathering import Gathered, make_names_distinct, order_seats
from rankwise.doctor.meeting.judging import find_blocked, find_suspects, judge
from rankwise.doctor.meeting.rounds import plan_rounds
from rankwise.doctor.meeting.table import OwnLostError, Seat, Table, measure_clock, refuse
from rankwise.doctor.meeting.together import NO_SENSE
from rankwise.doctor.meeting.wire import Message, encode, text
from rankwise.doctor.reading import Reading

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence

    from rankwise.doctor.host import Host
    from rankwise.doctor.meeting.plan import Plan
    from rankwise.doctor.meeting.together import AllReduce, Together
    from rankwise.doctor.probe import Probe
    from rankwise.doctor.reading import Facts

_OPEN_S, _SUGGEST_S, _ALL_REDUCE_S = 30.0, 15.0, 100.0
#: At its end all are waited for: so long at most, and less if nobody takes anything of what still waits to be sent.
_LEAVE_S, _END_S = 3.0, 60.0
#: Trying all links takes as long for each as one that drops everything, and some more where there are many.
_CONNECT_S, _CONNECT_S_PER_HOST = 45.0, 0.5
#: For so long all is measured; then again, alone, what seems slow: a busy host must not look like a slow link.
_MEASURE_S, _AGAIN_S, _TRIES = 15.0, 10.0, 3
_MEASURE_SLACK_S = 25.0
_CLOCK_ROUNDS = 8
#: Hosts that are all played by one take so many times as long.
_PATIENCE_PLAYED = 10
#: A larger set's hosts are told what is wrong, and not all that is right.
MANY_HOSTS = 32


@final
class Holding:
    """One meeting, in a thread of its own.

    Args:
        host: The host that holds it.
        probes: What is looked at.
        plan: The plan.
        listener: Where hosts arrive.
    """

    def __init__(self, host: Host, probes: Sequence[Probe], plan: Plan, listener: socket.socket) -> None:
        self._host, self._probes, self._plan, self._clock = host, probes, plan, host.clock
        self._admission = Admission(host.name, plan, self._list_here, host.clock)
        #: By it the holder's own host is known.
        self.secret = self._admission.secret
        self._table = Table(
            listener,
            token=plan.token,
            own=self.secret,
            clock=host.clock,
            silence_s=plan.silence_s,
            admit=self._admission.admit,
            check=self._check_wanted,
            on_loss=self._tell_loss,
        )
        self._begin_s = host.clock.monotonic()
        self._is_reducing = False
        self._numbered: list[Seat] = []
        self._found = Gathered()
        self._is_wanted, self._why = True, ""
        self._thread = Thread(target=self._run, name="rankwise-meeting", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, *, is_over: bool, why: str = "") -> None:
        """End it.

        Args:
            is_over: Whether we have the result: then the others get theirs before this returns. Else they see that the holder is gone.
            why: Why it is gone, for the others.
        """
        self._why, self._is_wanted = why, is_over
        self._thread.join(timeout=_END_S if is_over else 10)
        self._is_wanted = False

    def _run(self) -> None:
        try:
            self._arrive()
            self._proceed()
        except _NotWantedError:
            if self._why:
                self._break_off_for(self._why)
        except OwnLostError as error:
            self._break_off_for(str(error))
        except Exception as error:  # noqa: BLE001 - all hosts wait for us: they must be told
            why = f"the rendezvous failed: {type(error).__name__}: {error}"
            self._break_off(why, "this is a bug in rankwise, please report it")
        finally:
            self._table.close()

    def _break_off_for(self, why: str) -> None:
        self._break_off(
            f"{self._host.name}, the host of the rendezvous, is gone: {why}", "start all hosts again"
        )

    def _break_off(self, why: str, hint: str) -> None:
        self._is_wanted = True  # until all have heard of it
        with suppress(OwnLostError, _NotWantedError):
            self._table.end()
            self._table.tell_all(refuse(why, hint))
            self._table.drain(2)

    # ── arrival ──

    def _arrive(self) -> None:
        clock, say_s = self._clock, self._begin_s + 2.0
        while clock.monotonic() < self._begin_s + self._plan.arrival_timeout_s:
            here = self._table.here()
            wanted = self._count_wanted(here)
            if any(one.is_own for one in here) and wanted and len(here) >= wanted:
                break
            self._table.pump()
            if clock.monotonic() >= say_s:
                say_s += 10.0
                here = self._table.here()
                missing = ", ".join(self._admission.list_missing(here)) or self._admission.describe_vacancy()
                self._say(f"waiting for {missing} ({len(here)} of {wanted or 'an unknown number'} are here)")
        self._admission.is_open = False
        self._table.seats[:] = self._table.here()
        self._numbered = order_seats(self._table.seats, self._plan)
        make_names_distinct(self._numbered)
        self._found = Gathered(
            seats=self._numbered,
            missing=self._admission.list_missing(self._numbered),
            doubled=self._admission.doubled,
        )

    def _list_here(self) -> list[Seat]:
        return self._table.here()

    def _count_wanted(self, here: Sequence[Seat]) -> int:
        """Return how many are to come: where hosts are not of one opinion, the most."""
        told = [one.num_hosts for one in here if one.num_hosts is not None]
        return max([*told, self._plan.num_hosts or 0]) or len(self._plan.expected)

    # ── the phases ──

    def _proceed(self) -> None:
        self._open()
        self._connect()
        self._take_readings()
        self._compare_clocks()
        if self._plan.measure:
            self._measure()
            self._measure_again()
        self._suggest()
        all_reduce = self._reduce() if self._plan.all_reduce else None
        self._tell(all_reduce)

    def _open(self) -> None:
        others = [one.met_at for one in self._numbered if not one.is_own]
        orders: dict[Seat, Message] = {}
        for seat in self._table.here():
            # By which of our addresses the others came: that is the one by which we can be reached.
            own = (max(set(others), key=others.count) if others else seat.address) if seat.is_own else ""
            orders[seat] = {
                "do": "open",
                "number": seat.number,
                "count": len(self._numbered),
                "own": own,
                "is_first": seat.number == 0,
            }
        for seat, told in self._ask(orders, _OPEN_S, "opening ports").items():
            self._take(self._found.take_opened, seat, told)

    def _connect(self) -> None:
        peers = self._found.list_peers(self._table.here())
        order: Message = {"do": "connect", "peers": peers}
        bound_s = _CONNECT_S + _CONNECT_S_PER_HOST * len(self._numbered)
        for seat, told in self._ask_all(order, bound_s, "trying all links").items():
            self._take(self._found.take_links, seat, told)

    def _take_readings(self) -> None:
        bound_s = (
            max(
                [0.0]
                + [BOUND_S[one.speed] for one in self._probes]
                + [BOUND_S["slow"]] * self._plan.all_reduce
            )
            + 10.0
        )
        order: Message = {"do": "readings", "torch": self._plan.all_reduce}
        for seat, told in self._ask_all(order, bound_s, "looking at each host").items():
            self._take(self._found.take_readings, seat, told)

    def _compare_clocks(self) -> None:
        for seat in self._table.here():
            tries = [
                measure_clock(self._table, seat, self._clock)
                for _ in range(1 if seat.is_own else _CLOCK_ROUNDS)
            ]
            told = [one for one in tries if one is not None]
            if told:
                self._found.clocks[seat.number] = (
                    (0.0, 0.0) if seat.is_own else min(told, key=lambda one: one[1])
                )

    def _measure(self) -> None:
        count = len(self._numbered)
        way_s = self._plan.seconds_per_link
        most = None if count <= MANY_HOSTS else max(4, int(_MEASURE_S / 2 / max(way_s, 0.01)))
        begin_s = self._clock.monotonic()
        for pairs in plan_rounds(count, most=most):
            for way in (pairs, [(b, a) for a, b in pairs]):
                self._measure_at_once(way)
            # Slow links take longer than they should. All hosts have been measured equally often at any time.
            if self._clock.monotonic() - begin_s > 1.3 * _MEASURE_S:
                break

    def _measure_again(self) -> None:
        """Measure again, alone, what seems bad: whoever is blamed was seen to be bad three times."""
        begin_s = self._clock.monotonic()
        for _ in range(_TRIES - 1):
            suspects = find_suspects(self._found.to_together())
            for one in suspects:
                if self._clock.monotonic() - begin_s > _AGAIN_S:
                    return
                way = self._found.number_of(one.source), self._found.number_of(one.target)
                # Loss that stays at half the speed, and for longer, is none that we made ourselves.
                if one.is_lossy:
                    self._measure_at_once(
                        [way], pace=0.5 * one.bytes_per_s, seconds=3 * self._plan.seconds_per_link
                    )
                else:
                    self._measure_at_once([way])

    def _measure_at_once(
        self, ways: Sequence[tuple[int, int]], *, pace: float = 0.0, seconds: float = 0.0
    ) -> None:
        orders: dict[Seat, Message] = {}
        for source, target in ways:
            place = self._found.find_open(source, target)
            if place and self._numbered[source].is_here and self._numbered[target].is_here:
                orders[self._numbered[source]] = {
                    "do": "measure", "target": target, "address": place[0], "port": place[1], "pace": pace,
                    "seconds": seconds or self._plan.seconds_per_link,
                }  # fmt: skip
        for seat, told in self._ask(orders, _MEASURE_SLACK_S, "measuring").items():
            self._take(self._found.take_measure, seat, told)

    def _suggest(self) -> None:
        blocked = find_blocked(self._found.to_together())
        orders: dict[Seat, Message] = {
            one: {"do": "suggest"} for one in self._table.here() if one.name in blocked
        }
        for seat, told in self._ask(orders, _SUGGEST_S, "checking firewalls").items():
            self._found.openings[seat.number] = text(told, "opening"), text(told, "opening_out")

    def _reduce(self) -> AllReduce:
        found = self._found
        here = {one.name: found.torch.get(one.number, {}) for one in self._numbered if one.is_here}
        obstacle = find_obstacle(found.to_together(), here)
        if obstacle is not None:
            return obstacle
        address = found.address_of(self._numbered[0])
        orders = plan_reduce(here, address)
        seats = {one.name: one for one in self._numbered}
        self._is_reducing = True
        told = self._ask(
            {seats[name]: order for name, order in orders.items()},
            _ALL_REDUCE_S,
            "reducing over all hosts with torch",
        )
        self._is_reducing = False
        lost = [name for name in orders if not seats[name].is_here]
        return read_reduce(orders, {seat.name: answer for seat, answer in told.items()}, lost)

    def _tell(self, all_reduce: AllReduce | None) -> None:
        found = replace(self._found.to_together(), all_reduce=all_reduce)
        facts = {one.name: collect_facts(one.readings) for one in found.hosts}
        compared = self._compare(facts)
        found = replace(
            found,
            readings=(*judge(found, self._plan), *compared),
            took_s=self._clock.monotonic() - self._begin_s,
        )
        whole = encode({"result": together_json.to_json(found)})
        for seat in self._table.here():
            line = whole
            if len(self._numbered) > MANY_HOSTS and not seat.is_own:
                line = encode({"result": together_json.to_json(_trim(found, seat.name))})
            self._table.tell(seat, {}, line)
        patience = _PATIENCE_PLAYED if self._plan.listen_address else 1
        self._table.wait_until_left(_LEAVE_S * patience, _END_S)

    def _compare(self, facts: Mapping[str, Mapping[str, Facts]]) -> list[Reading]:
        """Compare what the hosts have told; facts that make no sense cost one comparison, and not the meeting."""
        found: list[Reading] = []
        for probe in self._probes:
            try:
                found += compare_hosts([probe], facts)
            except Exception as error:  # noqa: BLE001 - anything may have been told
                why = f"their results can't be compared: {type(error).__name__}: {error}"
                found.append(
                    Reading(verdict="skipped", what="the hosts were not compared", why=why).of(
                        probe.id, *facts
                    )
                )
        return found

    def _take(self, take: Callable[[Seat, Message], None], seat: Seat, told: Message) -> None:
        """Take an answer; who tells what no doctor would is lost, and nobody else."""
        try:
            take(seat, told)
        except BadMessageError as error:
            self._table.lose(seat, f"{NO_SENSE} ({error}): it is not a doctor of this version")

    def _tell_loss(self, seat: Seat) -> None:
        self._say(f"{seat.name} was lost: {seat.lost}")
        if self._is_reducing:
            # The others would wait for it until their time is over.
            self._table.tell_all({"do": "stop"})

    # ── asking ──

    def _ask_all(self, order: Message, timeout_s: float, doing: str) -> dict[Seat, Message]:
        return self._ask(dict.fromkeys(self._table.here(), order), timeout_s, doing)

    def _ask(self, orders: dict[Seat, Message], timeout_s: float, doing: str) -> dict[Seat, Message]:
        return self._table.ask(
            orders,
            timeout_s=timeout_s * (_PATIENCE_PLAYED if self._plan.listen_address else 1),
            doing=doing,
            say=self._say,
        )

    def _say(self, line: str) -> None:
        self._table.tell_all({"say": line})

    def _check_wanted(self) -> None:
        if not self._is_wanted:
            raise _NotWantedError


class _NotWantedError(Exception):
    """The host has stopped the meeting."""


def _trim(found: Together, name: str) -> Together:
    """Leave out what is well elsewhere: a large set's links are tens of thousands."""
    hosts = tuple(
        one if one.name == name else replace(one, readings=tuple(told for told in one.readings if told.verdict in {"warn", "fail"}))
        for one in found.hosts
    )  # fmt: skip
    links = tuple(one for one in found.links if one.outcome != "ok" or one.source == name)
    return replace(found, hosts=hosts, links=links, names=())
