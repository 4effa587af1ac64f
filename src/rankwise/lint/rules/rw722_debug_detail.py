"""`TORCH_DISTRIBUTED_DEBUG=DETAIL` was left in.

**Why it breaks.** It adds a comparison before every collective, so the job is slow. It does not find the worst
mistakes: two collectives of one kind in the wrong order, or a rank that is absent. And with some builds of torch (2.13
for CPU) DistributedDataParallel crashes in its constructor when it is set.

Bad:

```bash
TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun --nproc_per_node=2 train.py
```

Good:

```bash
rankwise run --nproc_per_node=2 train.py
```

**When it says nothing.** INFO and OFF.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for setting in shell.reading.settings:
        if setting.name == "TORCH_DISTRIBUTED_DEBUG" and (setting.value.text or "").upper() == "DETAIL":
            message = "TORCH_DISTRIBUTED_DEBUG=DETAIL slows every collective, and crashes DDP with some builds of torch"
            fix = "remove it, or use INFO; `rankwise run` compares the ranks' collectives without it"
            yield shell.finding(RULE, setting.span, message, fix)


RULE: Rule[Shell] = Rule(
    id="RW722",
    name="debug-detail",
    severity="warning",
    classes=(),
    summary="TORCH_DISTRIBUTED_DEBUG=DETAIL slows the job, and may crash DDP",
    looks_at="shell",
    check=_check,
)
