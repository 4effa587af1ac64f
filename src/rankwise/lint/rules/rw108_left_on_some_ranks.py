"""Some ranks leave a loop or function in which the others stay.

**Why it breaks.** A rank that stops early, by `break`, `continue` or `return`, makes fewer backward passes and
collectives than the rest. The others block at their next step, or their gradients are paired with whatever that rank
calls next.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 1))
for epoch in range(5):
    model(torch.ones(1, 2)).sum().backward()
    if dist.get_rank() == 0 and epoch == 2:
        break
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 1))
for epoch in range(5):
    model(torch.ones(1, 2)).sum().backward()
    stop = torch.tensor(int(dist.get_rank() == 0 and epoch == 2))
    dist.broadcast(stop, src=0)
    if stop:
        break
dist.destroy_process_group()
```

**When it says nothing.** No collective follows; the decision was reduced or broadcast first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.model.history import Exit, Op
from rankwise.lint.paths.found import all_divergences
from rankwise.lint.paths.words import also, anchor, tested, who, written
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

#: Attributes that stop a framework's training.
_FLAGS = frozenset({"should_stop", "should_training_stop", "should_epoch_stop"})
_CLASSES = {"break": "D16", "continue": "D15", "return": "C27"}


def check(script: Script) -> Iterator[Finding]:
    """Exits that some of the simulated ranks do not take."""
    divergences = all_divergences(script)
    # Where the test keeps ranks from a collective in the first place, that is the mistake.
    told = {id(one.guard.node) for one in divergences if isinstance(one.item, Op) and one.guard is not None}
    for one in divergences:
        left = one.item
        if not isinstance(left, Exit) or one.guard is None or id(one.guard.node) in told:
            continue
        at = anchor(left, one.guard, script)
        if at is None:
            continue
        yield script.finding(
            RULE,
            at[0],
            f"{who(one.doers, one.others, 'may')} {left.kind} here (`{tested(left, one.guard)}`): the others continue and wait for it"
            " in their next collective",
            "decide on one rank, broadcast the decision, and let every rank act on it",
            # If the file does not call a function, its callers and arguments are unknown.
            severity="error" if one.in_program else "warning",
            failure_class=_CLASSES[left.kind],
            also=also(left, at[0], one.guard),
        )
    for call in script.calls:
        is_flag = call.name.endswith(".__setattr__") and call.args[0].const in _FLAGS
        if is_flag and call.guards and call.args[1].const is not False:
            guard = call.guards[-1]
            yield script.finding(
                RULE,
                call.node,
                f"`{written(call.node)}` is set only where `{written(guard.node)}`: that rank stops training, the others continue",
                "let every rank set it from a value that was reduced or broadcast",
            )


RULE: Rule[Script] = Rule(
    id="RW108",
    name="left-on-some-ranks",
    severity="error",
    classes=("D16", "D15", "C27"),
    summary="some ranks leave a loop or function in which the others stay",
    check=check,
)
