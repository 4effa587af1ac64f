"""Constants overwrite the variables by which the script's processes find each other.

**Why it breaks.** A launcher sets MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE for each process. A script that
overwrites them sends the ranks to a port where nothing listens: they hang. With a fixed port the second job on a host
also fails with ``EADDRINUSE``, or joins the first one.

Bad:

```python
import os

import torch.distributed as dist

os.environ["MASTER_ADDR"] = "10.0.0.5"
os.environ["MASTER_PORT"] = "12355"
dist.init_process_group("gloo")
print(os.environ["LOCAL_RANK"])
dist.destroy_process_group()
```

Good:

```python
import os

import torch.distributed as dist

os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "29501")
dist.init_process_group("gloo")
print(os.environ["LOCAL_RANK"])
dist.destroy_process_group()
```

**When it says nothing.** ``os.environ.setdefault``, settings under a test of the environment, ports that were chosen
because they are free, and programs of one process.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import settings, spawns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script
    from rankwise.lint.topics.job_view import Setting

_KEYS = frozenset({"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"})
_LOCAL_ADDRESS = re.compile(r"tcp://(localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\]):[1-9]\d*$")
_READS = frozenset({"os.environ.__getitem__", "os.environ.get", "os.getenv"})


def check(script: Script) -> Iterator[Finding]:
    """Constants that overwrite a launcher's variables, and fixed ports."""
    found = [one for one in settings(script) if one.key in _KEYS]
    numbers = [one for one in found if _is_number(one)]
    yield from (_tell_number(script, one) for one in numbers)
    found = [one for one in found if one not in numbers]
    written = {one.key for one in found}
    if (
        {"RANK", "WORLD_SIZE"} <= written
        and {str(one.value.const) for one in found if one.key == "WORLD_SIZE"} == {"1"}
        and not _reads(script, written)
    ):
        return
    launched = _is_launched(script, written)
    for one in found:
        if one.value.const is None or not one.value.is_known or one.value.spread or _asks_first(one):
            continue
        if one.value.origin & {"world_size", "local_world_size"} or _is_in_test(one):
            # Restored, or passed on by the process that starts the others; a test of one process.
            continue
        if launched is not None:
            yield _tell_launched(script, one, launched)
        elif one.key == "MASTER_PORT" and _is_distributed(script):
            yield script.finding(
                RULE,
                one.node,
                f"each run uses port {one.value.const}: a second job on this host fails, or joins the first one",
                "let the launcher choose the port, or bind a free one once in the parent and pass it on",
                severity="warning",
                failure_class="I9",
            )
    yield from _fixed_addresses(script)


def _is_number(setting: Setting) -> bool:
    value = setting.value
    is_item = setting.place.last.name != "os.putenv"
    return (
        is_item and value.is_known and isinstance(value.const, int) and not value.spread and not value.origin
    )


def _tell_number(script: Script, setting: Setting) -> Finding:
    key, const = setting.key, setting.value.const
    return script.finding(
        RULE,
        setting.node,
        f'os.environ["{key}"] gets the number {const}, but takes strings only: every rank fails here with'
        " `TypeError: str expected, not int`",
        f'write it as a string: `"{const}"`',
        failure_class="I9" if key == "MASTER_PORT" else "L12",
    )


def _fixed_addresses(script: Script) -> Iterator[Finding]:
    """`init_method="tcp://localhost:23456"` in a program that starts its own ranks, or whose ranks are started by hand."""
    for call in script.calls_of("torch.distributed.init_process_group"):
        method = call.arg(1, "init_method")
        text = method.const if method is not None else None
        by_hand = {"rank", "world_size"} <= set(call.kwargs) and call.kwargs["world_size"].const != 1
        if isinstance(text, str) and _LOCAL_ADDRESS.match(text) and (by_hand or spawns(script)):
            yield script.finding(
                RULE,
                call.node,
                f"each run uses the port of {text}: a second job on this host fails, or joins the first one",
                "bind a free port once in the parent and pass it to the ranks"
                if spawns(script)
                else "take the address and the port from the command line, or start the ranks with torchrun, which chooses a port",
                severity="warning",
                failure_class="I9",
            )


def _is_distributed(script: Script) -> bool:
    return script.has_init or spawns(script)


def _reads(script: Script, written: set[str]) -> list[str]:
    """Variables that only a launcher sets, which the script reads and does not write itself."""
    found = []
    for call in script.all_calls:
        key = call.args[0].const if call.name in _READS and call.args else None
        if (
            key in {"RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE"}
            and key not in written
        ):
            found.append(str(key))
    return found


def _is_launched(script: Script, written: set[str]) -> str | None:
    """How it is known that a launcher starts the script; None if it is not."""
    if spawns(script) or "SLURM_" in script.piece.code:
        return None
    read = _reads(script, written)
    if read:
        return f"the launcher that sets {read[0]}"
    text = ast.get_docstring(script.tree) or ""
    return "torchrun" if "torchrun" in text or "torch.distributed.run" in text else None


def _asks_first(setting: Setting) -> bool:
    """Whether it is set only where a test of the environment has shown that it is not set."""
    call = setting.place.last
    tests = [*(node for node, _, _ in call.tests), *(guard.node for guard in call.guards)]
    return any(
        word in ast.unparse(node) for node in tests for word in ("environ", "getenv", "SLURM", "initialized")
    )


def _is_in_test(setting: Setting) -> bool:
    functions = [getattr(setting.place.last.function, "node", None)]
    return any(getattr(node, "name", "").startswith(("test_", "setUp")) for node in functions)


def _tell_launched(script: Script, setting: Setting, launched: str) -> Finding:
    key, const = setting.key, setting.value.const
    if key.startswith("MASTER"):
        message = (
            f"{key} = {const!r} overwrites what {launched} set: ranks look for each other in the wrong place"
        )
    else:
        message = f"{key} = {const!r} overwrites what {launched} set: all processes claim the same place"
    return script.finding(
        RULE,
        setting.node,
        message,
        f"remove the line, or use os.environ.setdefault({key!r}, {str(const)!r})",
        severity="warning" if key == "MASTER_ADDR" else "error",
    )


RULE: Rule[Script] = Rule(
    id="RW207",
    name="launcher-variable-overwritten",
    severity="error",
    classes=("L12", "I9"),
    summary="constants overwrite the launcher's variables",
    check=check,
)
