"""A variable gets its value on some ranks only, and all ranks read it.

**Why it breaks.** ``if rank == 0: writer = SummaryWriter()`` leaves no ``writer`` on the other ranks. Where all of them use
it, they end with ``NameError`` or ``AttributeError``, and rank 0 waits for them in its next collective.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    log = open("log.txt", "w")
loss = torch.ones(1)
dist.broadcast(loss, src=0)
log.write(str(loss.item()))
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    log = open("log.txt", "w")
loss = torch.ones(1)
dist.broadcast(loss, src=0)
if dist.get_rank() == 0:
    log.write(str(loss.item()))
dist.destroy_process_group()
```

**When it says nothing.** A test on the rank encloses the read, or may (a function whose text is not at hand); the name has a
value before, or on the other ranks too; the exception is caught.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from typing import TYPE_CHECKING

from rankwise.lint.model.notes import Unbound
from rankwise.lint.rule import Rule
from rankwise.lint.topics.turns import is_caught

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Reads that some ranks make in vain, the first of each name."""
    lacking: defaultdict[tuple[ast.Name | ast.Attribute, str], set[int]] = defaultdict(set)
    for note in script.notes:
        if isinstance(note, Unbound) and note.module is script.module and not _may_choose(note):
            lacking[note.node, note.history.entry].add(note.history.rank)
    ranks = {entry.name: {history.rank for history in entry.histories} for entry in script.entries}
    stored = {
        _name(node)
        for node in (ast.walk(script.tree) if lacking else ())
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store)
    }
    reported = set()
    for (node, entry), without in lacking.items():
        having = ranks[entry] - without
        name = ast.unparse(node)
        # Two ranks there are in any job; a test on rank 2 may be of a job that has no others.
        if (
            having
            and without & {0, 1}
            and name not in reported
            and _name(node) in stored
            and not is_caught(script.tree, node)
        ):
            who = "only rank 0 has" if having == {0} else "only some ranks have"
            kind = "NameError" if isinstance(node, ast.Name) else "AttributeError"
            reported.add(name)
            yield script.finding(
                RULE,
                node,
                f"{who} given `{name}` a value, and all ranks read it here: {kind} on the others",
                "read it only where it was set, or give it a value (None) on the other ranks",
                severity="error" if entry == "the program" else "warning",
            )


def _name(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else f".{node.attr}"


def _may_choose(note: Unbound) -> bool:
    """Whether a test around a read calls something, which may ask for the rank."""
    return any(isinstance(one, ast.Call) for test, _, _ in note.tests for one in ast.walk(test))


RULE: Rule[Script] = Rule(
    id="RW818",
    name="value-of-some-ranks",
    severity="error",
    classes=(),
    summary="a variable gets its value on some ranks only, and all ranks read it",
    check=check,
)
