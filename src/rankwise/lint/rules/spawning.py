"""Functions that are called, or started as ranks, with arguments that they do not take."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.lint.analyses.job_view import above, starts_group
from rankwise.lint.analyses.turns import is_caught
from rankwise.lint.finding import Found, span_of
from rankwise.lint.interpreter.notes import Misfit, misfit
from rankwise.lint.interpreter.values import Function, Items, Value, is_number
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rankwise.lint.interpreter.calls import Call
    from rankwise.lint.script import Script

_SPAWNS = frozenset({"torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"})
_SINGLE = (".parse_args", ".Namespace", "cuda.device_count", "os.cpu_count")
_PROCESSES = frozenset({"torch.multiprocessing.Process", "multiprocessing.Process", "multiprocess.Process"})
_CONTEXTS = frozenset({"torch.multiprocessing.get_context", "multiprocessing.get_context"})
_METHODS = _CONTEXTS | {"torch.multiprocessing.set_start_method", "multiprocessing.set_start_method"}
#: Start methods whose children import the script anew.
_FRESH = ("spawn", "forkserver")


@dataclass(frozen=True, slots=True)
class Start:
    """A call that starts processes with a function.

    Attributes:
        call: The call.
        word: What it is called in the text, ``mp.spawn``.
        fn: The function.
        node: Where the function is handed over.
        args: What is handed over with it.
        passes_rank: Whether the function gets the number of its process before ``args``.
        is_fresh: Whether the children certainly import the script anew.
    """

    call: Call
    word: str
    fn: Value
    node: ast.AST
    args: Value | None
    passes_rank: bool
    is_fresh: bool


def _starts(script: Script, calls: Iterable[Call]) -> Iterator[Start]:
    methods = [call.arg(0, "method") for call in script.calls_of(*_METHODS)]
    chooses_fresh = any(one is not None and one.const in _FRESH for one in methods)
    for call in calls:
        is_spawn, maker = call.name in _SPAWNS, call.receiver.made
        is_of_context = call.name == "?.Process" and maker is not None and maker.name in _CONTEXTS
        if not (is_spawn or is_of_context or call.name in _PROCESSES) or call.module is not script.module:
            continue
        where = (0, "fn") if is_spawn else (1, "target")
        fn, node, method = call.arg(*where), call.arg_node(*where), call.arg(5, "start_method")
        if fn is None or node is None or (is_spawn and method is not None and method.const not in _FRESH):
            continue
        args = call.arg(1 if is_spawn else 3, "args")
        word = ast.unparse(call.node.func)  # type: ignore[attr-defined]
        yield Start(call, word, fn, node, args, is_spawn, is_spawn or chooses_fresh)


@rule("RW812", "error", "L13", 'processes are started outside `if __name__ == "__main__":`', needs_ranks=False)
def spawn_outside_main_guard(script: Script) -> Iterator[Found]:
    if script.piece.is_fragment or script.piece.cells:
        return
    for entry in script.entries:
        for start in _starts(script, entry.histories[0].calls if entry.is_program else ()):
            call = start.call
            way = [*(site.node for site in call.stack if site.module is script.module), call.node]
            # Plain multiprocessing forks by default on Linux; with torch that is a bad choice anyway.
            is_legal = call.name == "multiprocessing.Process" and not start.is_fresh
            if is_legal or any(_main_guard(script, one) for one in way):
                continue
            through = f" (through line {way[0].lineno})" if call.stack else ""  # type: ignore[attr-defined]
            yield Found(
                call.node,
                f"`{start.word}` runs whenever this file is imported{through}, and each child imports it: RuntimeError",
                'put it under `if __name__ == "__main__":`',
                severity="error" if start.is_fresh else "warning",
            )


def _main_guard(script: Script, node: ast.AST) -> ast.If | None:
    """The test of ``__name__`` that a node stands under, whichever way it is written."""
    tests = [one for one in above(script.tree, node) if isinstance(one, ast.If)]
    return next((one for one in tests if "__name__" in ast.unparse(one.test)), None)


@rule("RW813", "error", "L13", "the function passed to mp.spawn is a lambda, local, or called", needs_ranks=False)
def spawn_target_not_importable(script: Script) -> Iterator[Found]:
    for start in _starts(script, script.calls):
        why = _why_called(start) or _why_not_importable(script, start)
        if why is not None:
            yield Found(start.node, *why)


def _why_called(start: Start) -> tuple[str, str] | None:
    node = start.node
    if not isinstance(node, ast.Call) or start.fn.const is not None or start.fn.made is not None:
        return None
    name = ast.unparse(node.func)
    return (
        f"`{name}(...)` is called here, in the parent; `{start.word}` gets its return value, None",
        f"pass `{name}` without parentheses, and its arguments as `args=(...)`",
    )


def _why_not_importable(script: Script, start: Start) -> tuple[str, str] | None:
    function, text = start.fn.thing, ast.unparse(start.node)
    if not start.is_fresh or not isinstance(function, Function) or function.module is not script.module:
        return None
    if isinstance(function.node, ast.Lambda):
        return f"`{text}` is a lambda: PicklingError in the parent", "define a function at module level"
    # What `functools.wraps` decorates goes by the name of the function in it.
    is_renamed = bool(getattr(function.node, "decorator_list", ()))
    if function.scope.parent is not None and function.owner is None and not is_renamed:
        return (
            f"`{text}` is local to a function: a spawned process cannot import it (Can't pickle local object)",
            f"move `{text}` to module level",
        )
    guard = _main_guard(script, function.node)
    if guard is not None and isinstance(guard.test, ast.Compare) and isinstance(guard.test.ops[0], ast.Eq):
        return (
            f"`{text}` is defined under the test for `__main__`, which children do not run: AttributeError in each",
            f"move `{text}` above the test",
        )
    if script.piece.cells:
        return (
            f"children cannot import `{text}` from a notebook: AttributeError in each",
            "move it to a .py file and import it, or use rankwise.launch",
        )
    return None


@rule("RW220", "error", "I24", "a script of which a launcher starts each rank starts ranks itself")
def ranks_start_ranks(script: Script) -> Iterator[Found]:
    for entry in filter(lambda one: one.is_program, script.entries):
        calls = [call for call in entry.histories[0].calls if "spawned" not in call.contexts]
        # Without a process group of their own they may be workers of any kind.
        is_group = any(starts_group(call) and "spawned" in call.contexts for call in entry.histories[0].calls)
        for start in _starts(script, calls if is_group else ()):
            call, number = start.call, start.call.arg(2, "nprocs")
            is_sure = start.passes_rank and not (call.tests or call.guards)
            if not is_sure or (number is not None and number.const == 1):
                continue
            if script.piece.num_ranks > 1:
                how = f"the command starts {script.piece.num_ranks} processes of it"
            elif any(_needs_launcher(script, one) for one in calls[: call.index]) and not any(map(_may_set, calls)):
                how = "only a launcher sets the LOCAL_RANK that it reads"
            else:
                continue
            yield Found(
                call.node,
                f"each rank starts ranks of its own here, although {how}: they take each other's ports and GPUs",
                "call the function itself, with int(os.environ['LOCAL_RANK']), or start the script with plain python",
                severity="error" if number is not None and type(number.const) is int else "warning",
            )


def _needs_launcher(script: Script, call: Call) -> bool:
    """Whether a read of LOCAL_RANK ends the program where no launcher has set it."""
    is_read = call.name == "os.environ.__getitem__" and call.args[0].const == "LOCAL_RANK"
    tests = [one for one in above(call.module.tree, call.node) if isinstance(one, (ast.If, ast.Try))]
    return is_read and bool(call.result.spread) and set(tests) <= {_main_guard(script, call.node)}


def _may_set(call: Call) -> bool:
    return call.name in {"os.environ.setdefault", "os.environ.update", "os.putenv"}


@rule(
    "RW814",
    "error",
    "L13",
    "the function passed to mp.spawn takes a different number of arguments than it gets",
    needs_ranks=False,
)
def spawn_argument_count(script: Script) -> Iterator[Found]:
    for start in _starts(script, script.calls):
        args, made = start.args, start.args.made if start.args is not None else None
        is_one = made is not None and made.name.endswith(_SINGLE)
        if args is not None and (is_number(args) or args.const is None or is_one):
            node = start.call.arg_node(1 if start.passes_rank else 3, "args")
            text = ast.unparse(node) if node is not None else "..."
            yield Found(
                node or start.call.node,
                f"`args=({text})` is not a tuple: TypeError, `{start.word}` takes its elements one by one",
                f"write `args=({text},)`, with a comma",
            )
        elif (
            isinstance(start.fn.thing, Function) and start.call.arg(None if start.passes_rank else 4, "kwargs") is None
        ):
            yield from _misfit(start, start.fn.thing)


def _misfit(start: Start, function: Function) -> Iterator[Found]:
    items, takes = start.args.thing if start.args is not None else Items([]), function.node.args
    if not isinstance(items, Items) or not items.is_whole or getattr(function.node, "decorator_list", None):
        return
    given = len(items.values) + start.passes_rank
    why = misfit(takes, given, set())
    if not why:
        return
    gets = f"{given} from args"
    fix = "make args=(...) match the function's parameters"
    if start.passes_rank:
        gets = f"{given}: the process index and {len(items.values)} from args"
        fix += f": the process index comes first, `def {function.name}(rank, ...)`, and is not part of args"
    where = span_of(takes.args[0], function.module.lines) if takes.args else None
    yield Found(
        start.call.node,
        f"`{function.name}` {why}: `{start.word}` passes {gets}",
        fix,
        also=[("the function", function.module.shown, where)] if where is not None else (),
    )


@rule(
    "RW819",
    "error",
    "",
    "a function of the text is called with arguments that it does not take",
    needs_ranks=False,
)
def call_does_not_fit(script: Script) -> Iterator[Found]:
    for note in script.notes:
        if isinstance(note, Misfit) and note.module is script.module and not is_caught(script.tree, note.node):
            name, where = note.function.name, note.function
            yield Found(
                note.node,
                f"`{ast.unparse(note.node.func)}(...)` {note.why}: TypeError",
                f"pass what `{name}` takes, or change its parameters",
                also=[(f"`{name}`", where.module.shown, span_of(where.node, where.module.lines))],
            )
