"""A context manager is called but never entered.

**Why it breaks.** ``torch.no_grad()`` or ``torch.cuda.device(rank)`` on a line of its own creates an object and
discards it. Nothing changes: gradients are recorded, all ranks stay on GPU 0, gradients are synchronised at every step.

Bad:

```python
import torch

def evaluate(model, batch):
    torch.no_grad()
    return model(batch)
```

Good:

```python
import torch

def evaluate(model, batch):
    with torch.no_grad():
        return model(batch)
```

**When it says nothing.** ``with``, ``stack.enter_context(...)``, decorators, results that are kept, calls that take
effect at once (``torch.set_grad_enabled(False)``, ``torch.autograd.set_detect_anomaly(True)``).
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.scopes import Scopes, scopes_of
from rankwise.lint.topics.turns import is_caught

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

# Full name: the effect that is missing.
_FUNCTIONS = {
    "torch.no_grad": "gradients are still recorded",
    "torch.enable_grad": "the gradient mode stays as it was",
    "torch.inference_mode": "gradients are still recorded",
    "torch.autograd.no_grad": "gradients are still recorded",
    "torch.autocast": "no operation changes its precision",
    "torch.amp.autocast": "no operation changes its precision",
    "torch.cuda.amp.autocast": "no operation changes its precision",
    "torch.cpu.amp.autocast": "no operation changes its precision",
    "torch.cuda.device": "the current device stays what it was",
    "torch.cuda.stream": "the current stream stays what it was",
    "torch.accelerator.device_index": "the current device stays what it was",
    "torch.profiler.profile": "nothing is profiled",
    "torch.profiler.record_function": "no range is recorded",
    "torch.autograd.profiler.profile": "nothing is profiled",
    "torch.autograd.profiler.record_function": "no range is recorded",
    "torch.autograd.detect_anomaly": "anomalies are not detected",
    "torch.random.fork_rng": "the random state is not isolated",
    "torch.distributed.algorithms.join.Join": "uneven inputs are not joined",
    "torch.distributed.algorithms.Join": "uneven inputs are not joined",
}
_SET_DEVICE = {
    "torch.cuda.device": "torch.cuda.set_device",
    "torch.accelerator.device_index": "torch.accelerator.set_device_index",
}
# Methods that only torch, Accelerate and Fabric have.
_METHODS = {
    "no_sync": "gradients are still synchronised in every backward pass",
    "no_backward_sync": "gradients are still synchronised in every backward pass",
    "summon_full_params": "the parameters stay sharded",
    "state_dict_type": "the kind of state dict stays what it was",
    "main_process_first": "no process waits for the main one",
    "local_main_process_first": "no process waits for the main one",
    "join_uneven_inputs": "uneven inputs are not joined",
    "split_between_processes": "nothing is split",
}
_WORDS = frozenset({*(name.rpartition(".")[2] for name in _FUNCTIONS), *_METHODS, "join"})


def check(script: Script) -> Iterator[Finding]:
    """Statements that are nothing but a call of a context manager."""
    scopes = scopes_of(script.tree)
    for statement in scopes.all(ast.Expr):
        call = statement.value
        if not isinstance(call, ast.Call):
            continue
        effect = _no_effect(scopes, call)
        if effect and not is_caught(script.tree, statement):
            text = ast.unparse(call.func)
            setter = _SET_DEVICE.get(scopes.dotted(call.func))
            instead = f"; or call `{setter}(...)`, which takes effect at once" if setter else ""
            yield script.finding(
                RULE,
                call,
                f"`{text}(...)` on a line of its own is never entered: {effect}",
                f"write `with {text}(...):` around the lines concerned{instead}",
                failure_class="R13" if setter else "",
            )


def _no_effect(scopes: Scopes, call: ast.Call) -> str:
    word = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if isinstance(call.func, ast.Attribute) and word not in _WORDS:
        return ""
    name = scopes.dotted(call.func)
    if name in _FUNCTIONS:
        return "" if _is_decorating(call) else _FUNCTIONS[name]
    if not isinstance(call.func, ast.Attribute):
        return ""
    if word in _METHODS and not (isinstance(call.func.value, ast.Call) or name.startswith("_")):
        return _METHODS[word]
    if word == "join" and _is_ddp(scopes, call.func.value):
        return "uneven inputs are not joined"
    return ""


def _is_decorating(call: ast.Call) -> bool:
    return bool(call.args) and isinstance(call.args[0], ast.Lambda)


def _is_ddp(scopes: Scopes, node: ast.expr) -> bool:
    if not isinstance(node, ast.Name):
        return False
    made = [scopes.parents.get(b) for b in scopes.bindings(node.id, scopes.scope(node))]
    values = [m.value for m in made if isinstance(m, ast.Assign) and isinstance(m.value, ast.Call)]
    return bool(values) and scopes.dotted(values[-1].func).endswith(".DistributedDataParallel")


RULE: Rule[Script] = Rule(
    id="RW808",
    name="context-manager-without-with",
    severity="error",
    classes=("R13",),
    summary="a context manager is called but never entered: no effect",
    check=check,
    needs_ranks=False,
)
