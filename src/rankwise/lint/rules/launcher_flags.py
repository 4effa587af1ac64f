"""Flags of a launcher."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankwise.lint.finding import Found
from rankwise.lint.rule import rule
from rankwise.lint.shell.flags import TABLES, late_flags, meant_flag
from rankwise.lint.shell.study import Shell, typed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.shell.model import Flag, Launch


@rule("RW701", "error", "L2", "the launcher has no such flag", looks_at="shell", fixable=True)
def unknown_launcher_flag(shell: Shell) -> Iterator[Found]:
    for launch in shell.launches:
        for flag in launch.flags:
            if launch.launcher in TABLES and not flag.is_known:
                yield from _tell(launch, flag)


def _tell(launch: Launch, flag: Flag) -> Iterator[Found]:
    table = TABLES[launch.launcher]
    takers = [one for one in launch.flags if one.is_known and one.name in table.values]
    if any(one.value is None or one.value.head.endswith(".py") for one in takers):
        return  # a missing value is reported elsewhere; this may be the script's flag
    meant = meant_flag(launch.launcher, flag.spelled)
    if meant is None and not table.is_complete:
        return
    _, near = table.find(flag.spelled)
    message = f"{launch.label} has no flag {flag.spelled}"
    if near:
        message = f"{flag.spelled} is short for several flags of {launch.label}: {', '.join(near[:4])}"
    perhaps = meant_flag(launch.launcher, flag.spelled, likeness=0.6)
    fix = (
        f"write {meant}"
        if meant
        else f"did you mean {perhaps}?"
        if perhaps
        else f"remove it, or put it after the script if it is the script's; see `{launch.label} --help`"
    )
    edits = typed(flag.word, flag.spelled, meant) if meant else ()
    yield Found(flag.word.span, message, fix, edits=edits)


@rule("RW702", "error", "L3", "a launcher's flag after the script goes to the script", looks_at="shell")
def launcher_flag_behind_script(shell: Shell) -> Iterator[Found]:
    for launch in shell.launches:
        if launch.script is None or launch.is_ended or _starts_ranks_itself(launch):
            continue
        yield from _late(shell, launch)


def _starts_ranks_itself(launch: Launch) -> bool:
    """Whether what Python runs may be a launcher: a module, or a script of that name."""
    text = (launch.script.text or "launch") if launch.script else ""
    return launch.launcher == "python" and (launch.flag("module") is not None or "launch" in text)


def _late(shell: Shell, launch: Launch) -> Iterator[Found]:
    own = late_flags(launch.launcher)
    if any((word.text or "").startswith("torch.distributed") for word in launch.args):
        return  # a launcher after the script is another mistake
    for word in launch.args:
        spelled = word.head.partition("=")[0]
        name = spelled.lstrip("-").replace("-", "_")
        if not spelled.startswith("--") or name not in own or launch.flag(name):
            continue
        known = shell.knows(launch, name)
        if known:
            continue
        script = launch.script.raw if launch.script else "the script"
        if launch.launcher == "python":
            message = f"{spelled} is a launcher's flag, but python passes it to {script}: one process starts"
            fix = f"torchrun {word.raw} … {script}"
            yield Found(word.span, message, fix, severity="error" if known is False else "warning")
        else:
            message = f"{spelled} comes after {script}, so {script} gets it and {launch.label} does not"
            yield Found(word.span, message, f"put it before {script}")
        return


_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


@rule("RW703", "error", "L4", "a launcher's flag has no value, or an invalid one", looks_at="shell")
def launcher_flag_value(shell: Shell) -> Iterator[Found]:
    for launch in shell.launches:
        if launch.is_elastic:
            for flag in launch.flags:
                yield from _flag(launch, flag)
    for setting in shell.reading.settings:
        if setting.name == "MASTER_PORT" and (wrong := _port(setting.value.text or "0")):
            yield Found(setting.span, f"MASTER_PORT={setting.value.text}: {wrong}", "a free port from 1024 to 65535")


def _flag(launch: Launch, flag: Flag) -> Iterator[Found]:
    table = TABLES[launch.launcher]
    if not flag.is_known:
        return
    if flag.name in table.switches:
        if flag.value is not None:
            yield Found(
                flag.word.span,
                f"{flag.spelled} takes no value, but gets {flag.value.raw!r}",
                f"write {flag.spelled} alone",
            )
        return
    if flag.value is None:
        yield Found(flag.word.span, f"{flag.spelled} has no value", f"write {flag.spelled}=VALUE")
        return
    text = flag.value.text
    if text is None or _NAME.fullmatch(text):
        return
    if text.endswith(".py") and launch.script is None:
        message = f"{flag.spelled} uses {text} as its value, so no script is left"
        yield Found(flag.word.span, message, f"give {flag.spelled} a value")
    elif wrong := _wrong(flag.name, text):
        severity: Severity | None = "warning" if wrong is _PRIVILEGED else None
        message = f"{flag.spelled} {text!r}: {wrong}"
        yield Found(flag.value.span, message, _meant(flag.name), severity=severity)


_PRIVILEGED = "below 1024, which only root may open"
_PORT = "a port from 1024 to 65535"
_COUNT = (r"\d+", "not a number from 0 up", "0, 1, 2, …")
#: The form of a flag's values, what one is that has another form, and what is meant.
_FORMS = {
    "nproc_per_node": (
        # Numbers of ranks, and kinds of devices: torch's own, or that of a vendor's plug-in.
        r"0*[1-9]\d*|(?!(gpus|all|max|cuda)$)[a-z][a-z0-9_]*",
        "neither a number of ranks nor a device type",
        "a number above 0, gpu, cpu, xpu or auto",
    ),
    "nnodes": (r"0*[1-9]\d*(:\d+)?", "neither a number of nodes nor a range MIN:MAX", "a number, or MIN:MAX as in 1:4"),
    "master_port": (r"\d+", "not a port", _PORT),
    "rdzv_endpoint": (r".*", "", f"HOST:PORT with {_PORT}"),
    "node_rank": (r"\d+", "not a number from 0 up", "0 on the first node, 1 on the next, …"),
    "max_restarts": _COUNT,
    "monitor_interval": (r"\d*\.?\d+(e-?\d+)?|\d+\.", "not a number of seconds", "a number of seconds"),
    "start_method": ("spawn|fork|forkserver", "none of spawn, fork, forkserver", "spawn"),
    "numa_binding": ("node|socket|exclusive|core-complex", "none of node, socket, exclusive, core-complex", "node"),
}  # fmt: skip


def _wrong(name: str, text: str) -> str:
    """Why a value can't be right; empty if it can."""
    pattern, wrong, _ = _FORMS.get(name, (".*", "", ""))
    least, _, most = text.partition(":")
    if not re.fullmatch(pattern, text, re.DOTALL) or (name == "nnodes" and most and int(least) > int(most)):
        return wrong
    port = text.rpartition(":")[2] if name == "rdzv_endpoint" and ":" in text else text
    return _port(port) if name in {"master_port", "rdzv_endpoint"} and port.isdecimal() else ""


def _port(text: str) -> str:
    if _NAME.fullmatch(text):
        return ""
    if not text.isdecimal() or int(text) > 65535:
        return "not a port"
    return _PRIVILEGED if 0 < int(text) < 1024 else ""


def _meant(name: str) -> str:
    return _FORMS[name][2] if name in _FORMS else "see the launcher's --help"


@rule("RW707", "error", "L8", "--standalone with several nodes waits forever", looks_at="shell")
def standalone_with_nodes(shell: Shell) -> Iterator[Found]:
    for launch in shell.launches:
        flag, nodes = launch.flag("standalone"), launch.num_nodes
        if launch.is_elastic and flag and nodes is not None and nodes > 1:
            message = f"--standalone means one node, but {nodes} are given: it waits for the others forever"
            fix = "replace --standalone by --rdzv-backend c10d --rdzv-endpoint HOST:PORT, or use one node"
            yield Found(flag.word.span, message, fix)


@rule("RW708", "warning", "L9", "a launcher's flag has no effect because of another one", looks_at="shell")
def ignored_launcher_flag(shell: Shell) -> Iterator[Found]:
    for launch in shell.launches:
        if launch.is_elastic and (by := _by(launch)):
            names = ["node_rank", "master_addr", "master_port"]
            for name in names:
                flag = launch.flag(name)
                if flag:
                    message = f"{flag.spelled} has no effect with {by}"
                    yield Found(flag.word.span, message, "remove it, or use the static rendezvous")


def _by(launch: Launch) -> str:
    if launch.flag("standalone"):
        return "--standalone"
    backend = launch.value("rdzv_backend")
    return f"--rdzv-backend {backend}" if backend and backend != "static" else ""
