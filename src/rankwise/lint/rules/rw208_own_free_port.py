"""Each process chooses its own port, so no two agree on one.

**Why it breaks.** Each process draws another free or random port: rank 0 listens on its own, and each other rank
connects to a different one. All block in ``init_process_group`` until the timeout.

Bad:

```python
import random

import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, world_size):
    port = random.randint(20000, 60000)
    dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)
```

Good:

```python
import random

import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, world_size, port):
    dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(2, random.randint(20000, 60000)), nprocs=2)
```

**When it says nothing.** The parent chooses the port and passes it on, it is computed from a job's id, or the process
is alone (``RANK`` is not in the environment).
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.model.values import Spread
from rankwise.lint.rule import Rule
from rankwise.lint.topics.job_view import (
    INIT,
    is_spawned,
    once,
    places,
    settings,
    spawns,
    starts_group,
    statement_of,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script
    from rankwise.lint.topics.job_view import Place

_STORE = "torch.distributed.TCPStore"
#: What each process draws for itself.
_DRAWN = frozenset({"own", "random"})


def check(script: Script) -> Iterator[Finding]:
    """Rendezvous ports that are drawn in the process that uses them."""
    for place, value, node in _ports(script):
        if value.spread is not Spread.LOCAL or not value.origin & _DRAWN or _is_alone(place):
            continue
        if not is_spawned(place.last) and (
            spawns(script) or not place.is_made_by_all or not _starts_here(place)
        ):
            continue
        drawn = [call for call in place.entry.histories[-1].calls if call.result.origin & _DRAWN]
        yield script.finding(
            RULE,
            node,
            f"each process draws its own port with {drawn[0].name.rpartition('.')[2] if drawn else ''}(): rank 0 listens where no other rank connects",
            "draw the port once in the parent and pass it on, or leave it to the launcher",
        )


def _ports(script: Script) -> Iterator[tuple[Place, Value, ast.AST]]:
    for setting in settings(script):
        if setting.key == "MASTER_PORT":
            statement = statement_of(script.tree, setting.node)
            yield (
                setting.place,
                setting.value,
                statement.value if isinstance(statement, ast.Assign) else setting.node,
            )
    for place in once(places(script, INIT, _STORE)):
        serves = place.last.arg(3, "is_master") if place.last.name == _STORE else None
        if serves is not None and serves.const is True:
            continue  # the rank that serves the store draws the port and passes it to the others
        name = "init_method" if place.last.name == INIT else "port"
        value, node = place.last.arg(1, name), place.last.arg_node(1, name)
        if value is not None and node is not None:
            yield place, value, node


def _starts_here(place: Place) -> bool:
    """Whether the same process creates a group: a test's set-up may do so for processes that it starts."""
    return any(starts_group(call) for call in place.entry.histories[-1].calls[place.last.index :])


def _is_alone(place: Place) -> bool:
    call = place.last
    tests = " ".join(text_of(node) for node, _, _ in call.tests)
    if "environ" in tests or "getenv" in tests:
        return True
    return any(
        other.name in {"os.environ.__setitem__", "os.environ.update"}
        and "WORLD_SIZE" in ast.unparse(other.node)
        and ("1" in _consts(other.node) or (len(other.args) > 1 and other.args[1].const == "1"))
        for other in place.entry.histories[-1].calls
    )


def _consts(node: ast.AST) -> set[str]:
    return {str(one.value) for one in ast.walk(node) if isinstance(one, ast.Constant)}


RULE: Rule[Script] = Rule(
    id="RW208",
    name="own-free-port",
    severity="error",
    classes=("I27",),
    summary="each process chooses its own rendezvous port",
    check=check,
)
