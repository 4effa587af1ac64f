"""A variable has a name that torch has deprecated.

**Why it breaks.** These settings are torch's and not NCCL's, so they were renamed. torch warns at every start, and will
stop reading the old names: then a job that should end on a timeout hangs.

Bad:

```bash
export NCCL_ASYNC_ERROR_HANDLING=1
torchrun --nproc_per_node=8 train.py
```

Good:

```bash
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
torchrun --nproc_per_node=8 train.py
```

**When it says nothing.** The new name is set too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.finding import Edit, Span
from rankwise.lint.rule import Rule
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding

_OLD = {
    "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG", "NCCL_ENABLE_TIMING", "NCCL_DUMP_ON_TIMEOUT",
    "NCCL_TRACE_BUFFER_SIZE", "NCCL_USE_COMM_NONBLOCKING", "NCCL_AVOID_RECORD_STREAMS",
}  # fmt: skip


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for setting in shell.reading.settings:
        name, span = setting.name, setting.span
        if name not in _OLD or f"TORCH_{name}" in shell.reading.assigned:
            continue
        line = shell.lines[span.line - 1]
        is_there = line[span.col - 1 :].startswith(name)
        edits = [Edit(span=Span(span.line, span.col, span.line, span.col), text="TORCH_")] if is_there else []
        yield shell.finding(RULE, span, f"{name} is a deprecated name", f"TORCH_{name}", edits=edits)


RULE: Rule[Shell] = Rule(
    id="RW724",
    name="old-nccl-names",
    severity="hint",
    classes=("R9",),
    summary="a variable has a name that torch has deprecated",
    looks_at="shell",
    check=_check,
    fixable=True,
)
