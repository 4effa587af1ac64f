"""A model with no trainable parameters is wrapped in DistributedDataParallel.

**Why it breaks.** `RuntimeError: DistributedDataParallel is not needed when a module doesn't have any parameter that
requires a gradient.` The constructor raises it.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
teacher = torch.nn.Linear(4, 4)
teacher.requires_grad_(False)
teacher = DDP(teacher)
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
teacher = torch.nn.Linear(4, 4)
teacher.requires_grad_(False)
print(teacher(torch.rand(1, 4)))
dist.destroy_process_group()
```

**When it says nothing.** Only a part is frozen, or something is unfrozen or added before the model is wrapped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.library.names import DDP
from rankwise.lint.model.values import Instance, Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.tensor_text import is_in
from rankwise.lint.topics.wrapping import wraps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Models that were frozen as a whole just before they are wrapped."""
    for wrap in wraps(script):
        thing = wrap.inner.thing
        if (
            wrap.call.name != DDP
            or not isinstance(thing, (Object, Instance))
            or not is_in(script.tree, wrap.call.node)
        ):
            continue
        before = [call for call in wrap.entry.histories[0].calls if call.index < wrap.call.index]
        own = [
            call
            for call in before
            if call.name.endswith(".requires_grad_")
            and call.receiver.thing is thing
            and "copy" not in text_of(call.node)
        ]
        if (
            not own
            or own[-1].args[:1] == ()
            or own[-1].args[0].const is not False
            or own[-1].tests
            or own[-1].guards
        ):
            continue
        later = [call for call in before if call.index > own[-1].index]
        if any(
            call.name.startswith("torch.nn.")
            or "requires_grad" in call.name
            or "setattr" in call.name
            or "Parameter" in call.name
            for call in later
        ):
            continue
        if "requires_grad = True" in script.piece.code:
            continue
        yield script.finding(
            RULE,
            wrap.call.node,
            f"`{text_of(wrap.call.arg_node(0, 'module'))}` has no trainable parameter after `{text_of(own[-1].node)}`: DistributedDataParallel refuses it",
            "use the frozen model as it is, without DistributedDataParallel",
        )


RULE: Rule[Script] = Rule(
    id="RW415",
    name="nothing-to-train",
    severity="error",
    classes=("D11",),
    summary="a model with no trainable parameters is wrapped",
    check=check,
)
