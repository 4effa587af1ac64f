"""The backend is NCCL, but the script works on the CPU, or on a device that NCCL does not support.

**Why it breaks.** NCCL moves tensors between NVIDIA GPUs only. Without them ``init_process_group("nccl")`` fails with
``Distributed package doesn't have NCCL built in``, or the first collective with ``No backend type associated with
device type cpu``.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

device = torch.device("cpu")
dist.init_process_group("nccl")
model = DDP(torch.nn.Linear(4, 1).to(device))
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

device = torch.device("cpu")
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1).to(device))
dist.destroy_process_group()
```

**When it says nothing.** The backend is chosen by ``torch.cuda.is_available()`` or is ``"cpu:gloo,cuda:nccl"``; the
script ends where there is no GPU.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.names import DDP
from rankwise.lint.model.values import Instance, Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import INIT, backend_of, once, places, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

_OTHERS = ("cpu", "mps")
_GPU_WORDS = ("cuda", ".to(", "device", "gpu", "prepare", "accelerat")


def check(script: Script) -> Iterator[Finding]:
    """Calls of init_process_group with NCCL in scripts for the CPU."""
    for place in once(places(script, INIT)):
        call = place.last
        if backend_of(call) != "nccl" or any(
            "is_available" in ast.unparse(test) or "cuda" in ast.unparse(test) for test, _, _ in call.tests
        ):
            continue
        node = call.arg_node(0, "backend") or call.node
        severity: Severity = "error"
        where = _only_device(script)
        if where is not None:
            message, severity = (
                f'the backend is NCCL, but all work is done on "{where}": NCCL only moves data between GPUs',
                "error",
            )
        elif (model := _stays_on_cpu(script)) is not None:
            message = f"the backend is NCCL, but `{model}` is never moved to a GPU: NCCL only moves data between GPUs"
        elif (
            (line := _fallback(script)) is not None
            and not _is_elsewhere(script, call, line)
            and "exit" not in script.piece.code
        ):
            message = f"without CUDA the device falls back to the CPU (line {line}), but the backend stays NCCL and fails"
            severity = "warning"
        else:
            continue
        fix = 'use "gloo", or "nccl" if torch.cuda.is_available() else "gloo"'
        yield script.finding(RULE, node, message, fix, severity=severity)


def _only_device(script: Script) -> str | None:
    """The device that the script names, if it names no GPU."""
    words = {
        one.value.partition(":")[0]
        for one in ast.walk(script.tree)
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and len(one.value) < 12
    }
    uses = {one.attr for one in ast.walk(script.tree) if isinstance(one, ast.Attribute)} | {
        keyword.arg for one in ast.walk(script.tree) if isinstance(one, ast.Call) for keyword in one.keywords
    }
    if (
        "cuda" in words | uses
        or uses & {"device_ids", "accelerator", "device_id", "local_rank", "gpu"}
        or _moves_to_number(script)
    ):
        return None
    named = [
        str(call.args[0].const).partition(":")[0]
        for call in script.calls_of("torch.device")
        if call.args and call.args[0].is_known
    ]
    named += [
        node.value.value
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and node.value.value in _OTHERS
    ]
    return named[0] if named and set(named) <= set(_OTHERS) else None


def _stays_on_cpu(script: Script) -> str | None:
    """A model that is wrapped where it was created, in a file that never mentions GPUs or devices."""
    text = script.piece.code.lower()
    if any(word in text for word in _GPU_WORDS) or len({call.module for call in script.all_calls}) > 1:
        return None
    for call in script.calls_of(DDP):
        model = call.arg(0, "module")
        thing = model.thing if model is not None else None
        if isinstance(thing, Instance) or (isinstance(thing, Object) and thing.kind.startswith("torch.nn.")):
            return text_of(call.arg_node(0, "module"))
    return None


def _moves_to_number(script: Script) -> bool:
    """``model.to(rank)``: a number names a GPU."""
    return any(
        call.name.endswith(".to")
        and call.args
        and (isinstance(call.args[0].const, int) or "rank" in call.args[0].path or call.args[0].spread)
        for call in script.all_calls
    )


def _fallback(script: Script) -> int | None:
    """The line where the device becomes the CPU if there is no CUDA."""
    for node in ast.walk(script.tree):
        if (
            isinstance(node, ast.IfExp)
            and "cuda.is_available" in ast.unparse(node.test)
            and _says_cpu(node.orelse)
        ):
            return node.lineno
        if (
            isinstance(node, ast.If)
            and "cuda.is_available" in ast.unparse(node.test)
            and any(_says_cpu(one) for one in node.orelse)
        ):
            return node.lineno
        if isinstance(node, ast.FunctionDef):
            tests = [
                one
                for one in node.body
                if isinstance(one, ast.If) and "cuda.is_available" in ast.unparse(one.test)
            ]
            last = node.body[-1]
            if tests and isinstance(last, ast.Return) and last.value is not None and _says_cpu(last.value):
                return last.lineno
    return None


def _is_elsewhere(script: Script, call: Call, line: int) -> bool:
    """Whether the process group is created in one branch of a test, and a line is in the other."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.If) and node.orelse:
            arms = (node.body, node.orelse)
            inits = [any(call.node in ast.walk(one) for one in arm) for arm in arms]
            lines = [any(one.lineno <= line <= (one.end_lineno or line) for one in arm) for arm in arms]
            if any(inits) and any(lines) and inits != lines:
                return True
    return False


def _says_cpu(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Constant) and one.value == "cpu" for one in ast.walk(node))


RULE: Rule[Script] = Rule(
    id="RW213",
    name="nccl-without-gpu",
    severity="error",
    classes=("I17",),
    summary="the backend is NCCL in a script that works on the CPU",
    check=check,
)
