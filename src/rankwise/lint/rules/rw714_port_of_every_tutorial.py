"""A single-host job uses a fixed port that other jobs use too.

**Why it breaks.** A second job on the same host, or processes left by the last one, hold the port: `EADDRINUSE`,
`address already in use`. Without the flag torchrun chooses a free port for a job of one node.

Bad:

```bash
torchrun --nproc_per_node=4 --master_port=29500 train.py
```

Good:

```bash
torchrun --nproc_per_node=4 train.py
```

**When it says nothing.** Several nodes, which need one port known to all of them; other ports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.host import is_loopback
from rankwise.lint.rule import Rule
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.shell.model import Launch

_USUAL = {"12355", "29500", "12345", "29400", "23456", "1234"}


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for launch in shell.launches:
        yield from _flag(shell, launch)
    if not any(launch.is_elastic for launch in shell.launches) and (shell.batch.num_nodes or 1) == 1:
        yield from _settings(shell)


def _flag(shell: Shell, launch: Launch) -> Iterator[Finding]:
    flag = launch.flag("master_port", "main_process_port", "rdzv_endpoint")
    text = (flag.value.text or "") if flag and flag.value else ""
    host, _, port = text.rpartition(":")
    if flag is None or port not in _USUAL or launch.flag("standalone") or not _is_one_node(launch):
        return
    if flag.name == "rdzv_endpoint" and not is_loopback(host):
        return
    fix = f"{flag.spelled} with a port of your own"
    if launch.is_elastic:
        fix = "--standalone instead" if host else f"remove {flag.spelled}: torchrun chooses a free port"
    message = f"port {port} is a common default, which other jobs use too"
    yield shell.finding(RULE, flag.word.span, message, fix)


def _is_one_node(launch: Launch) -> bool:
    if launch.is_elastic and launch.num_nodes != 1:
        return False
    return not launch.flag(
        "num_machines", "machine_rank", "num_nodes", "hostfile", "node_rank", "master_addr"
    )


def _settings(shell: Shell) -> Iterator[Finding]:
    addresses = [one.value.text for one in shell.reading.settings if one.name == "MASTER_ADDR"]
    if any(text not in {"localhost", "127.0.0.1"} for text in addresses):
        return
    for setting in shell.reading.settings:
        if setting.name == "MASTER_PORT" and setting.value.text in _USUAL:
            message = f"port {setting.value.text} is a common default, which other jobs use too"
            yield shell.finding(
                RULE,
                setting.span,
                message,
                "start it with torchrun, which chooses a free port, or use another",
            )


RULE: Rule[Shell] = Rule(
    id="RW714",
    name="port-of-every-tutorial",
    severity="warning",
    classes=("I9",),
    summary="a single-host job uses a port that other jobs use too",
    looks_at="shell",
    check=_check,
)
