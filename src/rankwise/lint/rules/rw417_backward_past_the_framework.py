"""``loss.backward()`` is called on a model that Accelerate or Fabric has prepared.

**Why it breaks.** ``accelerator.backward(loss)`` divides the loss by the number of accumulated steps and scales it for
mixed precision, ``fabric.backward(loss)`` applies the strategy and the precision. ``loss.backward()`` does neither:
with gradient accumulation the gradients are too large, with fp16 they become 0 or the optimizer fails.

Bad:

```python
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
loss = model(torch.rand(2, 4)).mean()
loss.backward()
optimizer.step()
```

Good:

```python
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
loss = model(torch.rand(2, 4)).mean()
accelerator.backward(loss)
optimizer.step()
```

**When it says nothing.** The check can't see that the loss comes from the prepared model.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.names import ACCELERATOR, FABRIC
from rankwise.lint.rule import Rule
from rankwise.lint.topics.tensor_text import is_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

_PREPARES = {
    f"{ACCELERATOR}.prepare",
    f"{ACCELERATOR}.prepare_model",
    f"{FABRIC}.setup",
    f"{FABRIC}.setup_module",
}
_BACKWARD = frozenset({"?.backward", "torch.Tensor.backward"})


def check(script: Script) -> Iterator[Finding]:
    """Backward passes of losses from a prepared model."""
    if ".backward" not in script.piece.code:
        return
    for call in script.calls:
        node = call.node
        if (
            call.name not in _BACKWARD
            or not isinstance(node, ast.Call)
            or not isinstance(node.func, ast.Attribute)
        ):
            continue
        framework = _framework(call)
        if framework and is_in(script.tree, node):
            loss = ast.unparse(node.func.value)
            yield script.finding(
                RULE,
                node,
                f"`{loss}.backward()` bypasses `{framework}`, which prepared the model: the loss is neither scaled nor divided by the accumulated steps",
                f"call `{framework}.backward({loss})`",
            )


def _framework(call: Call) -> str:
    """How the user calls what prepared the model of this loss."""
    for model in call.receiver.via:
        made = model.call
        func = getattr(made.node, "func", None) if made is not None else None
        if made is not None and made.name in _PREPARES and isinstance(func, ast.Attribute):
            return ast.unparse(func.value)
    return ""


RULE: Rule[Script] = Rule(
    id="RW417",
    name="backward-past-the-framework",
    severity="hint",
    classes=(),
    summary="loss.backward() on a model that Accelerate or Fabric has prepared",
    check=check,
)
