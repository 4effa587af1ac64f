"""What several hosts have found of each other, as JSON and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, cast

from rankwise.doctor.meeting.border import clean_all
from rankwise.doctor.meeting.together import (
    AllReduce,
    HostCard,
    Link,
    Measure,
    NameLook,
    Outcome,
    Plane,
    Together,
)
from rankwise.doctor.meeting.wire import entries, number, parts, text, texts, whole
from rankwise.doctor.reading import Reading

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwise.doctor.reading import Fact, Facts


def to_json(found: Together) -> dict[str, Fact]:
    """Return it as plain JSON: the names of the fields are those of the dataclasses, but for a reading's class."""
    return {
        "hosts": [_host_to_json(one) for one in found.hosts], "missing": list(found.missing), "links": _plain(found.links),
        "measures": _plain(found.measures), "all_reduce": _reduce_to_json(found.all_reduce) if found.all_reduce else None,
        "readings": [one.to_json() for one in found.readings], "took_s": found.took_s, "names": _plain(found.names),
        "doubled": [list(one) for one in found.doubled],
    }  # fmt: skip


def from_json(told: Facts) -> Together:
    """Read it again.

    Raises:
        ValueError: It is something else.
    """
    told = clean_all(told)
    if not isinstance(told.get("hosts"), list):
        raise ValueError(  # noqa: TRY004 - a text from elsewhere, not an argument of the wrong type
            f"this is not a result of several hosts: {told!r:.200}"
        )
    reduced = told.get("all_reduce")
    return Together(
        hosts=tuple(map(_read_host, parts(told, "hosts"))), missing=texts(told, "missing"), links=tuple(map(_read_link, parts(told, "links"))),
        measures=tuple(map(_read_measure, parts(told, "measures"))), all_reduce=_read_reduce(reduced) if isinstance(reduced, dict) else None,
        readings=tuple(Reading.from_json(one) for one in parts(told, "readings")), took_s=number(told, "took_s"),
        names=tuple(map(_read_name, parts(told, "names"))), doubled=tuple(_read_doubled(entries(told, "doubled"))),
    )  # fmt: skip


def _plain(facts: Iterable[Link | Measure | NameLook]) -> list[Fact]:
    found: list[Fact] = []
    for one in facts:
        fields: dict[str, Fact | tuple[str, ...]] = asdict(one)
        found.append(
            {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
        )
    return found


def _host_to_json(one: HostCard) -> dict[str, Fact]:
    return {
        "name": one.name, "address": one.address, "readings": [told.to_json() for told in one.readings], "clock_ahead_s": one.clock_ahead_s,
        "clock_error_s": one.clock_error_s, "lost": one.lost, "node_rank": one.node_rank, "num_hosts": one.num_hosts,
        "interfaces": [list(pair) for pair in one.interfaces], "gloo_address": one.gloo_address, "nccl_address": one.nccl_address,
        "opening": one.opening, "opening_out": one.opening_out, "private": list(one.private), "own_name": one.own_name,
    }  # fmt: skip


def _reduce_to_json(one: AllReduce) -> dict[str, Fact]:
    return {
        "backend": one.backend, "num_ranks": one.num_ranks, "latency_s": one.latency_s, "bytes_per_s": one.bytes_per_s,
        "size_bytes": one.size_bytes, "waited_s": [list(pair) for pair in one.waited_s], "why": one.why, "class_id": one.class_id,
    }  # fmt: skip


def _pairs(told: Facts, key: str) -> list[tuple[Fact, Fact]]:
    return [(one[0], one[1]) for one in entries(told, key) if isinstance(one, list) and len(one) == 2]


def _maybe(told: Facts, key: str) -> float | None:
    return number(told, key) if isinstance(told.get(key), int | float) else None


def _read_host(told: Facts) -> HostCard:
    return HostCard(
        name=text(told, "name"), address=text(told, "address"), readings=tuple(Reading.from_json(one) for one in parts(told, "readings")),
        clock_ahead_s=_maybe(told, "clock_ahead_s"), clock_error_s=number(told, "clock_error_s"), lost=text(told, "lost"),
        node_rank=whole(told, "node_rank"), num_hosts=whole(told, "num_hosts"),
        interfaces=tuple((str(name), str(ip)) for name, ip in _pairs(told, "interfaces")), gloo_address=text(told, "gloo_address"),
        nccl_address=text(told, "nccl_address"), opening=text(told, "opening"), own_name=text(told, "own_name"),
        opening_out=text(told, "opening_out"), private=texts(told, "private"),
    )  # fmt: skip


def _read_link(told: Facts) -> Link:
    return Link(
        source=text(told, "source"), target=text(told, "target"), plane=cast("Plane", text(told, "plane")), address=text(told, "address"),
        port=whole(told, "port") or 0, outcome=cast("Outcome", text(told, "outcome")), detail=text(told, "detail"),
        connect_s=number(told, "connect_s"),
    )  # fmt: skip


def _read_measure(told: Facts) -> Measure:
    return Measure(
        source=text(told, "source"), target=text(told, "target"), latency_s=number(told, "latency_s"), bytes_per_s=number(told, "bytes_per_s"),
        resent=_maybe(told, "resent"), tries=whole(told, "tries") or 1,
    )  # fmt: skip


def _read_reduce(told: Facts) -> AllReduce:
    waited = tuple(
        (str(name), float(late)) for name, late in _pairs(told, "waited_s") if isinstance(late, int | float)
    )
    return AllReduce(
        backend=text(told, "backend"), num_ranks=whole(told, "num_ranks") or 0, latency_s=number(told, "latency_s"),
        bytes_per_s=number(told, "bytes_per_s"), size_bytes=whole(told, "size_bytes") or 0, waited_s=waited, why=text(told, "why"),
        class_id=text(told, "class_id"),
    )  # fmt: skip


def _read_name(told: Facts) -> NameLook:
    return NameLook(
        source=text(told, "source"), name=text(told, "name"), target=text(told, "target"), got=texts(told, "got"),
        is_written=bool(told.get("is_written")),
    )  # fmt: skip


def _read_doubled(told: list[Fact]) -> Iterable[tuple[str, str, int]]:
    for one in told:
        if isinstance(one, list) and len(one) == 3 and isinstance(one[2], int):
            yield str(one[0]), str(one[1]), one[2]
