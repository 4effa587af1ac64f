"""What a host does when the coordinator orders it: opens ports, tries all links, measures one, sends what its probes have read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias, final

from rankwise.base.host import is_loopback
from rankwise.doctor.examine import examine
from rankwise.doctor.host import Host, resolve
from rankwise.doctor.json_records import from_json, to_json
from rankwise.doctor.multi_host import wire
from rankwise.doctor.multi_host.all_reduce import describe_torch, run_ranks
from rankwise.doctor.multi_host.cluster_report import HostReport, Link, Listening, NameLookup, Outcome, Plane
from rankwise.doctor.multi_host.connection import in_thread
from rankwise.doctor.multi_host.link_probe import try_all
from rankwise.doctor.multi_host.link_speed import LinkServer, measure_link
from rankwise.doctor.multi_host.plan import Plan
from rankwise.doctor.multi_host.results import Tried
from rankwise.doctor.multi_host.wire import Message
from rankwise.doctor.network.gloo_nccl import choose_nccl_interfaces, find_gloo_address
from rankwise.doctor.network.interfaces import Interface, read_interfaces
from rankwise.doctor.probe import Probe

Handler: TypeAlias = Callable[[Message], Awaitable[Message]]
#: The addresses of names; None for those without an answer.
Lookups: TypeAlias = "dict[str, tuple[str, ...] | None]"

_PORTS, _PORTS_OF_MANY, _MANY = 3, 1, 32
#: A host that has accepted may be busy: its greeting may take longer than the connection.
_GREETING_S = 10.0
_NAMES_S, _NAMES_AT_ONCE = 6.0, 16
#: From the best to the worst: of several ports, the worst counts.
_OUTCOMES: tuple[Outcome, ...] = (
    "ok",
    "not tried",
    "no route",
    "unreachable",
    "reset",
    "refused",
    "timeout",
    "other host",
)


@final
class HostTasks:
    """What one host can do; its probes begin at once."""

    def __init__(self, host: Host, probes: Sequence[Probe], plan: Plan) -> None:
        self._host, self._plan = host, plan
        self._server: LinkServer | None = None
        self._name, self._count = "", 0
        self._handlers: dict[str, Handler] = {
            "open": self._open, "connect": self._connect, "readings": self._send_readings, "measure": self._measure,
            "all-reduce": lambda order: in_thread(partial(run_ranks, host, order)),
        }  # fmt: skip
        self._examined = asyncio.create_task(in_thread(partial(examine, host, probes)))

    async def do(self, order: Message, reached_at: str) -> Message:
        """Do what the coordinator asks for, and return the answer; ``reached_at`` is our address, by which we reached it."""
        kind = wire.text(order, "do")
        if kind == "open" and not wire.text(order, "own"):
            order = {**order, "own": reached_at}
        handler = self._handlers.get(kind)
        return {**(await handler(order) if handler else {}), "answer": kind}

    def close(self) -> None:
        """Close all ports; what was started ends with this process."""
        self._examined.cancel()
        if self._server is not None:
            self._server.close()

    # ── the orders ──

    async def _open(self, order: Message) -> Message:
        host, plan = self._host, self._plan
        self._name, self._count = wire.text(order, "name"), wire.whole(order, "count") or 1
        if self._server is not None:
            self._server.close()
        server = self._server = LinkServer(mark=wire.mark(plan.token), name=self._name, clock=host.clock)
        own = plan.listen_address or wire.text(order, "own")
        interfaces, gloo, nccl = await in_thread(self._find_addresses)
        at = own if is_loopback(gloo) and not plan.listen_address else gloo or own
        opened = [
            self._listen(server, "gloo", at),
            *([self._listen(server, "nccl", nccl)] if nccl not in {"", at} else []),
        ]
        if not opened[0].ports:  # Gloo's address can't be used: the link itself is tried all the same
            opened[0] = self._listen(server, "gloo", own)
        placed = [(one, str(address.ip)) for one in interfaces for address in one.addresses]
        report = HostReport(
            name=self._name, address=own, own_name=wire.clean_host_name(host.name), gloo_address=gloo, nccl_address=nccl,
            interfaces=tuple((wire.clean_name(one.name), ip) for one, ip in placed if one.kind != "loopback"),
            private=tuple(ip for one, ip in placed if one.kind == "container"), listening=tuple(one for one in opened if one.ports),
        )  # fmt: skip
        return {"host": to_json(report)}

    def _find_addresses(self) -> tuple[Sequence[Interface], str, str]:
        """Return the interfaces, and where Gloo and NCCL will listen; empty for NCCL if nobody uses it."""
        if self._plan.listen_address:
            return (), self._plan.listen_address, ""
        host, backend, interfaces = self._host, self._host.job.backend, self._host.ask(read_interfaces)
        # nvidia-smi is not asked: all hosts wait for this answer.
        has_nccl = backend == "nccl" or (backend != "gloo" and host.has("/dev/nvidiactl"))
        taken = choose_nccl_interfaces(host, interfaces) if has_nccl else []
        nccl = next((str(address.ip) for _, address in taken), "")
        return interfaces, find_gloo_address(host, interfaces), nccl

    def _listen(self, server: LinkServer, plane: Plane, address: str) -> Listening:
        ports: list[int] = []
        with suppress(OSError):  # not ours: no port there is sent to the others
            ports += [server.listen(address) for _ in range(_PORTS if self._count <= _MANY else _PORTS_OF_MANY)]
        return Listening(plane=plane, address=address, ports=tuple(ports))

    async def _connect(self, order: Message) -> Message:
        peers = [from_json(HostReport, one) for one in wire.entries(order, "hosts")]
        peers = [one for one in peers if one.name != self._name]
        wanted = {one.own_name for one in peers}
        names = {} if self._plan.listen_address else await resolve_all(sorted(wanted - {"", self._host.name}))
        targets = [
            Link(source=self._name, target=peer.name, plane=one.plane, address=one.address, port=port)
            for peer in peers for one in peer.listening for port in one.ports
        ]  # fmt: skip
        greeting_s = _GREETING_S * self._plan.timeout_factor
        tried = await try_all(targets, mark=wire.mark(self._plan.token), greeting_s=greeting_s)
        # Of the ports of one host and plane, the worst counts.
        by_outcome = sorted(tried, key=lambda one: _OUTCOMES.index(one.outcome))
        worst = {(one.target, one.plane): one for one in by_outcome}
        return {"tried": to_json(Tried(links=tuple(worst.values()), names=tuple(self._report_names(peers, names))))}

    def _report_names(self, peers: Sequence[HostReport], names: Lookups) -> Iterator[NameLookup]:
        lines = self._host.read("/etc/hosts").splitlines()
        written = {word for line in lines for word in line.partition("#")[0].split()[1:]}
        for peer in peers:
            got, name = names.get(peer.own_name), peer.own_name
            own = {peer.address, *(ip for _, ip in peer.interfaces)}
            # Of many hosts only what is wrong is reported: right ones are as many as there are pairs.
            if got is not None and (self._count <= _MANY or (got and not own & set(got))):
                yield NameLookup(source=self._name, name=name, target=peer.name, got=got, is_written=name in written)

    async def _send_readings(self, order: Message) -> Message:
        readings = await asyncio.shield(self._examined)
        answer: Message = {"readings": [one.to_json() for one in readings]}
        if order.get("torch"):
            answer["torch"] = [await in_thread(partial(describe_torch, self._host))]
        return answer

    async def _measure(self, order: Message) -> Message:
        found = await in_thread(partial(measure_link, order, self._name, self._host.clock))
        return {"measure": to_json(found)}


async def resolve_all(names: Sequence[str]) -> Lookups:
    """Look up names, many at a time and within some seconds; None for those without an answer."""
    gate, found = asyncio.Semaphore(_NAMES_AT_ONCE), dict[str, tuple[str, ...] | None].fromkeys(names)

    async def look_up(name: str) -> None:
        async with gate:
            found[name] = await in_thread(partial(resolve, name))

    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.gather(*map(look_up, names)), _NAMES_S)
    return found
