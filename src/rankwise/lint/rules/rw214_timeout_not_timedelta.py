"""A timeout is given as a number, but torch takes a timedelta.

**Why it breaks.** ``TypeError: Expected timeout argument to be of type datetime.timedelta, got 1800``, on each rank, at once.

Bad:

```python
import torch.distributed as dist

dist.init_process_group("gloo", timeout=1800)
dist.destroy_process_group()
```

Good:

```python
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=1800))
dist.destroy_process_group()
```

**When it says nothing.** ``None``, and timeouts of anything else, such as a loader's or a request's.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import INIT, once, places, text_of
from rankwise.lint.topics.option_text import option_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

#: The position of the timeout.
_POSITIONS = {
    INIT: 2,
    "torch.distributed.new_group": 1,
    "torch.distributed.monitored_barrier": 1,
    "torch.distributed.TCPStore": 4,
    "torch.distributed.new_subgroups": None,
    "accelerate.InitProcessGroupKwargs": None,
    "accelerate.utils.InitProcessGroupKwargs": None,
    "accelerate.utils.dataclasses.InitProcessGroupKwargs": None,
}


def check(script: Script) -> Iterator[Finding]:
    """Timeouts of process groups that are numbers."""
    for place in once(places(script, *_POSITIONS)):
        call = place.last
        position = _POSITIONS[call.name]
        node = call.arg_node(position, "timeout")
        if node is not None and _is_number(script, call, position, node):
            text = text_of(node)
            yield script.finding(
                RULE,
                node,
                f"timeout={text} is a number, and {call.name.rpartition('.')[2]} takes a datetime.timedelta: it raises TypeError",
                f"timeout=timedelta(seconds={text})",
            )


def _is_number(script: Script, call: Call, position: int | None, node: ast.AST) -> bool:
    value = call.arg(position, "timeout")
    if isinstance(node, ast.Attribute) and "timedelta(" in call.module.text:
        return False  # converted on its way, perhaps
    if value is not None and value.is_known:
        return isinstance(value.const, (int, float)) and not isinstance(value.const, bool)
    option = option_of(script, node)
    if option is None:
        return False
    given = {keyword.arg: keyword.value for keyword in option.node.keywords}
    return getattr(given.get("type"), "id", "") in {"int", "float"}


RULE: Rule[Script] = Rule(
    id="RW214",
    name="timeout-not-timedelta",
    severity="error",
    classes=("I19",),
    summary="a process group's timeout is a number",
    check=check,
)
