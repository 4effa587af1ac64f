"""`python -m torch.distributed.launch` is deprecated.

**Why it breaks.** It adds `--local-rank=N` to the script's arguments; up to torch 1.13 it was `--local_rank=N`. A
script that knows one of the two fails with `unrecognized arguments`. It will be removed from torch.

Bad:

```bash
python -m torch.distributed.launch --nproc_per_node=4 train.py
```

Good:

```bash
torchrun --nproc_per_node=4 train.py
```

**When it says nothing.** `python -m torch.distributed.run`, which is torchrun.
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
    for launch in shell.launches:
        if launch.launcher != "launch":
            continue
        module = next(
            (word for word in launch.command.words if word.text == "torch.distributed.launch"), launch.word
        )
        if launch.flag("use_env"):
            message = "torch.distributed.launch is deprecated"
            yield shell.finding(RULE, module.span, message, "torchrun with the same flags, without --use_env")
        else:
            message = (
                "torch.distributed.launch is deprecated, and adds --local-rank=N to the script's arguments"
            )
            yield shell.finding(
                RULE, module.span, message, "torchrun with the same flags; the script reads LOCAL_RANK"
            )


RULE: Rule[Shell] = Rule(
    id="RW728",
    name="old-launch-module",
    severity="warning",
    classes=("L1",),
    summary="torch.distributed.launch is deprecated, and adds --local-rank to the arguments",
    looks_at="shell",
    check=_check,
)
