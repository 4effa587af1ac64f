"""A launcher's flag has no effect because of another one.

**Why it breaks.** `--node_rank`, `--master_addr` and `--master_port` belong to the static rendezvous. With c10d or
`--standalone` the launcher ignores them: the order of the nodes is arbitrary, and rank 0's output is on another node
than expected.

Bad:

```bash
torchrun --nnodes=2 --nproc_per_node=8 --node_rank=0 --rdzv_backend=c10d --rdzv_endpoint=node0:29617 train.py
```

Good:

```bash
torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=node0:29617 train.py
```

**When it says nothing.** The static rendezvous, which is the default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.shell.model import Launch


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for launch in shell.launches:
        if launch.is_elastic and (by := _by(launch)):
            names = ["node_rank", "master_addr", "master_port"]
            for name in names:
                flag = launch.flag(name)
                if flag:
                    message = f"{flag.spelled} has no effect with {by}"
                    yield shell.finding(
                        RULE, flag.word.span, message, "remove it, or use the static rendezvous"
                    )


def _by(launch: Launch) -> str:
    if launch.flag("standalone"):
        return "--standalone"
    backend = launch.value("rdzv_backend")
    return f"--rdzv-backend {backend}" if backend and backend != "static" else ""


RULE: Rule[Shell] = Rule(
    id="RW708",
    name="ignored-launcher-flag",
    severity="warning",
    classes=("L9",),
    summary="a launcher's flag has no effect because of another one",
    looks_at="shell",
    check=_check,
)
