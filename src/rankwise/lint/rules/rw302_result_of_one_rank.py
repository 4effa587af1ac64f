"""The result of reduce or gather is used on ranks that do not have it.

**Why it breaks.** `dist.reduce(x, dst=0)` and `dist.gather(...)` leave the result on one rank. The others hold a
partial sum, their own value, or nothing: they continue with wrong numbers, different on each rank.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loss = torch.rand(1)
dist.reduce(loss, dst=0)
rate = 0.1 / (1 + loss.item())
print(rate)
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loss = torch.rand(1)
dist.all_reduce(loss)
rate = 0.1 / (1 + loss.item())
print(rate)
dist.destroy_process_group()
```

**When it says nothing.** The result is used under a test on the rank, broadcast afterwards, or returned to a caller
that the check can't see.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import span_of
from rankwise.lint.library.acts import ACTS
from rankwise.lint.model.notes import LEFT
from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import ROOTED, filled_node, root_rank, word_of
from rankwise.lint.topics.job_view import is_distributed, parents_of, places_of, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script

#: Methods that put a value by, for whoever asks for it.
_KEEPS = frozenset({"append", "extend", "clear", "setdefault", "__setitem__", "__setattr__"})


def check(script: Script) -> Iterator[Finding]:
    """Uses of a result that `reduce`, `gather` or `gather_object` leaves on one rank only."""
    reported: set[ast.AST] = set()
    for entry in script.entries:
        history = entry.histories[-1]
        if not is_distributed(entry):
            continue
        makers = {f"{LEFT}{id(call.node)}": call for call in history.calls if word_of(call) in ROOTED}
        for place in places_of(entry, module=script.module):
            call = place.last
            is_here = place.is_made_by_all and not call.guards and call.rank == history.rank
            for node, value in _used(script, call) if is_here else ():
                for origin in value.origin:
                    made = makers.get(origin)
                    if made is not None and made.node not in reported and made.module is script.module:
                        reported.add(made.node)
                        yield _tell(script, made, node)


def _used(script: Script, call: Call) -> Iterator[tuple[ast.AST, Value]]:
    """What a call that is made for its effect works with, and what the tests around any call ask for."""
    yield from ((test, value) for test, value, _ in call.tests)
    word = call.name.rpartition(".")[2]
    is_statement = isinstance(parents_of(script.tree).get(call.node), ast.Expr)
    if is_statement and call.name not in ACTS and word not in _KEEPS and not word.endswith("_"):
        yield from ((call.node, value) for value in (call.receiver, *call.args, *call.kwargs.values()))


def _tell(script: Script, made: Call, used: ast.AST) -> Finding:
    word, key, root = word_of(made), text_of(filled_node(made)), root_rank(made) or 0
    # Shown beside the rank it may be meant; what was made of it is not.
    is_shown = isinstance(used, ast.Call) and text_of(used.func) == "print" and key in ast.unparse(used)
    return script.finding(
        RULE,
        used,
        f"every rank uses `{key}` here, but `{word}` gives the result to rank {root} only; the others hold something else",
        f"use `all_{word}`, broadcast `{key}` afterwards, or use it under `if dist.get_rank() == {root}`",
        severity="warning" if is_shown else "error",
        also=[(f"{word} to rank {root}", script.piece.path, span_of(made.node, script.lines))],
    )


RULE: Rule[Script] = Rule(
    id="RW302",
    name="result-of-one-rank",
    severity="error",
    classes=("C16",),
    summary="the result of reduce or gather is used on ranks that do not have it",
    check=check,
)
