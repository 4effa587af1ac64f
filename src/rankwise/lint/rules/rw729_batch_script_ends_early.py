"""A batch script starts its job in the background and ends.

**Why it breaks.** Slurm ends a job when its script ends, and kills all that still runs. Ranks that were started with
`&` live for seconds.

Bad:

```bash
#SBATCH --nodes=1
srun --ntasks=1 torchrun --nproc_per_node=8 train.py &
```

Good:

```bash
#SBATCH --nodes=1
srun --ntasks=1 torchrun --nproc_per_node=8 train.py &
wait
```

**When it says nothing.** A command follows that may run for a while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.shell.study import Shell, one_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding

_QUICK = {"echo", "date", "printf", "set", "cd", "true", "ls", "hostname", "export"}


@one_each
def _check(shell: Shell) -> Iterator[Finding]:
    commands = shell.reading.commands
    if not shell.batch.is_batch or not shell.launches or shell.has_errors:
        return
    last = shell.launches[-1]
    outer = last.command.under[0] if last.command.under else last.command
    at = max(number for number, command in enumerate(commands) if command.span.line <= outer.span.end_line)
    after = [command for command in commands[at + 1 :] if (command.words[0].text or "") not in _QUICK]
    if (
        outer.is_background
        and not outer.in_function
        and not after
        and outer.words[0].text not in {"cat", "tee"}
    ):
        message = "the script ends while this runs in the background, and Slurm then kills it"
        yield shell.finding(RULE, outer.span, message, "put `wait` at the end of the script")


RULE: Rule[Shell] = Rule(
    id="RW729",
    name="batch-script-ends-early",
    severity="error",
    classes=("R7",),
    summary="a batch script ends while its job runs in the background",
    looks_at="shell",
    check=_check,
)
