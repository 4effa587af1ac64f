"""Flags of a launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.finding import Found
from rankwise.lint.rule import rule
from rankwise.lint.shell.flags import TABLES, late_flags, meant_flag
from rankwise.lint.shell.study import Shell, typed

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        return  # of a missing value the launcher tells itself; this may be the script's flag
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
