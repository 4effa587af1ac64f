"""An assignment contains a space, and the shell ends it there.

**Why it breaks.** `CUDA_VISIBLE_DEVICES=0, 1 torchrun …` sets the list to `0,` and looks for a program called `1`: `1:
command not found`. With `export` only the first device is visible. With spaces around the `=` nothing is set at all.

Bad:

```bash
CUDA_VISIBLE_DEVICES=0, 1 torchrun --nproc_per_node=2 train.py
```

Good:

```bash
CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 train.py
```

Bad:

```bash
MASTER_PORT = 29617
```

Good:

```bash
MASTER_PORT=29617
```

**When it says nothing.** The list is in quotes; names that are not torch's, CUDA's or NCCL's.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankwise.lint.finding import Edit, Span
from rankwise.lint.rule import Rule
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.shell.model import Setting

_REST = re.compile(r"(?:[ \t]*,)?[ \t]+,?\d+(?:[ \t]*,[ \t]*\d+)*(?![^\s;,&|])")
_NAMES = re.compile(
    r"MASTER_(PORT|ADDR)|WORLD_SIZE|(LOCAL_)?RANK|\w+_VISIBLE_DEVICES|OMP_NUM_THREADS|(TORCH_)?NCCL_\w+|GLOO_\w+"
)


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for setting in shell.reading.settings:
        if setting.name.endswith("VISIBLE_DEVICES"):
            yield from _list(shell, setting)
    for command in shell.reading.commands:
        name = command.words[0].text or ""
        if len(command.words) > 1 and command.words[1].head.startswith("=") and _NAMES.fullmatch(name):
            message = f"there is a space before the =, so {name} is a command and nothing is set"
            yield shell.finding(RULE, command.span, message, f"{name}=VALUE, without spaces")


def _list(shell: Shell, setting: Setting) -> Iterator[Finding]:
    span, text = setting.span, setting.value.raw
    line = shell.lines[span.end_line - 1]
    found = _REST.match(line, span.end_col - 1)
    if not found or not re.fullmatch(r"\d+(,\d+)*,?", text):
        return
    has_comma = text.endswith(",") or "," in found[0]
    if not has_comma and not setting.is_prefix:
        return
    whole = Span(span.line, span.col, span.end_line, found.end() + 1)
    rest = Span(span.end_line, found.start() + 1, span.end_line, found.end() + 1)
    closed = re.sub(r"[ \t]", "", found[0])
    if not has_comma:
        closed = f",{closed}"
    message = f"a space ends {setting.name}={text}, and {found[0].strip()} is a separate word"
    fix = f"{setting.name}={text}{closed}"
    yield shell.finding(RULE, whole, message, fix, edits=[Edit(span=rest, text=closed)])


RULE: Rule[Shell] = Rule(
    id="RW721",
    name="blank-in-assignment",
    severity="error",
    classes=("L7",),
    summary="a space ends the value of a variable",
    looks_at="shell",
    check=_check,
    fixable=True,
)
