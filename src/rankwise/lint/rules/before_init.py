"""The process group is used before it exists."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import Found
from rankwise.lint.library.acts import ACTS
from rankwise.lint.library.names import DDP, FSDP, SAMPLER
from rankwise.lint.program import LIBRARIES
from rankwise.lint.rule import rule
from rankwise.lint.topics.job_view import (
    INIT,
    above,
    called_names,
    is_hidden,
    is_sequence,
    line_of,
    node_in,
    starts_group,
    statement_of,
    text_of,
)
from rankwise.lint.topics.turns import is_caught

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.model.calls import Call
    from rankwise.lint.program import Module
    from rankwise.lint.script import Entry, Script

_ASKS = "torch.distributed.is_initialized"
#: Functions that return the answer.
_DEEPEST = 3
_ONLY_TALK = frozenset(
    {"print", "info", "warning", "debug", "log", "write", "setLevel", "basicConfig", "join", "format"}
)


@rule("RW205", "error", "I25", "the rank is read before the process group exists")
def rank_asked_before_init(script: Script) -> Iterator[Found]:
    seen: set[ast.AST] = set()
    for entry in script.entries:
        calls = entry.histories[0].calls
        inits = [call for call in calls if starts_group(call)]
        for call in calls:
            if call.name != _ASKS or "before_init" not in call.result.origin:
                continue
            later = next(
                (
                    one
                    for one in inits
                    if one.index > call.index and _same_process(one, call) and is_sequence(entry, one, call)
                ),
                None,
            )
            if later is None or not _stands_for_rank(call, later):
                continue
            at = _use(script, call)
            if at is not None and at not in seen:
                seen.add(at)
                yield _tell(script, at, later)


def _same_process(init: Call, call: Call) -> bool:
    return ("spawned" in init.contexts) == ("spawned" in call.contexts)


def _stands_for_rank(call: Call, init: Call) -> bool:
    """Whether the test chooses between the rank and a substitute for it."""
    frames = [(call.module, call.node), *((site.module, site.node) for site in call.stack[::-1])]
    for module, node in frames[:_DEEPEST]:
        answer = _is_stand_in(module, node, call, init)
        if answer is not None:
            return answer
    return False


def _is_stand_in(module: Module, asked: ast.AST, call: Call, init: Call) -> bool | None:
    """The same for one function; None if it only returns the answer to its caller: `is_dist()`."""
    for node in above(module.tree, asked):
        if isinstance(node, (ast.IfExp, ast.BoolOp)) and "get_rank" in called_names(node):
            return True
        if (
            isinstance(node, ast.If)
            and asked in set(ast.walk(node.test))
            and "get_rank" in called_names(node)
            and not _inits(node)
        ):
            return True
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if _only_answers(node):
                return None
            is_inside = bool(call.stack) and init.stack[: len(call.stack)] == call.stack
            return _returns(node) and "get_rank" in called_names(node) and not is_inside and not _inits(node)
    return False


def _only_answers(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function only returns True, False, or the requested value."""
    return called_names(function) <= {"is_initialized", "is_available"} and _returns(function)


def _inits(node: ast.AST) -> bool:
    return any("init" in name and "initialized" not in name for name in called_names(node))


def _returns(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Return) and one.value is not None for one in ast.walk(node))


def _use(script: Script, call: Call) -> ast.AST | None:
    """The place in this file where the answer is used, past all functions that only return it."""
    node, module = call.node, call.module
    for site in call.stack[::-1]:
        function = next(
            (
                one
                for one in above(module.tree, node)
                if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))
            ),
            None,
        )
        if function is None or not _returns(function):
            break
        node, module = site.node, site.module
    return node if module is script.module else None


def _tell(script: Script, at: ast.AST, init: Call) -> Found:
    where = f" on line {line_of(init)}" if init.module is script.module else f" in {init.module.shown}"
    statement = statement_of(script.tree, at)
    is_talk = (
        isinstance(statement, ast.If)
        and set().union(*(called_names(one) for one in statement.body)) <= _ONLY_TALK
    )
    shown = text_of(at if isinstance(at, ast.expr) else None) or "this"
    return Found(
        at,
        f"`{shown}` is called before the process group is created{where}: every rank thinks it is rank 0 here",
        "create the process group first, or read int(os.environ['RANK'])",
        severity="warning" if is_talk else "error",
    )


_COLLECTIVES = {name for name, act in ACTS.items() if act.signature} | {f"torch.distributed.{name}" for name in ("new_group", "get_rank", "get_world_size")}  # fmt: skip
#: Packages whose objects make the group when they are made, or when they train.
_FRAMEWORKS = frozenset({"transformers", "accelerate", "rankwise"})
_ASKS_FOR_GROUP = (
    "is_initialized",
    "is_available",
    "is_dist",
    "world_size",
    "distributed",
    "is_torchelastic",
)


@rule("RW212", "error", "I15", "something needs the process group before it exists")
def used_before_init(script: Script) -> Iterator[Found]:
    seen: set[ast.AST] = set()
    for entry in script.entries:
        for call, message in _entry(script, entry):
            at = node_in(script, call) if entry.is_program or call.module is script.module else None
            if at is not None and at not in seen:
                seen.add(at)
                yield Found(at, message, "call dist.init_process_group before it")


def _entry(script: Script, entry: Entry) -> Iterator[tuple[Call, str]]:
    calls = entry.histories[0].calls
    inits = [call for call in calls if starts_group(call)]
    if not inits:
        yield from _never(script, entry)
        return
    first = inits[0]
    if first.name != INIT or _may_have_group(calls[: first.index]):
        return
    for call in calls:
        what = _needs_group(call)
        if (
            what is None
            or not is_sequence(entry, call, first)
            or _is_guarded(call, first)
            or ("spawned" in call.contexts) != ("spawned" in first.contexts)
        ):
            continue
        if call.index < first.index and not _in_own_loop(call, first):
            yield (
                call,
                f"{what} needs the process group, which is created only later, on line {line_of(first)}: it raises ValueError",
            )
        elif call.index > first.index and len(inits) == 1 and _is_optional(call, first) and entry.is_program:
            test = text_of(first.tests[-1][0])
            yield (
                call,
                f"{what} also runs where `{test}` is false, and then there is no process group: it raises ValueError",
            )


def _never(script: Script, entry: Entry) -> Iterator[tuple[Call, str]]:
    """A whole program that never creates a group, and calls nothing that may."""
    calls = entry.histories[0].calls
    if (
        not entry.is_program
        or script.piece.is_fragment
        or any(map(_may_start, calls))
        or _has_unread(script, calls)
    ):
        return
    for call in calls:
        what = _needs_group(call)
        if what is not None and not call.tests and not call.guards and not _is_guarded(call, call):
            yield (
                call,
                f"{what} needs the process group, and this program never creates one: it raises ValueError",
            )
            return


def _may_start(call: Call) -> bool:
    return is_hidden(call) or call.name.partition(".")[0] in _FRAMEWORKS


def _has_unread(script: Script, calls: list[Call]) -> bool:
    """Whether a module is imported whose text was not seen: it may create the group when it is imported."""
    seen = LIBRARIES.union(*({call.module.path.stem, *call.module.path.parts} for call in calls))
    imports = [node for node in ast.walk(script.tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "." for node in imports if isinstance(node, ast.ImportFrom)]
    return any(name.partition(".")[0] not in seen for name in names)


def _needs_group(call: Call) -> str | None:
    last = call.name.rpartition(".")[2]
    if call.name in _COLLECTIVES:
        return f"dist.{last}"
    if call.name in {DDP, FSDP}:
        return last
    if (
        call.name == SAMPLER
        and not call.has_star
        and (call.arg(1, "num_replicas") is None or call.arg(2, "rank") is None)
    ):
        return last
    return None


def _may_have_group(calls: list[Call]) -> bool:
    """Whether an unknown function may have created the group before."""
    return any(
        call.name.startswith("?")
        and any(word in call.name.lower() for word in ("init", "setup", "dist", "launch"))
        for call in calls
    )


def _is_guarded(call: Call, init: Call) -> bool:
    """Whether the code around it, or a function of its own, tests for a group."""
    tests = [*(node for node, _, _ in call.tests), *(guard.node for guard in call.guards)]
    tests += [one for one in above(call.module.tree, call.node) if isinstance(one, (ast.IfExp, ast.BoolOp))]
    is_apart = bool(call.stack) and call.stack[-1].node not in {site.node for site in init.stack}
    function = getattr(call.function, "node", None) if is_apart else None
    for one in ast.walk(function) if function is not None else ():
        if isinstance(one, (ast.If, ast.IfExp, ast.Assert, ast.BoolOp)):
            tests.append(getattr(one, "test", one))
    text = " ".join(map(ast.unparse, tests))
    return (
        any(word in text for word in _ASKS_FOR_GROUP)
        or "except" in call.contexts
        or is_caught(call.module.tree, call.node)
    )


def _in_own_loop(call: Call, init: Call) -> bool:
    return bool(call.loops) and bool(init.loops) and call.loops[0] is init.loops[0]


def _is_optional(call: Call, init: Call) -> bool:
    """Whether the group is created under a test, and no test encloses the call."""
    if not init.tests or init.tests[-1][2] is not True or call.tests or call.guards:
        return False
    word = ast.unparse(init.tests[-1][0])
    is_option = isinstance(init.tests[-1][0], (ast.Name, ast.Attribute))
    return is_option and not any(word in ast.unparse(site.node) for site in call.stack)
