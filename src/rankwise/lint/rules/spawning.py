"""Functions that are called, or started as ranks, with arguments that they do not take."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import Found, span_of
from rankwise.lint.model.notes import Misfit
from rankwise.lint.rule import rule
from rankwise.lint.topics.scopes import Scopes, is_function
from rankwise.lint.topics.spawning import (
    Spawn,
    is_in_body_of_guard,
    is_under_main_guard,
    outermost_function,
    spawns,
)
from rankwise.lint.topics.turns import is_caught

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script
    from rankwise.lint.topics.scopes import FunctionNode


@rule("RW812", "error", "L13", 'processes are started outside `if __name__ == "__main__":`', needs_ranks=False)  # fmt: skip
def spawn_outside_main_guard(script: Script) -> Iterator[Found]:
    if script.piece.is_fragment or script.piece.cells:
        return
    for scopes, spawn in spawns(script):
        if _never_fails(scopes, spawn):
            continue
        line = _line_outside_guard(scopes, spawn.call)
        if line:
            through = f" (through line {line})" if line != spawn.call.lineno else ""
            yield Found(
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


@rule("RW813", "error", "L13", "the function passed to mp.spawn is a lambda, local, or called", needs_ranks=False)  # fmt: skip
def spawn_target_not_importable(script: Script) -> Iterator[Found]:
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
            yield Found(target, what, fix)


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


@rule("RW220", "error", "I24", "a script of which a launcher starts each rank starts ranks itself")
def ranks_start_ranks(script: Script) -> Iterator[Found]:
    for entry in script.entries[:1]:
        calls = [call for call in entry.histories[0].calls if "spawned" not in call.contexts]
        for call in calls:
            number, read = (
                call.arg(2, "nprocs"),
                [one for one in calls[: call.index] if _reads_local_rank(one)],
            )
            is_sure = (
                call.name in _SPAWNS and not (call.tests or call.guards) and call.module is script.module
            )
            if (
                not is_sure
                or (number is not None and number.const == 1)
                or not (read or script.piece.num_ranks > 1)
            ):
                continue
            how = (
                f"the command starts {script.piece.num_ranks} processes of it"
                if script.piece.num_ranks > 1
                else "only a launcher sets the LOCAL_RANK that it reads"
            )
            yield Found(
                call.node,
                f"each rank starts ranks of its own here, although {how}: they take each other's ports and GPUs",
                "call the function itself, with int(os.environ['LOCAL_RANK']), or start the script with plain python",
            )


_SPAWNS = frozenset({"torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"})


def _reads_local_rank(call: Call) -> bool:
    return call.name == "os.environ.__getitem__" and call.args[0].const == "LOCAL_RANK"


# Calls whose result is surely no tuple.
_ONE_THING = ("device_count", "int", "parse_args", "cpu_count", "get_world_size", "ArgumentParser", "Namespace", "float", "bool")  # fmt: skip


@rule("RW814", "error", "L13", "the function passed to mp.spawn takes a different number of arguments than it gets", needs_ranks=False)  # fmt: skip
def spawn_argument_count(script: Script) -> Iterator[Found]:
    for scopes, spawn in spawns(script):
        if spawn.args is not None and _is_one_thing(scopes, spawn.args):
            text = ast.unparse(spawn.args)
            yield Found(
                spawn.args,
                f"`args=({text})` is not a tuple: TypeError, `{spawn.word}` takes its elements one by one",
                f"write `args=({text},)`, with a comma",
            )
            continue
        function = scopes.called_function(spawn.target) if spawn.target is not None else None
        if function is not None and not function.decorator_list and not spawn.kwargs:
            yield from _count(script, spawn, function)


def _count(script: Script, spawn: Spawn, function: FunctionNode) -> Iterator[Found]:
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
    yield Found(
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


@rule(
    "RW819",
    "error",
    "",
    "a function of the text is called with arguments that it does not take",
    needs_ranks=False,
)
def call_does_not_fit(script: Script) -> Iterator[Found]:
    reported: set[ast.AST] = set()
    for note in script.notes:
        if (
            isinstance(note, Misfit)
            and note.module is script.module
            and note.node not in reported
            and not is_caught(script.tree, note.node)
        ):
            reported.add(note.node)
            name, where = note.function.name, note.function
            yield Found(
                note.node,
                f"`{ast.unparse(note.node.func)}(...)` {note.why}: TypeError",
                f"pass what `{name}` takes, or change its parameters",
                also=[(f"`{name}`", where.module.shown, span_of(where.node, where.module.lines))],
            )
