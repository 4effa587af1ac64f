"""A loss is reduced in place over the ranks before its backward pass.

**Why it breaks.** Autograd does not record `dist.all_reduce(loss)`: the value changes, the graph does not. Torch warns
(`an autograd kernel was not registered`), and if the loss is then divided by the world size, so are all gradients, on
top of DDP's own mean: the effective learning rate is silently `world_size` times too small.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.randn(8, 4)).square().mean()
dist.all_reduce(loss)
loss = loss / dist.get_world_size()
loss.backward()
optimizer.step()
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.randn(8, 4)).square().mean()
loss.backward()
optimizer.step()
shown = loss.detach().clone()
dist.all_reduce(shown)
print(shown.item() / dist.get_world_size())
dist.destroy_process_group()
```

**When it says nothing.** Copies (`loss.detach().clone()`), `loss.data`, a reduction after the backward pass, and counts
by which a loss is divided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.finding import span_of
from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import collectives, filled_node, word_of
from rankwise.lint.topics.job_view import places
from rankwise.lint.topics.tensor_text import (
    backward_of,
    is_in,
    is_made_up,
    key_of,
    model_calls,
    touches_model,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

_OFF = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})


def check(script: Script) -> Iterator[Finding]:
    """In-place reductions of a value that carries a gradient and has a backward pass."""
    models = model_calls(script.all_calls)
    for place in collectives(script, "all_reduce", "reduce", "broadcast"):
        node = filled_node(place.last)
        key = key_of(node)
        if not key or node is None or is_made_up(script.tree, node, place.last.node):
            continue
        for call in _as_called(script, place.last):
            if _OFF & set(call.contexts):
                continue
            value = call.arg(0, "tensor")
            if not (value is not None and value.via) and not touches_model(script.tree, node, models):
                continue
            back = backward_of(call.module, call.node, key, call.stack)
            if back is None:
                continue
            yield script.finding(
                RULE,
                call.node,
                f"`{key}` is reduced in place before its backward pass; {word_of(call)} is not part of the graph, so the gradients are wrong",
                f"call `{key}.backward()` first, and reduce `{key}.detach().clone()` for the log",
                also=[("the backward pass", script.piece.path, span_of(back, script.lines))]
                if is_in(script.tree, back)
                else [],
            )
            break


def _as_called(script: Script, call: Call) -> list[Call]:
    """The call as each of its callers makes it: a helper may be right for a metric and wrong for a loss."""
    found = [one for place in places(script, call.name) for one in place.calls if one.node is call.node]
    others = [
        one
        for entry in script.entries
        for history in entry.histories[:1]
        for one in history.calls
        if one.node is call.node
    ]
    return [*found, *others]


RULE: Rule[Script] = Rule(
    id="RW303",
    name="reduced-loss-goes-backward",
    severity="error",
    classes=("C13",),
    summary="a loss is reduced in place before the backward pass",
    check=check,
)
