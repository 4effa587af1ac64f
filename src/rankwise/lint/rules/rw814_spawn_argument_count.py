"""The function passed to ``mp.spawn`` takes a different number of arguments than it gets.

**Why it breaks.** ``mp.spawn`` calls ``fn(i, *args)``: the process index comes first and is not part of ``args``.
Otherwise each child fails with ``TypeError: work() takes 1 positional argument but 2 were given``.

Bad:

```python
import torch.multiprocessing as mp

def work(world_size):
    print(world_size)

if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)
```

Good:

```python
import torch.multiprocessing as mp

def work(rank, world_size):
    print(rank, world_size)

if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)
```

**When it says nothing.** Functions with ``*args``, ``args`` that are not a literal tuple, decorated functions.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import span_of
from rankwise.lint.rule import Rule
from rankwise.lint.topics.spawning import Spawn, spawns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script
    from rankwise.lint.topics.scopes import FunctionNode, Scopes

# Calls whose result is surely no tuple.
_ONE_THING = (
    "device_count",
    "int",
    "parse_args",
    "cpu_count",
    "get_world_size",
    "ArgumentParser",
    "Namespace",
    "float",
    "bool",
)


def check(script: Script) -> Iterator[Finding]:
    """Compares what a function takes with what its process passes."""
    for scopes, spawn in spawns(script):
        if spawn.args is not None and _is_one_thing(scopes, spawn.args):
            text = ast.unparse(spawn.args)
            yield script.finding(
                RULE,
                spawn.args,
                f"`args=({text})` is not a tuple: TypeError, `{spawn.word}` takes its elements one by one",
                f"write `args=({text},)`, with a comma",
            )
            continue
        function = scopes.called_function(spawn.target) if spawn.target is not None else None
        if function is not None and not function.decorator_list and not spawn.kwargs:
            yield from _count(script, spawn, function)


def _count(script: Script, spawn: Spawn, function: FunctionNode) -> Iterator[Finding]:
    num_args = _num_args(spawn.args)
    if num_args is None:
        return
    given = num_args + spawn.passes_rank
    takes = function.args
    most = len(takes.posonlyargs) + len(takes.args)
    least = most - len(takes.defaults)
    required = [a.arg for a, d in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if d is None]
    if least <= given and (given <= most or takes.vararg is not None) and not required:
        return
    wants = str(most) if least == most else f"{least} to {most}"
    gets = (
        f"{given}: the process index and {num_args} from args" if spawn.passes_rank else f"{given} from args"
    )
    names = ", ".join(a.arg for a in (*takes.posonlyargs, *takes.args)) or "nothing"
    yield script.finding(
        RULE,
        spawn.call,
        f"`{function.name}` takes {wants} argument{'s' * (wants != '1')} ({names}), but `{spawn.word}` passes {gets}",
        _fix(spawn, function, given, most),
        also=[("the function", script.piece.path, span_of(function.args.args[0], script.lines))]
        if takes.args
        else (),
    )


def _fix(spawn: Spawn, function: FunctionNode, given: int, most: int) -> str:
    if spawn.passes_rank and given == most + 1:
        first = function.args.args[0].arg if function.args.args else ""
        if "rank" not in first and first not in ("gpu", "local_rank", "i", "index", "device"):
            return f"make the rank its first parameter: `def {function.name}(rank, ...)`"
        return "remove the rank from args: it is passed first anyway"
    return "make args=(...) match the function's parameters" + (
        ", the rank comes first" if spawn.passes_rank else ""
    )


def _num_args(args: ast.expr | None) -> int | None:
    if args is None:
        return 0
    if isinstance(args, (ast.Tuple, ast.List)) and not any(isinstance(e, ast.Starred) for e in args.elts):
        return len(args.elts)
    return None


def _is_one_thing(scopes: Scopes, args: ast.expr) -> bool:
    """Whether something is surely no sequence: a number, or the result of a call that gives one."""
    if isinstance(args, ast.Name):
        value = scopes.value(args.id, scopes.scope(args))
        return value is not None and not isinstance(value, ast.Name) and _is_one_thing(scopes, value)
    if isinstance(args, ast.Constant):
        return isinstance(args.value, (int, float)) or args.value is None
    if isinstance(args, ast.Call):
        name = args.func.attr if isinstance(args.func, ast.Attribute) else getattr(args.func, "id", "")
        return name in _ONE_THING
    return False


RULE: Rule[Script] = Rule(
    id="RW814",
    name="spawn-argument-count",
    severity="error",
    classes=("L13",),
    summary="the function passed to mp.spawn takes a different number of arguments than it gets",
    check=check,
    needs_ranks=False,
)
