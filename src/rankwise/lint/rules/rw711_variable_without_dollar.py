"""A launcher's flag gets the name of a variable instead of its value: the `$` is missing.

**Why it breaks.** `--master_port=MASTER_PORT` passes the name itself. The launcher fails with `invalid int value`, or
looks for a host called MASTER_ADDR.

Bad:

```bash
export MASTER_PORT=29617
torchrun --nproc_per_node=4 --master_port=MASTER_PORT train.py
```

Good:

```bash
export MASTER_PORT=29617
torchrun --nproc_per_node=4 --master_port=$MASTER_PORT train.py
```

**When it says nothing.** Placeholders on a page (`--nproc_per_node=NUM_GPUS`), unless the same page has a variable of
that name.
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
    from rankwise.lint.shell.words import Word

_NUMBERS = {
    "nproc_per_node",
    "nnodes",
    "node_rank",
    "master_port",
    "num_processes",
    "num_machines",
    "main_process_port",
}
_FLAGS = {
    *_NUMBERS,
    "master_addr",
    "rdzv_endpoint",
    "main_process_ip",
    "machine_rank",
    "num_gpus",
    "num_nodes",
}
_TORCH = {"MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE"}
_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for launch in shell.launches:
        for flag in launch.flags:
            if flag.is_known and flag.name in _FLAGS and flag.value is not None:
                yield from _value(shell, flag.name, flag.spelled, flag.value, flag.word)
    for setting in shell.reading.settings:
        if setting.name in {"MASTER_PORT", "MASTER_ADDR", "WORLD_SIZE", "RANK", "LOCAL_RANK"}:
            yield from _value(shell, setting.name, setting.name, setting.value, setting.value)


def _value(shell: Shell, name: str, spelled: str, value: Word, word: Word) -> Iterator[Finding]:
    text = value.text or ""
    for part in text.split(":") if name == "rdzv_endpoint" else [text]:
        if not _NAME.fullmatch(part) or not _is_meant(shell, name, part):
            continue
        message = f"{spelled} gets the name {part} itself: a $ is missing"
        yield shell.finding(RULE, word.span, message, f"write ${part}", edits=_edits(shell, word, part))
        return


def _is_meant(shell: Shell, name: str, text: str) -> bool:
    """Whether a name in capitals is neither a placeholder of a page nor a host."""
    if shell.is_named(text):
        return True
    is_number = name in _NUMBERS or name in {"MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"}
    if shell.piece.is_fragment and shell.piece.path != "<command>":
        return is_number and text in _TORCH
    return is_number or text in {"MASTER_ADDR", *_TORCH}


def _edits(shell: Shell, word: Word, name: str) -> list[Edit]:
    found = re.search(rf"(?<![\w$]){name}$|(?<![\w$]){name}(?=:)", word.raw)
    if found is None or not word.is_typed or "\n" in word.raw or not shell.is_named(name):
        return []
    col = word.span.col + found.start()
    return [Edit(span=Span(word.span.line, col, word.span.line, col), text="$")]


RULE: Rule[Shell] = Rule(
    id="RW711",
    name="variable-without-dollar",
    severity="error",
    classes=("L4",),
    summary="a flag gets the name of a variable instead of its value",
    looks_at="shell",
    check=_check,
    fixable=True,
)
