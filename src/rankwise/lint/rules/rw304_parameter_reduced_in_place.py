"""Parameters are summed over the ranks instead of gradients.

**Why it breaks.** `dist.all_reduce(p)` for each parameter sums the weights of all ranks: after one step they are
`world_size` times too large, on every rank, without any error. What ranks must share are the gradients, `p.grad`.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(8, 4)).sum().backward()
for p in model.parameters():
    dist.all_reduce(p)
optimizer.step()
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(8, 4)).sum().backward()
for p in model.parameters():
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()
optimizer.step()
dist.destroy_process_group()
```

**When it says nothing.** Averages of the weights (local SGD), which divide or use `ReduceOp.AVG`, and broadcasts at the
start.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import collectives, filled_node
from rankwise.lint.topics.job_view import function_of, text_of
from rankwise.lint.topics.summing import divides, is_sum
from rankwise.lint.topics.tensor_text import bindings, key_of, root_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Sums of parameters that no division follows."""
    for place in collectives(script, "all_reduce"):
        call, node = place.last, filled_node(place.last)
        shown = root_of(node)
        if shown is None or not is_sum(call) or not _is_parameter(script.tree, shown, call.node):
            continue
        if divides(script, function_of(script.tree, call.node), besides="grad"):
            continue
        yield script.finding(
            RULE,
            call.node,
            f"all_reduce sums the parameter `{text_of(node)}` over all ranks in place, so weights grow with the number of ranks",
            f"reduce the gradient, `{text_of(shown)}.grad`, and divide it by the world size, or wrap the model in DistributedDataParallel",
        )


def _is_parameter(tree: ast.Module, node: ast.AST, at: ast.AST) -> bool:
    key = key_of(node)
    if not key:
        return False
    for statement, value in bindings(tree, key, at)[-1:]:
        if isinstance(statement, ast.For) and value is None:
            words = {
                key_of(one.func).rpartition(".")[2]
                for one in ast.walk(statement.iter)
                if isinstance(one, ast.Call)
            }
            return bool(words & {"parameters", "named_parameters"})
        if isinstance(value, ast.Call):
            return key_of(value.func).rpartition(".")[2] == "Parameter"
    return False


RULE: Rule[Script] = Rule(
    id="RW304",
    name="parameter-reduced-in-place",
    severity="error",
    classes=("C13",),
    summary="parameters are summed over the ranks in place",
    check=check,
)
