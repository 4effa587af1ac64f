"""Each rank names a different rank as source or destination.

**Why it breaks.** All ranks must name the same one. With `dist.broadcast(x, src=rank)` every rank sends and none
receives: the job hangs, or each rank keeps its own value.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
weights = torch.rand(4)
dist.broadcast(weights, src=rank)
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
weights = torch.rand(4)
dist.broadcast(weights, src=0)
dist.destroy_process_group()
```

**When it says nothing.** Loops over all ranks, groups other than the default one, and `send` and `recv`, whose peers
differ by nature.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import ROOTED, collectives, has_group, root_value, word_of
from rankwise.lint.topics.job_view import is_parameter, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Calls whose source or destination differs between ranks."""
    for place in collectives(script, *ROOTED):
        if has_group(place.last) or len(place.calls) < 2:
            continue
        if any(test.spread for call in place.calls for _, test, _ in call.tests):
            # `if owner == rank:` in a loop over owners.
            continue
        roots = {call.rank: value for call in place.calls if (value := root_value(call)) is not None}
        numbers = {value.const for value in roots.values() if value.is_known and isinstance(value.const, int)}
        if len(numbers) < 2 or not any(value.spread for value in roots.values()):
            continue
        position, name = ROOTED[word_of(place.last)]
        node = place.last.arg_node(position, name)
        if isinstance(node, ast.Name) and not place.entry.is_program and is_parameter(place.last, node.id):
            continue  # `def send(tensor, rank)`: the caller may mean another rank than its own
        yield script.finding(
            RULE,
            node or place.last.node,
            f"{name}={text_of(node)} is {_shown(numbers)} on different ranks, but all must name the same rank in {word_of(place.last)}",
            f"name one rank for all, `{name}=0`",
        )


def _shown(numbers: set[int]) -> str:
    *most, last = sorted(numbers)
    return f"{', '.join(str(one) for one in most)} and {last}"


RULE: Rule[Script] = Rule(
    id="RW311",
    name="source-depends-on-rank",
    severity="error",
    classes=("C8", "C16"),
    summary="src or dst differs between ranks",
    check=check,
)
