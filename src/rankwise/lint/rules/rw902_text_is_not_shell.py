"""This can't be parsed as bash, so nothing in it was checked.

**Why it breaks.** bash fails with `syntax error near unexpected token` at the same place. Usually a quote or a bracket
is left open, or the file holds another language.

Bad:

```bash
((((
```

Good:

```bash
torchrun --nproc_per_node=2 train.py
```

**When it says nothing.** Some of the text can be parsed: the rest is skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.finding import Span
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.shell.study import Shell


def _check(shell: Shell) -> Iterator[Finding]:
    is_empty = not shell.reading.commands and not shell.reading.settings
    if not shell.has_errors or not is_empty or shell.piece.is_fragment:
        return
    line = next(
        (number for number, text in enumerate(shell.lines, start=1) if text.strip() and text[0] != "#"), 1
    )
    span = Span(line, 1, line, len(shell.lines[line - 1]) + 1)
    yield shell.finding(
        RULE, span, "this can't be parsed as bash", "run `bash -n` on it: it says what is left open"
    )


RULE: Rule[Shell] = Rule(
    id="RW902",
    name="text-is-not-shell",
    severity="warning",
    classes=(),
    summary="this can't be parsed as bash, so nothing in it was checked",
    looks_at="shell",
    check=_check,
)
