"""Reentrant checkpointing is used together with find_unused_parameters.

**Why it breaks.** `find_unused_parameters=True` walks the graph of the forward pass, in which reentrant checkpoints
hide their parameters. These are first marked as unused and become ready later: `Expected to mark a variable ready only
once`.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=True)


dist.init_process_group("gloo")
model = DDP(Net(), find_unused_parameters=True)
model(torch.rand(2, 4, requires_grad=True)).sum().backward()
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


dist.init_process_group("gloo")
model = DDP(Net(), find_unused_parameters=True)
model(torch.rand(2, 4, requires_grad=True)).sum().backward()
dist.destroy_process_group()
```

**When it says nothing.** `use_reentrant=False`, or a model without `find_unused_parameters`.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.names import DDP
from rankwise.lint.rule import Rule
from rankwise.lint.topics.tensor_text import key_of
from rankwise.lint.topics.wrapping import wraps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Reentrant checkpoints in a file that wraps with `find_unused_parameters=True`."""
    if not any(
        wrap.kind == DDP
        and (given := wrap.call.kwargs.get("find_unused_parameters")) is not None
        and given.const is True
        for wrap in wraps(script)
    ):
        return
    for node in ast.walk(script.tree):
        if (
            not isinstance(node, ast.Call)
            or key_of(node.func).rpartition(".")[2] not in {"checkpoint", "checkpoint_sequential"}
            or len(node.args) < 2
        ):
            continue
        reentrant = next((word.value for word in node.keywords if word.arg == "use_reentrant"), None)
        if isinstance(reentrant, ast.Constant) and reentrant.value is True:
            yield script.finding(
                RULE,
                node,
                "parameters of a reentrant checkpoint are marked ready twice under find_unused_parameters=True: the first backward pass fails",
                "checkpoint with `use_reentrant=False`, or remove `find_unused_parameters`",
            )


RULE: Rule[Script] = Rule(
    id="RW414",
    name="checkpoint-marks-twice",
    severity="error",
    classes=("D4",),
    summary="reentrant checkpointing is used with find_unused_parameters",
    check=check,
)
