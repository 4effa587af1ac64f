"""A command that starts several ranks contains `--local_rank`.

**Why it breaks.** All ranks get the same arguments, so every rank reads local rank 0 and uses GPU 0. The launcher
passes each rank its own number in the variable LOCAL_RANK. Before the script torchrun reads `--local_rank` as an
abbreviation of `--local-ranks-filter`, and hides the output of the other ranks.

Bad:

```bash
torchrun --nproc_per_node=4 train.py --local_rank=0
```

Good:

```bash
torchrun --nproc_per_node=4 train.py
```

**When it says nothing.** `--local_rank=-1`, which means "not given" to many scripts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.shell.model import Launch

_SPELLINGS = {"--local_rank", "--local-rank"}


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    for launch in shell.launches:
        if launch.launcher == "python":
            continue
        for flag in launch.flags:
            if flag.spelled in _SPELLINGS and launch.is_elastic:
                message = f"{flag.spelled} before the script means --local-ranks-filter: it hides the output of other ranks"
                yield shell.finding(RULE, flag.word.span, message, "remove it: each rank reads LOCAL_RANK")
        yield from _behind(shell, launch)


def _behind(shell: Shell, launch: Launch) -> Iterator[Finding]:
    for number, word in enumerate(launch.args):
        spelled, equals, value = word.head.partition("=")
        if spelled not in _SPELLINGS:
            continue
        then = launch.args[number + 1] if number + 1 < len(launch.args) else None
        names = word.names if equals else then.names if then else ()
        text = value if equals else (then.text or "") if then else ""
        if text.isdecimal() or "LOCAL_RANK" in names:
            shown = word.raw if equals else f"{spelled} {then.raw if then else ''}"
            message = f"every rank gets {shown}, so all have the same local rank"
            yield shell.finding(
                RULE,
                word.span,
                message,
                "remove it, and read LOCAL_RANK from the environment in the script",
            )


RULE: Rule[Shell] = Rule(
    id="RW727",
    name="local-rank-given",
    severity="error",
    classes=("L1", "R13"),
    summary="--local_rank in a command gives all ranks the same number",
    looks_at="shell",
    check=_check,
)
