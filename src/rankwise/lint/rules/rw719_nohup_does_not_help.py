"""`nohup` before torchrun does not keep the job alive when the terminal closes.

**Why it breaks.** nohup ignores SIGHUP, but torchrun installs its own handler, which undoes that. When the connection
ends, the job ends with `Received 1 death signal, shutting down workers`.

Bad:

```bash
nohup torchrun --nproc_per_node=8 train.py > log.txt 2>&1 &
```

Good:

```bash
setsid torchrun --nproc_per_node=8 train.py > log.txt 2>&1 &
```

**When it says nothing.** `--signals-to-handle` without SIGHUP, `setsid`, and `rankwise run`, which leaves an ignored SIGHUP ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.launches import base_name
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for launch in shell.launches:
        names = [base_name(word) for word in launch.wraps]
        if (
            launch.launcher not in {"torchrun", "launch", "accelerate"}
            or "nohup" not in names
            or "setsid" in names
        ):
            continue
        signals = launch.flag("signals_to_handle")
        if signals and "SIGHUP" not in (launch.value("signals_to_handle") or "SIGHUP"):
            continue
        word = launch.wraps[names.index("nohup")]
        message = f"{launch.label} handles SIGHUP itself, so the job ends with the terminal despite nohup"
        yield shell.finding(RULE, word.span, message, f"setsid {launch.label} …, or start it in tmux")


RULE: Rule[Shell] = Rule(
    id="RW719",
    name="nohup-does-not-help",
    severity="warning",
    classes=("R4",),
    summary="torchrun undoes nohup: the job ends with the terminal",
    looks_at="shell",
    check=_check,
)
