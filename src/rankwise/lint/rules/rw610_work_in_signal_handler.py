"""A signal handler saves, or waits for other ranks, in the middle of a step.

**Why it breaks.** Python runs the handler between two lines of the training step: the optimizer may have updated only
some parameters, other ranks are in another step, and a collective here pairs with one of theirs. The file is
inconsistent, or the job hangs until the scheduler kills it.

Bad:

```python
import signal
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)


def stop(number, frame):
    dist.barrier()
    sys.exit(0)


signal.signal(signal.SIGTERM, stop)
dist.destroy_process_group()
```

Good:

```python
import signal

import torch.distributed as dist

dist.init_process_group("gloo")
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
dist.destroy_process_group()
```

**When it says nothing.** The handler only sets a flag, and programs that create no process group.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.model.values import Bound, Function
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import called_names, is_distributed, once, places

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script
    from rankwise.lint.topics.job_view import Place

_SAVES = frozenset(
    {
        "save",
        "save_checkpoint",
        "save_state",
        "save_pretrained",
        "save_snapshot",
        "checkpoint",
        "save_model",
        "dump",
    }
)
_MEETS = frozenset({"barrier", "all_reduce", "all_gather", "broadcast", "wait_for_everyone", "all_gather_object", "broadcast_object_list",
                    "destroy_process_group", "save_state"})  # fmt: skip
_LEAVES = frozenset({"exit", "_exit", "quit"})


def check(script: Script) -> Iterator[Finding]:
    """Handlers that do more than set a flag."""
    for place in once(places(script, "signal.signal")):
        if not is_distributed(place.entry):
            continue
        handler = _handler(place)
        if handler is not None:
            yield from _judge(script, place, handler)
        elif _is_term(place) and ast.unparse(place.last.arg_node(1, "handler") or place.last.node).endswith(
            "SIG_IGN"
        ):
            message = "SIGTERM is ignored: on preemption the scheduler kills the job after its grace period, and nothing is saved"
            yield script.finding(RULE, place.last.node, message, _FIX, severity="warning", failure_class="R7")


def _handler(place: Place) -> ast.AST | None:
    value = place.last.arg(1, "handler")
    thing = value.thing if value is not None else None
    function = thing.function if isinstance(thing, Bound) else thing
    return function.node if isinstance(function, Function) else None


def _judge(script: Script, place: Place, handler: ast.AST) -> Iterator[Finding]:
    names = _with_helpers(script, handler)
    meets = sorted(_MEETS & names)
    if meets and meets != ["destroy_process_group"]:
        message = f"the handler calls {meets[0]} in the middle of a step: other ranks are elsewhere and do not call it"
        yield script.finding(RULE, place.last.node, message, _FIX, severity="error")
    elif saves := sorted(_SAVES & names):
        message = f"the handler calls {saves[0]} in the middle of a step: it may save a partial update"
        yield script.finding(RULE, place.last.node, message, _FIX)
    elif _is_term(place) and _LEAVES & names:
        message = "the SIGTERM handler exits at once: all work since the last checkpoint is lost"
        yield script.finding(RULE, place.last.node, message, _FIX, failure_class="R7")


def _with_helpers(script: Script, handler: ast.AST) -> set[str]:
    """All that the handler calls, directly or through functions of this file."""
    names = called_names(handler)
    for node in ast.walk(script.tree):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            names |= called_names(node)
    return names


def _is_term(place: Place) -> bool:
    return "SIGTERM" in ast.unparse(place.last.arg_node(0, "signalnum") or place.last.node)


_FIX = "only set a flag in the handler; at the end of a step let all ranks agree on it, save, and exit"

RULE: Rule[Script] = Rule(
    id="RW610",
    name="work-in-signal-handler",
    severity="warning",
    classes=("K9", "R7"),
    summary="a signal handler saves or waits for other ranks",
    check=check,
)
