"""Only some ranks gather or save the state of a model that is distributed over all ranks.

**Why it breaks.** The full state of a sharded model is gathered from every rank, and `accelerator.save_state`,
DeepSpeed's `save_checkpoint` and `dcp.save` are collective. On rank 0 alone they block forever.

Bad:

```python
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
fully_shard(model)
if dist.get_rank() == 0:
    torch.save(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), "model.pt")
```

Good:

```python
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
fully_shard(model)
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
if dist.get_rank() == 0:
    torch.save(state, "model.pt")
dist.destroy_process_group()
```

**When it says nothing.** The state of DistributedDataParallel, which every rank has in full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.paths.found import missed_ops
from rankwise.lint.paths.words import also, called, line_left, tested, who
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Guard
    from rankwise.lint.model.history import Op
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """State and save calls that some of the simulated ranks do not make."""
    for one in missed_ops(script, "state", "save"):
        op, guard = one.op, one.guard
        yield script.finding(
            RULE,
            one.at,
            f"{who(one.doers, one.others, 'reach')} {called(op)} (`{tested(op, guard)}`), which all ranks must call"
            " together: it waits for the others",
            _fix(op, guard),
            severity="error" if one.is_sure else "warning",
            failure_class="K6" if op.family == "save" else "D28",
            also=also(op, one.at, guard),
        )


def _fix(op: Op, guard: Guard) -> str:
    if line := line_left(op, guard):
        return f"call {called(op)} before line {line}, or let every rank reach it"
    if op.family == "save":
        does = "loads" if "load" in op.call.name.rpartition(".")[2] else "writes"
        return f"call {called(op)} on every rank: it {does} with all of them"
    return f"call {called(op)} on every rank, and let rank 0 alone write what it returns"


RULE: Rule[Script] = Rule(
    id="RW105",
    name="state-on-some-ranks",
    severity="error",
    classes=("D28", "K6"),
    summary="only some ranks gather or save a state that is distributed over all ranks",
    check=check,
)
