"""A flag begins with a typographic dash, or a word has typographic quotes: text pasted from a page.

**Why it breaks.** A text processor turned `--` into one long dash. The shell and the launcher know only `-`, so the
launcher runs the flag as the script and fails with `can't open file '–nproc_per_node=2'`.

Bad:

```bash
torchrun –nproc_per_node=2 train.py
```

Good:

```bash
torchrun --nproc_per_node=2 train.py
```

**When it says nothing.** Dashes inside words and in comments.
"""  # noqa: RUF002 - the dash is what it is about

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.study import Shell, one_each, typed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.shell.words import Word

_DASHES = re.compile(r"-*[\u2010-\u2015\u2212][-\u2010-\u2015\u2212]*(?=[A-Za-z])")
_QUOTES = re.compile(r"[\u201c\u201d\u2018\u2019]")


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for launch in shell.launches:
        for word in launch.command.words:
            yield from _word(shell, word)


def _word(shell: Shell, word: Word) -> Iterator[Finding]:
    if found := _DASHES.match(word.head):
        rest = word.head[found.end() :]
        plain = "-" if len(rest.partition("=")[0]) == 1 else "--"
        message = f"{word.raw} begins with a typographic dash, so it is not a flag"
        yield shell.finding(
            RULE, word.span, message, f"type {plain}{rest}", edits=typed(word, found[0], plain)
        )
    elif word.is_typed and (quote := _QUOTES.search(word.raw)) and word.raw[0] not in "\"'":
        message = f"{quote[0]} is a typographic quote, which the shell reads as a letter"
        yield shell.finding(RULE, word.span, message, "type plain quotes")


RULE: Rule[Shell] = Rule(
    id="RW705",
    name="typographic-characters",
    severity="error",
    classes=("L5",),
    summary="typographic dashes or quotes in a launch command",
    looks_at="shell",
    check=_check,
    fixable=True,
)
