"""The world size, the rank and the number of started processes contradict each other.

**Why it breaks.** A rank whose world size is too small continues alone or blocks forever: two worlds that never
connect. A rank without a world size, or without a rank, fails with a ValueError.

Bad:

```python
import os

import torch.distributed as dist

dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=1)
dist.destroy_process_group()
```

Good:

```python
import os

import torch.distributed as dist

dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
dist.destroy_process_group()
```

**When it says nothing.** Both come from the same place, or neither is given under a launcher.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import (
    INIT,
    SPAWN,
    is_hidden,
    is_spawned,
    node_in,
    once,
    places,
    reads_launcher,
    settings,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script
    from rankwise.lint.topics.job_view import Place


def check(script: Script) -> Iterator[Finding]:
    """Contradictions at calls of init_process_group."""
    for place in once(places(script, INIT, anywhere=True)):
        if place.last.has_star:
            continue
        yield from _no_address(script, place)
        if place.last.module is script.module:
            yield from _fixed(script, place)
            yield from _lacking(script, place)
            yield from _same_rank(script, place)
            yield from _local_rank(script, place)


def _fixed(script: Script, place: Place) -> Iterator[Finding]:
    call = place.last
    size, rank = call.arg(3, "world_size"), call.arg(4, "rank")
    node = call.arg_node(3, "world_size")
    if (
        size is None
        or node is None
        or not isinstance(size.const, int)
        or isinstance(size.const, bool)
        or size.origin
        or size.const < 0
    ):
        return
    told = {
        setting.key: setting.value.const for setting in settings(script) if setting.place.entry is place.entry
    }
    in_environment = told.get("WORLD_SIZE")
    started = _num_started(place)
    if isinstance(in_environment, str) and in_environment.isdigit() and int(in_environment) != size.const:
        other = f"WORLD_SIZE is set to {in_environment}"
    elif (
        started is not None
        and is_spawned(call)
        and not call.guards  # of four processes, two may form a group of their own
        and started != size.const
        and rank is not None
        and "node_rank" not in rank.origin
        and rank.const == call.rank
    ):
        other = f"mp.spawn starts {started} processes"
    elif rank is not None and "rank" in rank.origin and not is_spawned(call) and size.const == 1:
        other = f"rank is `{text_of(call.arg_node(4, 'rank'))}`, different in each process"
    else:
        return
    yield script.finding(
        RULE,
        node,
        f"world_size is {size.const} here, but {other}: the ranks wait for each other, or never connect",
        "take both from the same place",
    )


def _same_rank(script: Script, place: Place) -> Iterator[Finding]:
    """A constant rank in a script whose processes get their rank."""
    call = place.last
    rank, size, node = call.arg(4, "rank"), call.arg(3, "world_size"), call.arg_node(4, "rank")
    if (
        rank is None
        or size is None
        or type(rank.const) is not int
        or rank.spread
        or rank.const < 0
        or not isinstance(node, ast.Constant)
    ):
        return
    if call.tests or call.guards:
        return
    if is_spawned(call) and type(size.const) is int and size.const > 1 and (_num_started(place) or 0) > 1:
        message = f"each process that mp.spawn starts says that it is rank {rank.const}: they never form a world of {size.const}"
        yield script.finding(
            RULE, node, message, "pass the first argument that mp.spawn gives", failure_class="I10"
        )
        return
    if (size.const != 1 and "world_size" not in size.origin) or size.const == 1:
        return
    if reads_launcher(script) is not None:
        message = f"each process says that it is rank {rank.const}: they never form a world of that size"
        yield script.finding(RULE, node, message, 'pass int(os.environ["RANK"])', failure_class="I10")


def _local_rank(script: Script, place: Place) -> Iterator[Finding]:
    """The number on the node in the place of the number in the job."""
    call = place.last
    rank, size, node = call.arg(4, "rank"), call.arg(3, "world_size"), call.arg_node(4, "rank")
    if (
        node is not None
        and rank is not None
        and rank.origin == {"local_rank"}
        and (size is None or "world_size" in size.origin)
    ):
        message = f"`{text_of(node)}` is the local rank: with two nodes, two processes say that they are rank 0, and the job never starts"
        yield script.finding(
            RULE, node, message, 'pass int(os.environ["RANK"])', severity="warning", failure_class="I10"
        )


def _num_started(place: Place) -> int | None:
    for call in place.entry.histories[-1].calls:
        if call.name == SPAWN:
            number = call.arg(2, "nprocs")
            if number is not None and type(number.const) is int and not number.origin - {"agreed"}:
                return int(number.const)
    return None


def _lacking(script: Script, place: Place) -> Iterator[Finding]:
    """A rank without a world size at an address that lacks it, or no rank in a process without a number."""
    call = place.last
    method, rank, size = call.arg(1, "init_method"), call.arg(4, "rank"), call.arg(3, "world_size")
    if call.arg(None, "store") is not None:
        return
    shown = method.const if method is not None else None
    if (
        isinstance(shown, str)
        and shown.startswith(("tcp:", "file:"))
        and "?" not in shown
        and (rank is None or size is None)
    ):
        lack = " and ".join(name for name, value in (("rank", rank), ("world_size", size)) if value is None)
        yield script.finding(
            RULE,
            call.node,
            f"{shown!r} does not give {lack}, and neither does the call: it raises ValueError",
            f"pass {lack} to init_process_group",
        )
    elif (
        is_spawned(call)
        and rank is None
        and shown in {None, "env://"}
        and (method is None or method.is_known)
        and not _sets_rank(script)
    ):
        yield script.finding(
            RULE,
            call.node,
            "mp.spawn sets no RANK for its processes, and the call gives none: it raises ValueError",
            "pass rank=... and world_size=... to init_process_group",
            failure_class="I14",
        )


def _no_address(script: Script, place: Place) -> Iterator[Finding]:
    """Processes that the script starts itself, and tells of no store."""
    call, node = place.last, node_in(script, place.last)
    method = call.arg(1, "init_method")
    if (
        node is not None
        and is_spawned(call)
        and call.arg(4, "rank") is not None
        and call.arg(None, "store") is None
        and (method is None or method.const in {None, "env://"})
        and not any(_may_set(one) for one in place.entry.histories[-1].calls)
    ):
        yield script.finding(
            RULE,
            node,
            "mp.spawn sets no MASTER_ADDR and MASTER_PORT, and nothing here does: it raises ValueError unless the shell has set them",
            'set os.environ["MASTER_ADDR"] = "localhost" and a free MASTER_PORT before it',
            severity="warning",
            failure_class="I14",
        )


def _may_set(call: Call) -> bool:
    """Whether a call may set a variable of the environment."""
    return is_hidden(call) or call.name.startswith(("os.environ.", "os.putenv", "os.getenv", "dotenv."))


def _sets_rank(script: Script) -> bool:
    return any(setting.key == "RANK" for setting in settings(script)) or any(
        call.name in {"os.environ.setdefault", "os.environ.update"} for call in script.all_calls
    )


RULE: Rule[Script] = Rule(
    id="RW210",
    name="world-size-contradiction",
    severity="error",
    classes=("I12", "I14", "I10"),
    summary="world size, rank and number of processes contradict each other",
    check=check,
)
