"""Reads and validates what a host answers to the first orders: where it listens, how a link went, what its probes have found."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from rankwise.doctor.reading import Reading
from rankwise.doctor.rendezvous.cluster_report import Link, Outcome, Plane
from rankwise.doctor.rendezvous.sanitize import (
    BadMessageError,
    clean_host_name,
    clean_name,
    one_line,
    read_address,
    read_port,
)
from rankwise.doctor.rendezvous.wire import entries, number, parts, text

if TYPE_CHECKING:
    from rankwise.doctor.reading import Fact
    from rankwise.doctor.rendezvous.wire import Message

_PLANES: tuple[Plane, ...] = get_args(Plane)
_OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
#: A host has no more of these than that: a stranger could name thousands, and all others would try them.
_MOST_PLACES, _MOST_PORTS, _MOST_INTERFACES, _MOST_READINGS = 8, 16, 4096, 4096
_MOST_DETAIL, _MOST_FIX = 300, 8000
_CLASS, _PROBE = re.compile(r"[A-Z]\d{1,3}"), re.compile(r"[a-z0-9-]{1,60}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a host listens for one plane."""

    plane: Plane
    address: str
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Where a host listens; the fields of `cluster_report.HostCard` have the same meanings."""

    planes: tuple[Place, ...] = ()
    interfaces: tuple[tuple[str, str], ...] = ()
    gloo: str = ""
    nccl: str = ""
    reached_at: str = ""
    own_name: str = ""
    private: tuple[str, ...] = ()

    def planes_to_json(self) -> list[Fact]:
        """Return the places as they are sent to the other hosts."""
        return [{"plane": one.plane, "address": one.address, "ports": list(one.ports)} for one in self.planes]


def read_opened(message: Message) -> Opened:
    """Read where a host listens.

    Raises:
        BadMessageError: No doctor would tell this.
    """
    interfaces = [
        (clean_name(text(one, "name")), read_address(one.get("ip"))) for one in parts(message, "interfaces")
    ]
    return Opened(
        planes=tuple(_read_place(one) for one in parts(message, "planes")[:_MOST_PLACES]), interfaces=tuple(interfaces[:_MOST_INTERFACES]),
        gloo=read_address(message.get("gloo")), nccl=read_address(message.get("nccl")), reached_at=read_address(message.get("reached_at")),
        own_name=clean_host_name(text(message, "own_name")),
        private=tuple(read_address(one) for one in entries(message, "private")[:_MOST_INTERFACES]),
    )  # fmt: skip


def _read_place(message: Message) -> Place:
    plane = read_plane(message)
    # The master's address is mostly a name, which each host looks up for itself.
    address = text(message, "address")
    address = clean_host_name(address) if plane == "master" and ":" not in address else read_address(address)
    ports = tuple(read_port(one) for one in entries(message, "ports")[:_MOST_PORTS])
    if not address:
        raise BadMessageError("it listens at no address")
    return Place(plane=plane, address=address, ports=ports)


def read_plane(message: Message) -> Plane:
    """Read for whom a place is.

    Raises:
        BadMessageError: There is no such plane.
    """
    known = next((one for one in _PLANES if one == message.get("plane")), None)
    if known is None:
        raise BadMessageError(f"{message.get('plane')!r:.60} is not a kind of port")
    return known


def read_link(message: Message, source: str, target: str) -> Link:
    """Read how a connection went.

    Args:
        message: What was told.
        source: Who tells it.
        target: To whom it was.

    Raises:
        BadMessageError: No doctor would tell this.
    """
    outcome = next((one for one in _OUTCOMES if one == message.get("outcome")), None)
    if outcome is None:
        raise BadMessageError(f"{message.get('outcome')!r:.60} is not an outcome of a connection")
    return Link(
        source=source, target=target, plane=read_plane(message), address=read_address(message.get("address")), port=read_port(message.get("port")),
        outcome=outcome, detail=one_line(text(message, "detail"), _MOST_DETAIL), connect_s=max(0.0, number(message, "s")),
    )  # fmt: skip


def read_readings(message: Message, source: str) -> tuple[Reading, ...]:
    """Read what probes have read on a host.

    Args:
        message: What was told.
        source: Who tells it: the readings are of that host, whatever they say.

    Raises:
        BadMessageError: They are no readings.
    """
    try:
        found = [Reading.from_json(one) for one in parts(message, "readings")[:_MOST_READINGS]]
    except ValueError as error:
        raise BadMessageError(f"it sent something that is not a reading: {error}") from error
    return tuple(
        replace(
            one, hosts=(source,), what=one_line(one.what), why=one_line(one.why), fix=one.fix[:_MOST_FIX],
            class_id=one.class_id if _CLASS.fullmatch(one.class_id) else "", probe=one.probe if _PROBE.fullmatch(one.probe) else "",
        )
        for one in found
    )  # fmt: skip
