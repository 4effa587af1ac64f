"""The return value of an in-place collective is used, but it is None.

**Why it breaks.** ``total = dist.all_reduce(x)`` puts the sum into ``x`` and None into ``total``: ``total / world`` is a TypeError and
``total.item()`` an AttributeError on every rank. Printed or logged, it is ``None``.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(1)
total = dist.all_reduce(x)
print(total / dist.get_world_size())
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
print(x / dist.get_world_size())
dist.destroy_process_group()
```

**When it says nothing.** With ``async_op`` (a handle is returned), for functional collectives and
``torch.distributed.nn``, where the result is tested before it is used, and where the name may have been assigned
another value.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.library.acts import ACTS
from rankwise.lint.model.notes import NoneUse
from rankwise.lint.model.values import Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.turns import is_caught

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

#: Functions that fail with a None, or show it.
_TAKES = frozenset({*(f"builtins.{name}" for name in "print float int len sum abs round list tuple min max".split()),  # noqa: SIM905
                    "torch.stack", "torch.cat", "torch.mean", "torch.sum"})  # fmt: skip


def check(script: Script) -> Iterator[Finding]:
    """The first use of what each in-place collective returned."""
    reported: set[ast.AST] = set()
    for use in sorted(_uses(script), key=lambda use: (use.node.lineno, use.node.col_offset)):
        made = use.made.node
        if (
            use.module is script.module
            and use.made.module is script.module
            and made not in reported
            and not is_caught(script.tree, use.node)
        ):
            reported.add(made)
            act = ACTS[use.made.name]
            filled = text_of(use.made.arg_node(*act.fills[:2])) if act.fills is not None else ""
            name = text_of(getattr(made, "func", made))
            yield script.finding(
                RULE,
                use.node,
                f"`{name}` returns None{f' and its result is in `{filled}`' if filled else ''}, but `{text_of(use.node)}` uses the None",
                f"call `{text_of(made)}` on a line of its own{f' and continue with `{filled}`' if filled else ''}",
            )


def _uses(script: Script) -> Iterator[NoneUse]:
    yield from (note for note in script.notes if isinstance(note, NoneUse))
    for call in script.all_calls:
        if call.name in _TAKES and isinstance(call.node, ast.expr):
            for value in call.args:
                thing = value.thing
                if isinstance(thing, Object) and thing.kind == "None" and thing.call is not None:
                    yield NoneUse(call.node, call.module, thing.call)


RULE: Rule[Script] = Rule(
    id="RW319",
    name="result-of-collective-is-none",
    severity="error",
    classes=(),
    summary="the return value of an in-place collective is used, but it is None",
    check=check,
    needs_ranks=False,
)
