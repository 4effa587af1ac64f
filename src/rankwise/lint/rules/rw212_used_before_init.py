"""Something needs the process group before it exists, or on a path where it is never created.

**Why it breaks.** ``ValueError: Default process group has not been initialized, please make sure to call
init_process_group``. ``DistributedSampler``, ``DistributedDataParallel`` and ``get_rank`` need the group as much as a
collective does.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(torch.nn.Linear(2, 1))
dist.init_process_group("gloo")
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 1))
dist.destroy_process_group()
```

**When it says nothing.** Samplers that get ``num_replicas`` and ``rank``, code that tests ``dist.is_initialized()``
first, and files that are parts of a larger program.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.names import DDP, FSDP, SAMPLER
from rankwise.lint.program import LIBRARIES
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import (
    INIT,
    above,
    is_hidden,
    is_sequence,
    line_of,
    node_in,
    starts_group,
    text_of,
)
from rankwise.lint.topics.turns import is_caught

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Entry, Script

_COLLECTIVES = frozenset(
    "torch.distributed." + name
    for name in ("all_reduce", "all_gather", "broadcast", "barrier", "reduce", "gather", "scatter", "reduce_scatter", "all_gather_object",
                 "broadcast_object_list", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all", "new_group", "send", "recv",
                 "get_rank", "get_world_size")
)  # fmt: skip
#: Packages whose objects make the group when they are made, or when they train.
_FRAMEWORKS = frozenset({"transformers", "accelerate", "rankwise"})
_ASKS = ("is_initialized", "is_available", "is_dist", "world_size", "distributed", "is_torchelastic")


def check(script: Script) -> Iterator[Finding]:
    """Uses of the group before, or without, the call that creates it."""
    seen: set[ast.AST] = set()
    for entry in script.entries:
        for call, message in _entry(script, entry):
            at = node_in(script, call) if entry.is_program or call.module is script.module else None
            if at is not None and at not in seen:
                seen.add(at)
                yield script.finding(RULE, at, message, "call dist.init_process_group before it")


def _entry(script: Script, entry: Entry) -> Iterator[tuple[Call, str]]:
    calls = entry.histories[0].calls
    inits = [call for call in calls if starts_group(call)]
    if not inits:
        yield from _never(script, entry)
        return
    first = inits[0]
    if first.name != INIT or _may_have_group(calls[: first.index]):
        return
    for call in calls:
        what = _needs_group(call)
        if (
            what is None
            or not is_sequence(entry, call, first)
            or _is_guarded(call, first)
            or ("spawned" in call.contexts) != ("spawned" in first.contexts)
        ):
            continue
        if call.index < first.index and not _in_own_loop(call, first):
            yield (
                call,
                f"{what} needs the process group, which is created only later, on line {line_of(first)}: it raises ValueError",
            )
        elif call.index > first.index and len(inits) == 1 and _is_optional(call, first) and entry.is_program:
            test = text_of(first.tests[-1][0])
            yield (
                call,
                f"{what} also runs where `{test}` is false, and then there is no process group: it raises ValueError",
            )


def _never(script: Script, entry: Entry) -> Iterator[tuple[Call, str]]:
    """A whole program that never creates a group, and calls nothing that may."""
    calls = entry.histories[0].calls
    if (
        not entry.is_program
        or script.piece.is_fragment
        or any(map(_may_start, calls))
        or _has_unread(script, calls)
    ):
        return
    for call in calls:
        what = _needs_group(call)
        if what is not None and not call.tests and not call.guards and not _is_guarded(call, call):
            yield (
                call,
                f"{what} needs the process group, and this program never creates one: it raises ValueError",
            )
            return


def _may_start(call: Call) -> bool:
    return is_hidden(call) or call.name.partition(".")[0] in _FRAMEWORKS


def _has_unread(script: Script, calls: list[Call]) -> bool:
    """Whether a module is imported whose text was not seen: it may create the group when it is imported."""
    seen = LIBRARIES.union(*({call.module.path.stem, *call.module.path.parts} for call in calls))
    imports = [node for node in ast.walk(script.tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "." for node in imports if isinstance(node, ast.ImportFrom)]
    return any(name.partition(".")[0] not in seen for name in names)


def _needs_group(call: Call) -> str | None:
    last = call.name.rpartition(".")[2]
    if call.name in _COLLECTIVES:
        return f"dist.{last}"
    if call.name in {DDP, FSDP}:
        return last
    if (
        call.name == SAMPLER
        and not call.has_star
        and (call.arg(1, "num_replicas") is None or call.arg(2, "rank") is None)
    ):
        return last
    return None


def _may_have_group(calls: list[Call]) -> bool:
    """Whether an unknown function may have created the group before."""
    return any(
        call.name.startswith("?")
        and any(word in call.name.lower() for word in ("init", "setup", "dist", "launch"))
        for call in calls
    )


def _is_guarded(call: Call, init: Call) -> bool:
    """Whether the code around it tests for a group."""
    shared = {id(site.node) for site in init.stack}
    functions = (
        [getattr(call.function, "node", None)] if call.stack and id(call.stack[-1].node) not in shared else []
    )
    functions += [None]
    tests = [ast.unparse(node) for node, _, _ in call.tests] + [
        ast.unparse(guard.node) for guard in call.guards
    ]
    tests += [
        ast.unparse(one)
        for one in above(call.module.tree, call.node)
        if isinstance(one, (ast.IfExp, ast.BoolOp))
    ]
    text = " ".join([*tests, *(_tests_in(node) for node in functions if node is not None)])
    return (
        any(word in text for word in _ASKS)
        or "except" in call.contexts
        or is_caught(call.module.tree, call.node)
    )


def _tests_in(function: ast.AST) -> str:
    return " ".join(
        ast.unparse(node.test)
        for node in ast.walk(function)
        if isinstance(node, (ast.If, ast.IfExp, ast.Assert))
    ) + " ".join(ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.BoolOp))


def _in_own_loop(call: Call, init: Call) -> bool:
    return bool(call.loops) and bool(init.loops) and call.loops[0] is init.loops[0]


def _is_optional(call: Call, init: Call) -> bool:
    """Whether the group is created under a test, and no test encloses the call."""
    if not init.tests or init.tests[-1][2] is not True or call.tests or call.guards:
        return False
    word = ast.unparse(init.tests[-1][0])
    is_option = isinstance(init.tests[-1][0], (ast.Name, ast.Attribute))
    return is_option and not any(word in ast.unparse(site.node) for site in call.stack)


RULE: Rule[Script] = Rule(
    id="RW212",
    name="used-before-init",
    severity="error",
    classes=("I15",),
    summary="something needs the process group before it exists",
    check=check,
)
