"""Spawned processes cannot import the function passed to ``mp.spawn``.

**Why it breaks.** A spawned process imports its function by name: a lambda or a function inside another one has none
that can be imported (``PicklingError: Can't pickle <function <lambda>>``, ``Can't pickle local object``). A function
that is called instead of passed runs in the parent, and the children get its result.

Bad:

```python
import torch.multiprocessing as mp

if __name__ == "__main__":
    mp.spawn(lambda rank: print(rank), nprocs=2)
```

Bad:

```python
import torch.multiprocessing as mp

def work(rank):
    print(rank)

if __name__ == "__main__":
    mp.spawn(work(0), nprocs=2)
```

Good:

```python
import torch.multiprocessing as mp

def work(rank):
    print(rank)

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
```

**When it says nothing.** ``start_method="fork"``, ``Process`` where the script does not choose spawn, functions
returned by other calls (``functools.partial``).
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.scopes import Scopes, is_function
from rankwise.lint.topics.spawning import Spawn, is_in_body_of_guard, spawns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script


def check(script: Script) -> Iterator[Finding]:
    """Targets that no child can import, or that were called."""
    for scopes, spawn in spawns(script):
        target = spawn.target
        if target is None:
            continue
        what, fix = _what(scopes, target) if spawn.is_fresh else ("", "")
        if not what:
            what, fix = _called(scopes, spawn, target)
        if not what and script.piece.cells and spawn.is_fresh and scopes.called_function(target) is not None:
            what = f"children cannot import `{ast.unparse(target)}` from a notebook: AttributeError in each"
            fix = "move it to a .py file and import it, or use rankwise.launch"
        if what:
            yield script.finding(RULE, target, what, fix)


def _what(scopes: Scopes, target: ast.expr) -> tuple[str, str]:
    if isinstance(target, ast.Lambda):
        return (
            "a lambda cannot be sent to a spawned process: PicklingError",
            "define a function at module level",
        )
    if not isinstance(target, ast.Name):
        return "", ""
    made = scopes.only(target.id, scopes.scope(target))
    if isinstance(scopes.value(target.id, scopes.scope(target)), ast.Lambda):
        return f"`{target.id}` is a lambda: PicklingError", "define a function at module level"
    around = next((a for a in scopes.above(made) if is_function(a)), None) if is_function(made) else None
    if around is not None:
        return (
            f"`{target.id}` is local to {around.name}: a spawned process cannot import it (Can't pickle local object)",
            f"move `{target.id}` to module level",
        )
    if is_function(made) and is_in_body_of_guard(scopes, made):
        return (
            f"`{target.id}` is defined under the test for `__main__`, which children do not run: AttributeError in each",
            f"move `{target.id}` above the test",
        )
    return "", ""


def _called(scopes: Scopes, spawn: Spawn, target: ast.expr) -> tuple[str, str]:
    """A function of the file that returns nothing, called where it should be passed."""
    function = scopes.called_function(target.func) if isinstance(target, ast.Call) else None
    if function is None or function.decorator_list:
        return "", ""
    inside = scopes.opened[function]
    yields = any(scopes.scope(y) is inside for y in (*scopes.all(ast.Yield), *scopes.all(ast.YieldFrom)))
    if yields or any(r.value is not None and scopes.scope(r) is inside for r in scopes.all(ast.Return)):
        return "", ""
    return (
        f"`{function.name}(...)` is called here, in the parent; `{spawn.word}` gets its return value, None",
        f"pass `{function.name}` without parentheses, and its arguments as `args=(...)`",
    )


RULE: Rule[Script] = Rule(
    id="RW813",
    name="spawn-target-not-importable",
    severity="error",
    classes=("L13",),
    summary="the function passed to mp.spawn is a lambda, local, or called",
    check=check,
    needs_ranks=False,
)
