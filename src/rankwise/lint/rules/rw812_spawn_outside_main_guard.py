"""Processes are started outside ``if __name__ == "__main__":``.

**Why it breaks.** A spawned process imports the script again to find its function, reaches the same call, and fails:
``RuntimeError: An attempt has been made to start a new process before the current process has finished its
bootstrapping phase``.

Bad:

```python
import torch.multiprocessing as mp

def work(rank):
    print(rank)

mp.spawn(work, nprocs=2)
```

Good:

```python
import torch.multiprocessing as mp

def work(rank):
    print(rank)

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
```

**When it says nothing.** Calls in functions that nothing calls at module level, fragments, notebooks,
``start_method="fork"``. ``Process`` is an error if the script chooses spawn or forkserver, otherwise a warning (Linux
forks until Python 3.13, other systems do not).
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.scopes import Scopes, is_function
from rankwise.lint.topics.spawning import Spawn, is_under_main_guard, outermost_function, spawns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Calls that start processes whenever the script is imported."""
    if script.piece.is_fragment or script.piece.cells:
        return
    for scopes, spawn in spawns(script):
        if _never_fails(scopes, spawn):
            continue
        line = _line_outside_guard(scopes, spawn.call)
        if line:
            through = f" (through line {line})" if line != spawn.call.lineno else ""
            yield script.finding(
                RULE,
                spawn.call,
                f"`{spawn.word}` runs whenever this file is imported{through}, and each child imports it: RuntimeError",
                'put it under `if __name__ == "__main__":`',
                severity="error" if spawn.is_fresh else "warning",
            )


def _never_fails(scopes: Scopes, spawn: Spawn) -> bool:
    # Plain multiprocessing forks by default on Linux; with torch that is a bad choice anyway.
    return spawn.target is None or (
        not spawn.passes_rank and not spawn.is_fresh and not _is_torch(scopes, spawn)
    )


def _is_torch(scopes: Scopes, spawn: Spawn) -> bool:
    return scopes.dotted(spawn.call.func).startswith("torch.")


def _line_outside_guard(scopes: Scopes, node: ast.AST, depth: int = 0) -> int:
    """The module's line that runs a node on import; 0 where none does."""
    if is_under_main_guard(scopes, node) or depth > 4:
        return 0
    function = outermost_function(scopes, node)
    if function is None:
        return getattr(node, "lineno", 0)
    if not is_function(function) or function.decorator_list:
        return 0
    for call in scopes.all(ast.Call):
        if scopes.called_function(call.func) is function and outermost_function(scopes, call) is not function:
            line = _line_outside_guard(scopes, call, depth + 1)
            if line:
                return line
    return 0


RULE: Rule[Script] = Rule(
    id="RW812",
    name="spawn-outside-main-guard",
    severity="error",
    classes=("L13",),
    summary='processes are started outside `if __name__ == "__main__":`',
    check=check,
    needs_ranks=False,
)
