"""The group's timeout is so short that a slow step counts as a hang, or so long that a hang is never reported.

**Why it breaks.** A rank that reads data, saves or compiles for longer than the timeout ends the job, though nothing is
wrong. With a timeout of days, a hung job holds its GPUs until somebody notices.

Bad:

```python
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(milliseconds=1800))
dist.destroy_process_group()
```

Good:

```python
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=1800))
dist.destroy_process_group()
```

**When it says nothing.** Between 30 seconds and a day, and for groups created by ``new_group``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import INIT, once, places, text_of
from rankwise.lint.topics.option_text import sources

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script
    from rankwise.lint.topics.job_view import Place

_UNITS = {
    "days": 86400.0,
    "seconds": 1.0,
    "microseconds": 1e-6,
    "milliseconds": 1e-3,
    "minutes": 60.0,
    "hours": 3600.0,
    "weeks": 604800.0,
}
_SHORT_S, _LONG_S = 30.0, 86400.0


def check(script: Script) -> Iterator[Finding]:
    """Timeouts of whole jobs of less than half a minute, or more than a day."""
    names = (INIT, "accelerate.InitProcessGroupKwargs", "accelerate.utils.InitProcessGroupKwargs")
    for place in once(places(script, *names)):
        call = place.last
        position = 2 if call.name == INIT else None
        value, node = call.arg(position, "timeout"), call.arg_node(position, "timeout")
        seconds = _seconds(place, node) if value is not None else None
        if seconds is None or node is None:
            continue
        if 0 < seconds < _SHORT_S:
            message = f"`{text_of(node)}` is {seconds:g} s: a rank that loads, saves or compiles for longer ends the job"
            yield script.finding(RULE, node, message, "allow as many minutes as the slowest step may take")
        elif seconds > _LONG_S:
            message = f"`{text_of(node)}` is {seconds / 86400:g} days: a hang is not reported before that"
            yield script.finding(
                RULE, node, message, "allow as long as the slowest step may take", severity="hint"
            )


def _seconds(place: Place, node: ast.AST | None) -> float | None:
    """The length of a timedelta that the script creates for a timeout."""
    made = {call.node: call for call in place.entry.histories[-1].calls if call.name == "datetime.timedelta"}
    call = next((made[one] for one in sources(place.last.module.tree, node) if one in made), None)
    if call is None or call.has_star:
        return None
    given = dict(zip(_UNITS, call.args, strict=False)) | call.kwargs
    if not given or not all(
        name in _UNITS and isinstance(one.const, (int, float)) for name, one in given.items()
    ):
        return None
    return sum(_UNITS[name] * float(one.const) for name, one in given.items())


RULE: Rule[Script] = Rule(
    id="RW215",
    name="odd-timeout",
    severity="warning",
    classes=("I20",),
    summary="the process group's timeout is very short or very long",
    check=check,
)
