"""A spawned function reads a name that only ``if __name__ == "__main__":`` sets.

**Why it breaks.** A spawned process imports the script under another name, so the code under the test does not run
there: ``NameError: name 'args' is not defined`` in every child, though the name is clearly set.

Bad:

```python
import torch.multiprocessing as mp

def work(rank):
    print(rank, num_epochs)

if __name__ == "__main__":
    num_epochs = 3
    mp.spawn(work, nprocs=2)
```

Good:

```python
import torch.multiprocessing as mp

def work(rank, num_epochs):
    print(rank, num_epochs)

if __name__ == "__main__":
    mp.spawn(work, args=(3,), nprocs=2)
```

**When it says nothing.** Names that are also set at module level, ``Process`` where the script does not choose spawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.spawning import functions_reached, is_in_body_of_guard, spawns
from rankwise.lint.topics.undefined import is_certain, may_make_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script
    from rankwise.lint.topics.scopes import Scopes


def check(script: Script) -> Iterator[Finding]:
    """Names of the main guard in functions that run in spawned processes."""
    if "__main__" not in script.piece.code or script.piece.cells:
        return
    told: set[str] = set()
    for scopes, spawn in spawns(script):
        function = (
            scopes.called_function(spawn.target) if spawn.target is not None and spawn.is_fresh else None
        )
        if function is None or may_make_names(script, scopes):
            continue
        reached = set(functions_reached(scopes, function))
        for name, scope in scopes.loads:
            if name.id in told or scopes.owner(name.id, scope) is not scopes.module:
                continue
            if not reached.intersection(scopes.above(name)) or not is_certain(script, scopes, name):
                continue
            line = _line_in_guard(scopes, name.id)
            if line:
                told.add(name.id)
                yield script.finding(
                    RULE,
                    name,
                    f"`{name.id}` is set only under the test for `__main__`, line {line}, which children do not run: "
                    f"NameError in each process of `{spawn.word}`",
                    f"pass `{name.id}` to `{function.name}` in args=(...), or set it at module level",
                )


def _line_in_guard(scopes: Scopes, name: str) -> int:
    """The line under the main guard that binds a name, where none elsewhere does; else 0."""
    bound = scopes.module.bound[name]
    if any(scopes.scope(b) is not scopes.module or not is_in_body_of_guard(scopes, b) for b in bound):
        return 0
    return getattr(bound[0], "lineno", 0)


RULE: Rule[Script] = Rule(
    id="RW815",
    name="main-guard-name-in-child",
    severity="error",
    classes=("L13",),
    summary='a spawned function reads a name that only `if __name__ == "__main__":` sets',
    check=check,
    needs_ranks=False,
)
