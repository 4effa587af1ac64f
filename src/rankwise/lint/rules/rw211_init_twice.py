"""The process group is created a second time while the first one still exists.

**Why it breaks.** ``ValueError: trying to initialize the default process group twice!`` The second call is often in
another function, in a class, or in the next iteration of a loop.

Bad:

```python
import torch.distributed as dist

for fold in range(5):
    dist.init_process_group("gloo")
    dist.barrier()
dist.destroy_process_group()
```

Good:

```python
import torch.distributed as dist

dist.init_process_group("gloo")
for fold in range(5):
    dist.barrier()
dist.destroy_process_group()
```

**When it says nothing.** The group is destroyed in between, or the call is under ``if not dist.is_initialized()``.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.model.calls import arms_of
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import DESTROY, INIT, SPAWN, is_sequence, line_of, node_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Entry, Script

_MAKES = frozenset({INIT, "accelerate.Accelerator", "lightning.fabric.Fabric"})


def check(script: Script) -> Iterator[Finding]:
    """Second calls of init_process_group in one process."""
    seen: set[ast.AST] = set()
    for entry in script.entries:
        for call, message in _again(entry):
            node = node_in(script, call)
            if node is not None and node not in seen:
                seen.add(node)
                yield script.finding(
                    RULE, node, message, "create the group once, or test `if not dist.is_initialized()` first"
                )


def _again(entry: Entry) -> Iterator[tuple[Call, str]]:
    calls = [
        call for call in entry.histories[0].calls if call.name in {*_MAKES, DESTROY, "?destroy_process_group"}
    ]
    spawns = {id(call.node) for call in entry.histories[0].calls if call.name == SPAWN}
    held: Call | None = None
    for call in calls:
        if call.name.endswith("destroy_process_group"):
            held = None
        elif call.name == INIT:
            if _asks(call) or _is_made_once(call):
                held = held or call
                continue
            if (
                held is not None
                and _process_of(held, spawns) == _process_of(call, spawns)
                and not _other_arm(held, call)
                and is_sequence(entry, held, call)
            ):
                yield (
                    call,
                    f"the process group already exists (line {line_of(held)}): this raises ValueError",
                )
            elif call.loops and not _destroyed_in_loop(calls, call):
                yield (
                    call,
                    "the process group is created in each iteration of the loop and never destroyed: the second iteration raises ValueError",
                )
            held = call
        elif held is None and not call.args:
            held = call


def _process_of(call: Call, spawns: set[int]) -> tuple[int, ...]:
    """The calls that led to the process that makes a call: each mp.spawn starts new ones."""
    sites = [id(site.node) for site in call.stack]
    return tuple(sites[: max((sites.index(one) + 1 for one in spawns if one in sites), default=0)])


def _asks(call: Call) -> bool:
    tests = [*(node for node, _, _ in call.tests), *(guard.node for guard in call.guards)]
    node = getattr(call.function, "node", None)
    # A decided test leaves no trace in the call; its function's text does.
    return any("initialized" in ast.unparse(test) for test in tests) or (
        node is not None and "is_initialized" in ast.unparse(node)
    )


def _is_made_once(call: Call) -> bool:
    """Whether it is in the constructor of a singleton, or of a class that remembers the call."""
    function = call.function
    owner = getattr(function, "owner", None)
    if owner is None:
        return False
    return (
        "__new__" in owner.attrs
        or any(base.path.endswith("Singleton") for base in owner.bases)
        or (
            getattr(function.node, "name", "") == "__init__" and "instance" in ast.unparse(owner.node).lower()
        )
    )


def _other_arm(one: Call, other: Call) -> bool:
    # Whatever made the first one under a test may have left with it, or exclude the second.
    return not arms_of(one.tests) <= arms_of(other.tests)


def _destroyed_in_loop(calls: list[Call], call: Call) -> bool:
    return any(one.name.endswith("destroy_process_group") and call.loops[-1] in one.loops for one in calls)


RULE: Rule[Script] = Rule(
    id="RW211",
    name="init-twice",
    severity="error",
    classes=("I16",),
    summary="the process group is created twice",
    check=check,
)
