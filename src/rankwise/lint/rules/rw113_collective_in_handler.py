"""A collective in `except` or `finally`.

**Why it breaks.** An exception occurs on one rank. That rank reaches the handler's collective while the others are in
another one: both block, and the traceback that would explain it is never printed.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(1)
try:
    value = float(open("value.txt").read())
    dist.all_reduce(x)
except OSError:
    dist.barrier()
    raise
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(1)
try:
    value = float(open("value.txt").read())
    dist.all_reduce(x)
finally:
    dist.destroy_process_group()
```

**When it says nothing.** The handler makes exactly the collectives that the body would have made. A collective in
`finally` is a warning: it is harmless until something fails.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.paths.found import all_local_paths
from rankwise.lint.paths.words import called
from rankwise.lint.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.finding import Finding
    from rankwise.lint.model.history import Fork, Loop, Op
    from rankwise.lint.paths.local import LocalPath
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Ops that a rank reaches only because of an exception."""
    for path in all_local_paths(script):
        if path.kind not in {"handler", "finally"}:
            continue
        op = path.op
        node = op.call.node if op.call.module is script.module else path.item.node
        is_handler = path.kind == "handler"
        if not op.is_sure:
            continue
        if "signal" in path.item.value.origin:
            yield script.finding(
                RULE,
                node,
                f"{called(op)} in a signal handler: each rank gets the signal at a different moment, even inside another collective",
                "only set a flag in the handler; let all ranks agree on it at the end of a step (all_reduce with MAX)",
                failure_class="K9",
            )
            continue
        yield script.finding(
            RULE,
            node,
            f"a rank with an exception reaches {called(op)} in `{'except' if is_handler else 'finally'}`, while the others"
            " are in another collective: both block, and the traceback is never printed",
            f"let the exception end the rank (the launcher stops the others), and remove {called(op)} from the handler",
            severity=_severity(path),
        )


def _severity(path: LocalPath) -> Severity:
    if path.kind == "handler":
        return "warning" if _is_ctrl_c(path.item) else "error"
    return "hint" if _is_context_manager(path.op) else "warning"


def _is_ctrl_c(item: Fork | Loop) -> bool:
    """Whether only Ctrl-C is handled: a terminal sends it to all ranks."""
    handlers = getattr(item.node, "handlers", [])
    return bool(handlers) and all(
        isinstance(one.type, ast.Name) and one.type.id == "KeyboardInterrupt" for one in handlers
    )


def _is_context_manager(op: Op) -> bool:
    """Whether it ends a context manager, which must happen whatever was inside."""
    function = getattr(op.call.function, "node", None)
    return function is not None and any(isinstance(one, ast.Yield) for one in ast.walk(function))


RULE: Rule[Script] = Rule(
    id="RW113",
    name="collective-in-handler",
    severity="error",
    classes=("C25", "K9"),
    summary="a collective in `except` or `finally`",
    check=check,
)
