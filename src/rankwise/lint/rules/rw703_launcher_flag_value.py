"""A launcher's flag has no value, or an invalid one.

**Why it breaks.** The launcher fails before any rank starts (`Unsupported nproc_per_node value`, `expected one
argument`, `invalid int value`), or uses the script's name as the value and finds no script.

Bad:

```bash
torchrun --nproc_per_node --work-dir out train.py
```

Good:

```bash
torchrun --nproc_per_node 8 train.py --work-dir out
```

Bad:

```bash
torchrun --nproc_per_node=4 --master_port=295000 train.py
```

Good:

```bash
torchrun --nproc_per_node=4 --master_port=29617 train.py
```

**When it says nothing.** Values from variables that are set elsewhere; `gpu`, `cpu`, `auto` and other device types.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.flags import TABLES
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.finding import Finding
    from rankwise.lint.shell.model import Flag, Launch

_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for launch in shell.launches:
        if launch.is_elastic:
            for flag in launch.flags:
                yield from _flag(shell, launch, flag)
            yield from _no_script(shell, launch)
    for setting in shell.reading.settings:
        if setting.name == "MASTER_PORT" and (wrong := _port(setting.value.text or "0")):
            yield shell.finding(
                RULE,
                setting.span,
                f"MASTER_PORT={setting.value.text}: {wrong}",
                "a free port from 1024 to 65535",
            )


def _flag(shell: Shell, launch: Launch, flag: Flag) -> Iterator[Finding]:
    table = TABLES[launch.launcher]
    if not flag.is_known:
        return
    if flag.name in table.switches:
        if flag.value is not None:
            yield shell.finding(
                RULE,
                flag.word.span,
                f"{flag.spelled} takes no value, but gets {flag.value.raw!r}",
                f"write {flag.spelled} alone",
            )
        return
    if flag.value is None:
        yield shell.finding(
            RULE, flag.word.span, f"{flag.spelled} has no value", f"write {flag.spelled}=VALUE"
        )
        return
    text = flag.value.text
    if text is None or _NAME.fullmatch(text):
        return
    if text.endswith(".py") and launch.script is None:
        message = f"{flag.spelled} uses {text} as its value, so no script is left"
        yield shell.finding(RULE, flag.word.span, message, f"give {flag.spelled} a value")
    elif wrong := _wrong(flag.name, text):
        severity: Severity | None = "warning" if wrong is _PRIVILEGED else None
        message = f"{flag.spelled} {text!r}: {wrong}"
        yield shell.finding(RULE, flag.value.span, message, _meant(flag.name), severity=severity)


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


def _no_script(shell: Shell, launch: Launch) -> Iterator[Finding]:
    # A bare name in a script may test whether it is installed; after `rankwise check --` it is the command.
    is_asking = launch.flag("help") or not (launch.flags or shell.piece.path == "<command>")
    switches = TABLES[launch.launcher].switches
    is_told = any(
        not flag.is_known
        or (flag.value is None and flag.name not in switches)
        or (flag.value is not None and flag.value.head.endswith(".py"))
        for flag in launch.flags
    )
    is_page = shell.piece.is_fragment and shell.piece.path != "<command>"
    if launch.script or launch.is_partial or is_asking or is_page:
        return
    if is_told or shell.is_cut(launch):
        return
    message = f"{launch.label} gets no script"
    yield shell.finding(
        RULE, launch.word.span, message, f"{launch.label} [flags] train.py [the script's own arguments]"
    )


RULE: Rule[Shell] = Rule(
    id="RW703",
    name="launcher-flag-value",
    severity="error",
    classes=("L4",),
    summary="a launcher's flag has no value, or an invalid one",
    looks_at="shell",
    check=_check,
)
