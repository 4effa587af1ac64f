"""`$random` is not bash's `$RANDOM`: names of variables are case-sensitive.

**Why it breaks.** `$random` is an empty variable, and in arithmetic it counts as 0. `$((12000 + $random % 20000))` is 12000 in every
job (or a syntax error), so the second job on a host fails with `address already in use`.

Bad:

```bash
MASTER_PORT=$((12000 + $random % 20000))
torchrun --nproc_per_node=2 --master_port=$MASTER_PORT train.py
```

Good:

```bash
MASTER_PORT=$((12000 + RANDOM % 20000))
torchrun --nproc_per_node=2 --master_port=$MASTER_PORT train.py
```

**When it says nothing.** The script assigns a value to a variable of that name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.finding import Edit, Span
from rankwise.lint.rule import Rule
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding

_DICE = {"random": "RANDOM", "srandom": "SRANDOM"}


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for reference in shell.reading.references:
        name = reference.name
        meant = _DICE.get(name.lower())
        if (
            meant is None
            or name == meant
            or name in shell.reading.assigned
            or shell.piece.path.endswith(".fish")
        ):
            continue
        span = reference.span
        text = (
            shell.lines[span.line - 1][span.col - 1 : span.end_col - 1] if span.line == span.end_line else ""
        )
        at = span.col + text.find(name)
        edits = (
            [Edit(span=Span(span.line, at, span.line, at + len(name)), text=meant)] if name in text else []
        )
        message = f"${name} is empty: bash's random number is ${meant}"
        yield shell.finding(RULE, span, message, f"write ${meant}", edits=edits)


RULE: Rule[Shell] = Rule(
    id="RW712",
    name="random-in-wrong-case",
    severity="error",
    classes=("I9",),
    summary="$random is empty: bash's random number is $RANDOM",
    looks_at="shell",
    check=_check,
    fixable=True,
)
