"""All ranks draw the same random numbers in training, because all set the same seed.

**Why it breaks.** ``torch.manual_seed(42)`` on each rank makes their generators equal. Noise, masks, random steps of an
agent or random crops drawn in the training loop are then the same on all ranks: N ranks process N times the data with
the variety of one. Nothing fails.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(42)
model = DDP(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(100):
    noise = torch.randn(32, 8)
    optimizer.zero_grad()
    (model(noise) - noise).pow(2).mean().backward()
    optimizer.step()
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(42)
model = DDP(torch.nn.Linear(8, 8))
torch.manual_seed(42 + dist.get_rank())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(100):
    noise = torch.randn(32, 8)
    optimizer.zero_grad()
    (model(noise) - noise).pow(2).mean().backward()
    optimizer.step()
dist.destroy_process_group()
```

**When it says nothing.** The last seed before the loop depends on the rank; no seed is set (each process then has its
own); numbers come from a generator that was passed; dropout; ranks that hold parts of one model must draw alike.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.data_flow import here, training_loops
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.seeds import last_seed, library_of, standing
from rankwise.lint.topics.shares import spreads_otherwise

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

_DRAWS = re.compile(
    r"torch\.(rand|randn|randint|rand_like|randn_like|randint_like|normal|bernoulli|multinomial|poisson)"
    r"|numpy\.random\.(rand|randn|randint|random|uniform|normal|choice|beta|binomial|random_sample)"
    r"|random\.(random|randint|uniform|choice|choices|gauss|randrange|sample)"
)


def check(script: Script) -> Iterator[Finding]:
    """Draws in loops that train together, under a seed that all ranks share."""
    if spreads_otherwise(script.all_calls):
        return
    for entry in script.entries:
        history = entry.histories[-1]
        for _loop, inside in training_loops(history):
            draw = next((call for call in inside if _is_alike(call) and here(script, call) is not None), None)
            if draw is None or standing(history, draw, library_of(draw.name)) != "equal":
                continue
            seed = last_seed(history, draw, library_of(draw.name))
            shown = f"`{text_of(seed.node)}`" if seed is not None and seed.name != "" else "the seed"
            message = f"all ranks draw the same numbers at `{text_of(draw.node)}`, because {shown} is the same seed on all"
            yield script.finding(RULE, here(script, draw) or draw.node, message, _FIX)
            return


def _is_alike(call: Call) -> bool:
    generator = call.kwargs.get("generator")
    return (
        _DRAWS.fullmatch(call.name) is not None
        and (generator is None or generator.const is None)
        and not call.guards
    )


_FIX = "after creating the model, seed again with the rank: torch.manual_seed(seed + rank)"

RULE: Rule[Script] = Rule(
    id="RW509",
    name="same-noise-on-all-ranks",
    severity="warning",
    classes=("X6",),
    summary="ranks draw the same random numbers in training, because all set the same seed",
    check=check,
)
