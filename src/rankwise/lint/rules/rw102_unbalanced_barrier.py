"""Some ranks call one more barrier than others.

**Why it breaks.** A barrier returns when all ranks have reached it. If rank 0 calls one more (or one fewer), each later
barrier or collective pairs with the wrong one, and the last one blocks forever. "Rank 0 first" needs *both* halves.

Bad:

```python
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() != 0:
    dist.barrier()
data = open("data.txt").read()
dist.barrier()
```

Good:

```python
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() != 0:
    dist.barrier()
data = open("data.txt").read()
if dist.get_rank() == 0:
    dist.barrier()
dist.destroy_process_group()
```

**When it says nothing.** Both halves are there, in any form and across any number of helper functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.paths.found import missed_ops
from rankwise.lint.paths.words import also, called, line_left, tested, who
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.history import Op
    from rankwise.lint.paths.found import Missed
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Barriers that some of the simulated ranks never reach."""
    for one in missed_ops(script, "barrier"):
        op, guard = one.op, one.guard
        yield script.finding(
            RULE,
            one.at,
            f"{who(one.doers, one.others, 'reach')} {called(op)} (`{tested(op, guard)}`): it waits until the others call"
            " one more barrier, and every later one is off by one",
            _fix(one, op),
            severity="error" if one.is_sure else "warning",
            failure_class="C2" if _is_half(script, one) else "C1",
            also=also(op, one.at, guard),
        )


def _is_half(script: Script, one: Missed) -> bool:
    """Whether it looks like one half of "rank 0 first": a barrier for the others, and more barriers in the file."""
    barriers = [call for call in script.calls if call.name.endswith((".barrier", ".wait_for_everyone"))]
    return len(barriers) > 1 and 0 in one.others


def _fix(one: Missed, op: Op) -> str:
    if line := line_left(op, one.guard):
        return f"call {called(op)} before line {line}, or let every rank reach it"
    for others, words, test in (((0,), "rank 0", "rank"), ((0, 2), "local rank 0", "local_rank")):
        if tuple(one.others) == others:
            return (
                f"let {words} call {called(op)} too, after what it does first: `if {test} == 0: {called(op)}`"
            )
    return f"move {called(op)} out of the test: every rank must call it"


RULE: Rule[Script] = Rule(
    id="RW102",
    name="unbalanced-barrier",
    severity="error",
    classes=("C2", "C1"),
    summary="some ranks call one more barrier than others",
    check=check,
)
