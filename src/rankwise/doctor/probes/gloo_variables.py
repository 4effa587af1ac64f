"""The variables of Gloo: do they name interfaces of this host, in the right form.

**Why it matters.** `GLOO_SOCKET_IFNAME` holds whole names, separated by commas. A name that this host lacks, one without an address,
a blank, or NCCL's `^` and `=`, end every rank: `Unable to find address for: ^lo`.

**How it is checked.** The values are split exactly as torch does it, and compared with the interfaces.

**What to do.** Set it to a name that `ip -br addr` shows on this host, or unset it. Where the names differ from host to host, each one
needs its own value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankwise.doctor.host import Host
from rankwise.doctor.network.gloo_nccl import rate_mistake, split_names
from rankwise.doctor.network.interfaces import Interface, describe_interface, read_interfaces, suggest_name
from rankwise.doctor.probe import Probe, Reading, ok, warn


def look(host: Host) -> Iterator[Reading]:
    wrong = [*_judge_names(host)]
    names = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
    info = ", ".join(f"{name}={host.env[name]}" for name in names if name in host.env)
    yield from wrong or [ok(info or "no variable of Gloo is set")]


def _judge_names(host: Host) -> Iterator[Reading]:
    value = host.env.get("GLOO_SOCKET_IFNAME", "")
    interfaces = host.ask(read_interfaces) if value else ()
    for name in split_names(value):
        info = _find_fault(name, interfaces)
        one = next((one for one in interfaces if one.name == name), None)
        if info:
            yield Reading(
                rate_mistake(host, "gloo"), f"GLOO_SOCKET_IFNAME={value}: {info}", f"every rank that uses Gloo fails: `Unable to find address for: {name}`",
                _set(host, near=name), "I6"
            )  # fmt: skip
        elif one is not None and host.job.num_nodes > 1 and one.kind in {"loopback", "container"}:
            yield Reading(
                rate_mistake(host, "gloo"), f"GLOO_SOCKET_IFNAME={value}: {describe_interface(one)} is local to this host",
                "the other hosts don't reach it: `Gloo connectFullMesh failed`, or a hang", _set(host), "I5"
            )  # fmt: skip
        elif one is not None and not one.is_up:
            yield warn(
                f"GLOO_SOCKET_IFNAME={value}: {name} is down", "no host can reach this one there: a hang", f"sudo ip link set dev {name} up"
            )  # fmt: skip


def _find_fault(name: str, interfaces: Sequence[Interface]) -> str:
    """Describe what is wrong with the name of an interface, by Gloo's rules; empty for nothing."""
    one = next((one for one in interfaces if one.name == name), None)
    if one is not None:
        return "" if one.addresses else f"{name} has no address"
    if not name:
        return "there is an empty name between two commas"
    if name[0] in "^=":
        return f"{name!r} is NCCL's syntax, which Gloo does not know"
    if name != name.strip(" \t'\""):
        return f"there are spaces or quotes in the name {name!r}"
    return f"this host has no interface {name}"


def _set(host: Host, *, near: str = "") -> str:
    name = suggest_name(host, host.ask(read_interfaces), near)
    return f"export GLOO_SOCKET_IFNAME={name}" if name else "unset GLOO_SOCKET_IFNAME"


PROBE = Probe("gloo-variables", "variables of Gloo", "environment", "instant", look, classes=("I6", "I5"))
