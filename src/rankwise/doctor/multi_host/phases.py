"""What the coordinator does: it waits for the hosts, gives them their orders one after the other, and sends all of them the result."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias, cast, final

from rankwise.doctor.examine import BOUND_S, collect_facts, compare_hosts
from rankwise.doctor.host import Host
from rankwise.doctor.json_records import to_json
from rankwise.doctor.multi_host.all_reduce import find_obstacle, plan_reduce, read_reduce
from rankwise.doctor.multi_host.cluster_report import AllReduce, ClusterReport, HostReport, Way
from rankwise.doctor.multi_host.connection import in_thread
from rankwise.doctor.multi_host.coordinator import Coordinator, OwnHostLostError
from rankwise.doctor.multi_host.coordinator_client import find_rival
from rankwise.doctor.multi_host.judging import judge
from rankwise.doctor.multi_host.judging_speed import find_suspects
from rankwise.doctor.multi_host.peer import Peer, make_names_distinct, order_peers, refuse
from rankwise.doctor.multi_host.plan import JoinError, Plan
from rankwise.doctor.multi_host.results import Results
from rankwise.doctor.multi_host.wire import INTERRUPTED, INVALID_ANSWER, Message
from rankwise.doctor.probe import Probe

Take: TypeAlias = Callable[[Peer, Message], None]
_OPEN_S, _ALL_REDUCE_S = 30.0, 100.0
#: At the end all hosts are waited for, so long at most; those that are silent are lost before.
END_S = 30.0
_FIRST_SAY_S, _SAY_S, _LOOK_S = 2.0, 10.0, 1.0
#: Trying all links takes as long for each as one that drops everything, and some more where there are many.
_CONNECT_S, _CONNECT_S_PER_HOST = 45.0, 0.5
#: For so long all links are measured; then again, alone, those that seem slow: a busy host must not look like a slow
#: link.
_MEASURE_S, _AGAIN_S, _TRIES = 15.0, 10.0, 3
_MEASURE_SLACK_S = 25.0
#: A larger set's hosts are sent what is wrong, and not all that is right.
MANY_HOSTS = 32


@final
class Phases:
    """One rendezvous, from the arrival of the hosts to the result."""

    def __init__(self, host: Host, probes: Sequence[Probe], plan: Plan) -> None:
        self._host, self._probes, self._plan, self._clock = host, probes, plan, host.clock
        self._coordinator = Coordinator(host, plan)
        self._coordinator.on_loss = lambda peer: self._coordinator.say(f"{peer.name} was lost: {peer.lost}")
        #: By it our own host is known.
        self.secret = self._coordinator.admission.secret
        #: What the others are told if `run` is cancelled.
        self.why = INTERRUPTED
        self._begin_s = host.clock.monotonic()
        self._numbered: list[Peer] = []
        self._found = Results()

    async def run(self, listener: socket.socket) -> None:
        """Coordinate until all hosts have their results, or have been told why there are none."""
        serving = asyncio.create_task(self._coordinator.serve(listener))
        gone = f"{self._host.name}, the host of the rendezvous, is gone"
        finding = asyncio.create_task(find_rival(self._host, self._plan, self.secret))
        try:
            await self._wait_arrivals(finding)
            await self._run_phases()
        except JoinError as rival:
            hint = rival.fix.removeprefix("# ")
            for own in (one for one in self._coordinator.here() if one.is_own):
                self._coordinator.tell(own, refuse(rival.message, hint, rival.class_id))
            await self._coordinator.break_off(f"{gone}: {rival.message}", hint)
        except asyncio.CancelledError:
            await self._coordinator.break_off(f"{gone}: {self.why}", "start all hosts again")
        except OwnHostLostError as error:
            await self._coordinator.break_off(f"{gone}: {error}", "start all hosts again")
        except Exception as error:  # noqa: BLE001 - all hosts wait for us: they must be told
            why = f"the rendezvous failed: {type(error).__name__}: {error}"
            await self._coordinator.break_off(why, "this is a bug in rankwise, please report it")
        finally:
            serving.cancel()
            finding.cancel()
            await asyncio.wait({serving, finding})
            await self._coordinator.close()
            listener.close()

    # ── arrival ──

    async def _wait_arrivals(self, finding: asyncio.Task[JoinError | None]) -> None:
        coordinator, loop = self._coordinator, asyncio.get_running_loop()
        admission = coordinator.admission
        end_s, say_s = loop.time() + self._plan.arrival_timeout_s, loop.time() + _FIRST_SAY_S
        while loop.time() < end_s:
            if finding.done() and (rival := finding.result()) is not None:
                raise rival
            here = coordinator.here()
            # Where the hosts disagree on how many are to come, the most.
            claimed = [one.num_hosts or 0 for one in here]
            wanted = max([*claimed, self._plan.num_hosts or 0]) or len(self._plan.expected)
            if any(one.is_own for one in here) and wanted and len(here) >= wanted:
                break
            if loop.time() >= say_s:
                say_s += _SAY_S
                missing = ", ".join(admission.list_missing(here)) or admission.describe_vacancy()
                count = f"{len(here)} of {wanted or 'an unknown number'}"
                coordinator.say(f"waiting for {missing} ({count} are here)")
            await coordinator.wait_change(min(end_s - loop.time(), say_s - loop.time(), _LOOK_S))
        admission.is_open = False
        self._numbered = coordinator.peers[:] = order_peers(coordinator.here(), self._plan)
        make_names_distinct(self._numbered)
        missing_hosts = admission.list_missing(self._numbered)
        self._found = Results(self._numbered, missing_hosts, admission.doubled)

    # ── the phases ──

    async def _run_phases(self) -> None:
        await self._open()
        bound_s = _CONNECT_S + _CONNECT_S_PER_HOST * len(self._numbered)
        known = [self._found.hosts[one.name] for one in self._coordinator.here()]
        order: Message = {"do": "connect", "hosts": [_drop_defaults(one) for one in known]}
        orders = dict.fromkeys(self._coordinator.here(), order)
        await self._take(orders, bound_s, "trying all links", self._found.take_links)
        bounds = [BOUND_S[one.speed] for one in self._probes] + [BOUND_S["slow"]] * self._plan.all_reduce
        order = {"do": "readings", "torch": self._plan.all_reduce}
        orders = dict.fromkeys(self._coordinator.here(), order)
        bound_s = max(bounds, default=0.0) + 10.0
        await self._take(orders, bound_s, "looking at each host", self._found.take_readings)
        if self._plan.measure:
            await self._measure()
            await self._measure_again()
        await self._send_result(await self._reduce() if self._plan.all_reduce else None)

    async def _open(self) -> None:
        others = [one.arrived_at for one in self._numbered if not one.is_own]
        orders: dict[Peer, Message] = {}
        for peer in self._coordinator.here():
            # At which of our addresses the others arrived: that is the one by which we can be reached.
            own = (max(set(others), key=others.count) if others else peer.address) if peer.is_own else ""
            orders[peer] = {"do": "open", "name": peer.name, "count": len(self._numbered), "own": own}
        await self._take(orders, _OPEN_S, "opening ports", self._found.take_opened)

    async def _measure(self) -> None:
        count = len(self._numbered)
        most = max(4, int(_MEASURE_S / 2 / max(self._plan.seconds_per_link, 0.01)))
        begin_s = self._clock.monotonic()
        for pairs in plan_rounds(count, most=None if count <= MANY_HOSTS else most):
            named = [(self._numbered[a].name, self._numbered[b].name) for a, b in pairs]
            for ways in (named, [(b, a) for a, b in named]):
                await self._measure_ways(ways)
            # Slow links take longer than they should. All hosts have been measured equally often at any time.
            if self._clock.monotonic() - begin_s > 1.3 * _MEASURE_S:
                break

    async def _measure_again(self) -> None:
        """Measure again, alone, what seems bad: no host is blamed that was not seen to be bad several times."""
        begin_s = self._clock.monotonic()
        for _ in range(_TRIES - 1):
            for one in find_suspects(self._found.to_report()):
                if self._clock.monotonic() - begin_s > _AGAIN_S:
                    return
                # Loss that stays at half the speed, and for longer, is none that we made ourselves.
                pace = 0.5 * one.bytes_per_s if one.is_lossy else 0.0
                await self._measure_ways([one.way], pace=pace, times=3 if one.is_lossy else 1)

    async def _measure_ways(self, ways: Sequence[Way], pace: float = 0.0, times: int = 1) -> None:
        orders, here = dict[Peer, Message](), {one.name: one for one in self._coordinator.here()}
        for source, target in ways:
            place = self._found.open_at.get((source, target))
            if place and source in here and target in here:
                orders[here[source]] = {
                    "do": "measure", "target": target, "address": place[0], "port": place[1], "pace": pace,
                    "seconds": times * self._plan.seconds_per_link,
                }  # fmt: skip
        await self._take(orders, _MEASURE_SLACK_S, "measuring", self._found.take_measure)

    async def _reduce(self) -> AllReduce:
        found = self._found
        here = {one.name: found.torch.get(one.name, {}) for one in self._numbered if one.is_here}
        report = found.to_report()
        if (obstacle := find_obstacle(report, here)) is not None:
            return obstacle
        orders = plan_reduce(here, report.hosts[0].address)
        peers = {one.name: one for one in self._numbered}
        answers = await self._coordinator.ask(
            {peers[name]: order for name, order in orders.items()}, timeout_s=_ALL_REDUCE_S,
            doing="running torch's all-reduce", is_joint=True,
        )  # fmt: skip
        lost = [name for name in orders if not peers[name].is_here]
        return read_reduce(orders, {peer.name: answer for peer, answer in answers.items()}, lost)

    async def _send_result(self, all_reduce: AllReduce | None) -> None:
        found = replace(self._found.to_report(), all_reduce=all_reduce)
        # Of a thousand hosts, a million links: all that takes long leaves the time to send signs of life.
        facts = {one.name: collect_facts(one.readings) for one in found.hosts}
        readings = await in_thread(lambda: (*judge(found, self._plan), *compare_hosts(self._probes, facts)))
        found = replace(found, readings=readings, took_s=self._clock.monotonic() - self._begin_s)
        is_trimmed = len(self._numbered) > MANY_HOSTS
        for peer in self._coordinator.here():
            own = _trim(found, peer.name) if is_trimmed and not peer.is_own else found
            self._coordinator.tell(peer, {"result": to_json(own)})
            await asyncio.sleep(0)
        await self._coordinator.wait_until_left(END_S)

    async def _take(self, orders: dict[Peer, Message], timeout_s: float, doing: str, take: Take) -> None:
        """Give orders, and take the answers; a host that sends what no doctor would is lost, and no other one."""
        for peer, answer in (await self._coordinator.ask(orders, timeout_s=timeout_s, doing=doing)).items():
            try:
                take(peer, answer)
            except ValueError as error:
                why = f"{INVALID_ANSWER} ({error}): it is not a doctor of this version"
                self._coordinator.lose(peer, why)
            await asyncio.sleep(0)


def _drop_defaults(report: HostReport) -> Message:
    """Return a host's report without what is not known of it: all hosts are sent that of each."""
    return {key: value for key, value in cast("Message", to_json(report)).items() if value not in (None, "", [])}


def _trim(found: ClusterReport, name: str) -> ClusterReport:
    """Leave out what is well elsewhere: a large set's links are tens of thousands."""
    hosts = tuple(
        one if one.name == name else replace(one, readings=tuple(it for it in one.readings if it.is_bad))
        for one in found.hosts
    )  # fmt: skip
    links = tuple(one for one in found.links if one.outcome != "ok" or one.source == name)
    return replace(found, hosts=hosts, links=links, names=())


def plan_rounds(count: int, *, most: int | None = None) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of the numbers below ``count`` (circle method): each pair meets once, and no host is in two pairs of one round.

    With ``most`` there are so many rounds at most: each host then has so many partners, near ones and far ones.
    """
    size = count + count % 2
    rounds = []
    for turn in range(size - 1):
        pairs = [(size - 1, turn)]
        pairs += [((turn + step) % (size - 1), (turn - step) % (size - 1)) for step in range(1, size // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
    if most is None or len(rounds) <= most:
        return rounds
    return [rounds[index * len(rounds) // most] for index in range(max(1, most))]
