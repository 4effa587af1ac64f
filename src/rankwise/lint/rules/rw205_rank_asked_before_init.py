"""The rank is read before the process group exists, so each rank thinks it is rank 0.

**Why it breaks.** ``dist.get_rank() if dist.is_initialized() else 0`` is 0 on each rank until ``init_process_group``
has run. A guard based on it lets all ranks download, log and save at once; if it is kept in a variable, it stays wrong.

Bad:

```python
import torch
import torch.distributed as dist
import wandb


def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0


if is_main():
    wandb.init(project="mine")
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
import wandb


def is_main():
    return not dist.is_initialized() or dist.get_rank() == 0


dist.init_process_group("gloo")
if is_main():
    wandb.init(project="mine")
dist.barrier()
dist.destroy_process_group()
```

**When it says nothing.** The rank is read from the environment, no group is created later in the same process, and ``if
not dist.is_initialized(): dist.init_process_group(...)``.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import (
    above,
    called_names,
    is_sequence,
    line_of,
    starts_group,
    statement_of,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.program import Module
    from rankwise.lint.script import Script

_ASKS = "torch.distributed.is_initialized"
#: Functions that return the answer.
_DEEPEST = 3
_ONLY_TALK = frozenset(
    {"print", "info", "warning", "debug", "log", "write", "setLevel", "basicConfig", "join", "format"}
)


def check(script: Script) -> Iterator[Finding]:
    """Places where a rank is read too early."""
    seen: set[ast.AST] = set()
    for entry in script.entries:
        calls = entry.histories[0].calls
        inits = [call for call in calls if starts_group(call)]
        for call in calls:
            if call.name != _ASKS or "before_init" not in call.result.origin:
                continue
            later = next(
                (
                    one
                    for one in inits
                    if one.index > call.index and _same_process(one, call) and is_sequence(entry, one, call)
                ),
                None,
            )
            if later is None or not _stands_for_rank(call, later):
                continue
            at = _use(script, call)
            if at is not None and at not in seen:
                seen.add(at)
                yield _tell(script, at, later)


def _same_process(init: Call, call: Call) -> bool:
    return ("spawned" in init.contexts) == ("spawned" in call.contexts)


def _stands_for_rank(call: Call, init: Call) -> bool:
    """Whether the test chooses between the rank and a substitute for it."""
    frames = [(call.module, call.node), *((site.module, site.node) for site in call.stack[::-1])]
    for module, node in frames[:_DEEPEST]:
        answer = _is_stand_in(module, node, call, init)
        if answer is not None:
            return answer
    return False


def _is_stand_in(module: Module, asked: ast.AST, call: Call, init: Call) -> bool | None:
    """The same for one function; None if it only returns the answer to its caller: `is_dist()`."""
    for node in above(module.tree, asked):
        if isinstance(node, (ast.IfExp, ast.BoolOp)) and "get_rank" in called_names(node):
            return True
        if (
            isinstance(node, ast.If)
            and asked in set(ast.walk(node.test))
            and "get_rank" in called_names(node)
            and not _inits(node)
        ):
            return True
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if _only_answers(node):
                return None
            is_inside = bool(call.stack) and init.stack[: len(call.stack)] == call.stack
            return _returns(node) and "get_rank" in called_names(node) and not is_inside and not _inits(node)
    return False


def _only_answers(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function only returns True, False, or the requested value."""
    return called_names(function) <= {"is_initialized", "is_available"} and _returns(function)


def _inits(node: ast.AST) -> bool:
    return any("init" in name and "initialized" not in name for name in called_names(node))


def _returns(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Return) and one.value is not None for one in ast.walk(node))


def _use(script: Script, call: Call) -> ast.AST | None:
    """The place in this file where the answer is used, past all functions that only return it."""
    node, module = call.node, call.module
    for site in call.stack[::-1]:
        function = next(
            (
                one
                for one in above(module.tree, node)
                if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))
            ),
            None,
        )
        if function is None or not _returns(function):
            break
        node, module = site.node, site.module
    return node if module is script.module else None


def _tell(script: Script, at: ast.AST, init: Call) -> Finding:
    where = f" on line {line_of(init)}" if init.module is script.module else f" in {init.module.shown}"
    statement = statement_of(script.tree, at)
    is_talk = (
        isinstance(statement, ast.If)
        and set().union(*(called_names(one) for one in statement.body)) <= _ONLY_TALK
    )
    shown = text_of(at if isinstance(at, ast.expr) else None) or "this"
    return script.finding(
        RULE,
        at,
        f"`{shown}` is called before the process group is created{where}: every rank thinks it is rank 0 here",
        "create the process group first, or read int(os.environ['RANK'])",
        severity="warning" if is_talk else "error",
    )


RULE: Rule[Script] = Rule(
    id="RW205",
    name="rank-asked-before-init",
    severity="error",
    classes=("I25",),
    summary="the rank is read before the process group exists",
    check=check,
)
