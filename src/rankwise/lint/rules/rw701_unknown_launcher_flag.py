"""A launcher gets a flag that it does not have.

**Why it breaks.** The launcher fails with `error: unrecognized arguments` before any rank starts; a batch job shows
this only after its time in the queue. Usually the flag is misspelt, or it is another launcher's.

Bad:

```bash
torchrun --proc_per_node=4 train.py
```

Good:

```bash
torchrun --nproc_per_node=4 train.py
```

Bad:

```bash
accelerate launch --nproc_per_node 4 train.py
```

Good:

```bash
accelerate launch --num_processes 4 train.py
```

**When it says nothing.** Abbreviations that argparse accepts (`--nnode=2`), flags after the script, and words from
variables that are set elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.flags import TABLES, meant_flag
from rankwise.lint.shell.study import Shell, one_each, typed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.shell.model import Flag, Launch


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for launch in shell.launches:
        for flag in launch.flags:
            if launch.launcher in TABLES and not flag.is_known:
                yield from _tell(shell, launch, flag)


def _tell(shell: Shell, launch: Launch, flag: Flag) -> Iterator[Finding]:
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
    yield shell.finding(RULE, flag.word.span, message, fix, edits=edits)


RULE: Rule[Shell] = Rule(
    id="RW701",
    name="unknown-launcher-flag",
    severity="error",
    classes=("L2",),
    summary="the launcher has no such flag",
    looks_at="shell",
    check=_check,
    fixable=True,
)
