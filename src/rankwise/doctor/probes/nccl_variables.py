"""The variables of NCCL: their names, their form, and what is left over from debugging.

**Why it matters.** NCCL silently ignores a name that it does not know, and reads most words as 0: `NCCL_IB_DISABLE=true` disables nothing,
`NCCL_BUFFSIZE=4M` is 4 bytes. `NCCL_SOCKET_IFNAME` that matches no interface ends every rank: `no socket interface found`. A switch that
was set for debugging, such as `NCCL_P2P_DISABLE=1`, makes training slow for as long as it is set.

**How it is checked.** The environment, the user's file (`NCCL_CONF_FILE`, or `~/.nccl.conf`) and `/etc/nccl.conf` are read in NCCL's
order, and compared with a table of the variables up to NCCL 2.32. Of several hosts, values that must agree are compared. `NCCL_PSK` is
never shown.

**What to do.** Set the variable as reported, on all hosts, or unset it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rankwise.doctor.differences import report_difference
from rankwise.doctor.host import Host
from rankwise.doctor.network import gloo_nccl
from rankwise.doctor.network.gloo_nccl import Setting
from rankwise.doctor.network.interfaces import read_interfaces, suggest_name
from rankwise.doctor.probe import Fact, Facts, Probe, Reading, ok, warn
from rankwise.doctor.units import join_names
from rankwise.doctor.variables.masking import mask_fact, mask_value
from rankwise.doctor.variables.table import Variable, find, report_misspellings

Settings = Mapping[str, Setting]

#: Not NCCL's own: its plugins', its tests', and where builds look for it.
_FOREIGN = re.compile(
    r"NCCL_(OFI|FASTRAK|GPUDIRECTTCPX|UCX|SHARP|TUNER|PROFILER|INSPECTOR|TESTS|GIN|RMA|IB_RESILIENCY|SYM|CE|CFT|TCPX|GVNIC|NCP|MSCCL|LIB|INCLUDE|HOME|ROOT|"
    r"VERSION|PATH|DIR|BUILD|PLUGIN|CFLAGS|LDFLAGS|SRC|STATIC)"
)
#: Of the hosts themselves, or harmless: these may differ from host to host. PSK is a secret, and never reported.
_MAY_DIFFER = re.compile(
    r"NCCL_(DEBUG\w*|SOCKET_IFNAME|OOB_NET_IFNAME|IB_HCA|IB_GID_INDEX|TOPO_\w+|GRAPH_\w*FILE\w*|CONF_FILE|HOSTID|PSK|RAS_ADDR|"
    r"PROXY_CPUSET|VERSION|HOME|ROOT|PATH|SET_THREAD_NAME)"
)
_NUMBER = re.compile(r"\s*[+-]?(0[xX][0-9a-fA-F]+|\d+)$")
#: Below this much of a buffer, NCCL does little but wait.
_SMALL_BUFFER_BYTES = 64 << 10


def look(host: Host) -> Iterator[Reading]:
    values: dict[str, Fact] = {}
    settings: dict[str, Setting] = {}
    for name, one in gloo_nccl.read_settings(host).items():
        if re.match(r"NC+[CIL]*_(?!PSK)", name):
            is_known = find(name) is not None
            settings[name] = replace(one, value=mask_value(name, one.value, is_known=is_known))
            if not _MAY_DIFFER.match(name):
                values[name] = mask_fact(name, one.value, is_known=is_known)
    checks = (_judge_spelling, _judge_values, _judge_devices, _judge_leftovers)
    found = [one for check in checks for one in check(host, settings)]
    info = ", ".join(f"{name}={one.value}{one.place}" for name, one in settings.items())
    info = info or "no variable of NCCL is set"
    yield ok(info, values=values)
    yield from found


def _judge_spelling(host: Host, settings: Settings) -> Iterator[Reading]:  # noqa: ARG001 - as the other checks
    for name, one in settings.items():
        known = find(name)
        if known is not None and known.kind == "replaced by":
            yield warn(
                f"{name}={one.value}{one.place} has an old name", "newer versions of torch and NCCL no longer read it", f"unset {name}  # now: {known.words[0]}"
            )  # fmt: skip
    yield from report_misspellings(name for name in settings if not _FOREIGN.match(name))


def _judge_values(host: Host, settings: Settings) -> Iterator[Reading]:
    for name, one in settings.items():
        if not one.value or name in {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"}:
            continue
        form = find(name)
        if one.value[0] in "'\"":
            why = "shells take quotes away; env files, YAML and nccl.conf do not"
            fault = "the quotes are part of the value"
        else:
            fault, why = _find_fault(host, one.value, form) if form else ("", "")
        if fault:
            yield warn(f"{name}={one.value}{one.place}: {fault}", why, _correct(name, one))


def _find_fault(host: Host, value: str, form: Variable) -> tuple[str, str]:
    """Return what is wrong with a value, and what comes of it; empty for nothing."""
    is_number = _NUMBER.match(value) is not None
    fault, why = "", "NCCL ignores it"
    match form.kind:
        case "file":
            fault, why = "" if host.has(value) else f"there is no file {value}", "NCCL continues without it"
        case "number":
            return _find_wrong_number(value, form)
        case "terms":
            # An algorithm or protocol, and the collective that it is for: ``ring,tree``, ``^tree``,
            # ``allreduce:tree;broadcast:ring``.
            terms = [term.rpartition(":")[2].lstrip("^") for term in value.split(";")]
            fault = _find_unknown([word.strip() for term in terms for word in term.split(",")], form)
            why = "NCCL refuses to start, or chooses among what is left, by its version"
        case "list":
            fault = _find_unknown([one.lstrip("^") for one in value.split(",")], form)
        case "word" | "exact":
            fault = _find_unknown([value], form)
        case "word or number" if not is_number:
            fault = _find_unknown([value], form)
    return fault, why


def _find_unknown(words: Sequence[str], form: Variable) -> str:
    is_exact = form.kind == "exact"
    known = form.words if is_exact else tuple(word.lower() for word in form.words)
    lost = next((word for word in words if (word if is_exact else word.lower()) not in known), None)
    return "" if lost is None else f"{lost or 'nothing'} is not one of {', '.join(form.words)}"


def _find_wrong_number(value: str, form: Variable) -> tuple[str, str]:
    if not _NUMBER.match(value):
        digits = re.match(r"\s*[+-]?\d+", value)
        read = digits[0].strip() if digits else "0"
        return f"this is not a whole number, and NCCL reads it as {read}", "what was meant does not happen"
    # As strtoll reads it: 0x10 is 16, and 010 is 8.
    number = int(value, 8 if re.match(r"\s*[+-]?0[0-7]+$", value) else 0 if "x" in value.lower() else 10)
    if not form.least <= number <= form.most:
        return f"it may be {form.least} to {form.most}", "NCCL ignores it, or takes the nearest number"
    if form.name == "NCCL_BUFFSIZE" and 0 < number < _SMALL_BUFFER_BYTES:
        return (
            f"a buffer of {number} bytes",
            "the number counts bytes (default 4194304): transfers become very slow, or fail",
        )
    return "", ""


def _correct(name: str, one: Setting) -> str:
    if one.source:
        return f"# take {name} out of {one.source}"
    bare, form = one.value.strip().strip("'\""), find(name)
    is_number = form is not None and form.kind == "number"
    if one.value[0] in "'\"" and bare and not (form and is_number and _find_wrong_number(bare, form)[0]):
        return f"export {name}={shlex.quote(bare)}"
    return f"unset {name}" + "  # or a whole number" * is_number


def _judge_devices(host: Host, settings: Settings) -> Iterator[Reading]:
    yield from _judge_interfaces(host, settings)
    devices = host.names("/sys/class/infiniband")
    hca, net = settings.get("NCCL_IB_HCA"), settings.get("NCCL_NET")
    if hca and devices and len(hca.value) > 1 and not gloo_nccl.match_names(hca.value, devices):
        yield warn(
            f"NCCL_IB_HCA={hca.value}{hca.place} matches none of {', '.join(devices)}", "NCCL uses TCP instead of InfiniBand or RoCE, many times slower",
            f"export NCCL_IB_HCA=={devices[0]}"
        )  # fmt: skip
    if net and net.value.upper() == "IB" and not devices:
        yield Reading(
            gloo_nccl.rate_mistake(host, "nccl"), f"NCCL_NET=IB{net.place}, and this host has no InfiniBand device",
            "every rank fails when NCCL starts: `Failed to initialize any NET plugin`", "unset NCCL_NET"
        )  # fmt: skip


def _judge_interfaces(host: Host, settings: Settings) -> Iterator[Reading]:
    given = {key: settings[key] for key in ("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY") if key in settings}
    interfaces = host.ask(read_interfaces)
    if not given or gloo_nccl.choose_nccl_interfaces(host, interfaces):
        return
    info = ", ".join(f"{name}={one.value}{one.place}" for name, one in given.items())
    usable = [one.name for one in interfaces if one.is_up and one.addresses]
    typed = given["NCCL_SOCKET_IFNAME"].value if "NCCL_SOCKET_IFNAME" in given else ""
    fits = bool(typed) and bool(gloo_nccl.match_names(typed, usable))
    name = "" if fits or not typed else suggest_name(host, interfaces, typed)
    yield Reading(
        gloo_nccl.rate_mistake(host, "nccl"), f"{info} matches no interface that is up with an address; there are: {join_names(usable) or 'none'}",
        "every rank fails when NCCL starts: `Bootstrap : no socket interface found`",
        f"export NCCL_SOCKET_IFNAME={name}" if name else f"unset {' '.join(['NCCL_SOCKET_FAMILY'] if fits else given)}"
    )  # fmt: skip


def _judge_leftovers(host: Host, settings: Settings) -> Iterator[Reading]:
    """Report fast ways that are switched off where they are there."""
    has_ib = bool(gloo_nccl.list_rdma_devices(host))
    is_alone = len(host.names("/proc/driver/nvidia/gpus")) == 1
    off = {
        "NCCL_P2P_DISABLE": ("1", "GPUs of this host copy through its memory, not directly"),
        "NCCL_P2P_LEVEL": ("LOC", "GPUs of this host copy through its memory, not directly"),
        "NCCL_SHM_DISABLE": ("1", "ranks of this host communicate through the network"),
        "NCCL_IB_DISABLE": ("1", "hosts use TCP, though there is InfiniBand or RoCE"),
        "NCCL_NET_GDR_LEVEL": ("LOC", "the network card copies through the host's memory"),
    }
    for name, (value, why) in off.items():
        one = settings.get(name)
        matters = has_ib if name in {"NCCL_IB_DISABLE", "NCCL_NET_GDR_LEVEL"} else not is_alone
        if one is not None and one.value.upper() == value and gloo_nccl.uses_nccl(host) and matters:
            yield warn(
                f"{name}={one.value}{one.place}", f"{why}: slow; if it was set for debugging, remove it",
                f"# take {name} out of {one.source}" if one.source else f"unset {name}"
            )  # fmt: skip


def _compare(facts: Mapping[str, Facts]) -> Iterator[Reading]:
    by_host: dict[str, dict[str, str]] = {}
    for host, info in facts.items():
        given = info.get("values")
        by_host[host] = {name: str(value) for name, value in given.items()} if isinstance(given, dict) else {}
    for name in sorted({name for values in by_host.values() for name in values}):
        yield from report_difference(
            {host: {name: values.get(name, "not set") or "none"} for host, values in by_host.items()}, name, f"{name} differs",
            "ranks may choose different ways for one collective: a hang at the first one, or `unhandled system error`",
            f"unset {name}  # on all hosts, or set it to one value on all of them",
        )  # fmt: skip


PROBE = Probe("nccl-variables", "variables of NCCL", "environment", "instant", look, classes=("I7",), compare=_compare)
