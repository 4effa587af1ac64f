"""The process group is created with arguments or at a place that do not fit."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.job_view import (
    DESTROY,
    INIT,
    SPAWN,
    called_names,
    is_sequence,
    line_of,
    node_in,
    once,
    places,
    text_of,
)
from rankwise.lint.analyses.options import option_of, text_given
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.calls import arms_of
from rankwise.lint.interpreter.values import is_number
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.interpreter.calls import Call
    from rankwise.lint.interpreter.values import Value
    from rankwise.lint.script import Entry, Script

_STORE = "torch.distributed.FileStore"
_REMOVES = frozenset({"remove", "unlink", "rmtree", "mkdtemp", "TemporaryDirectory", "mkstemp", "NamedTemporaryFile"})


@rule("RW206", "warning", "I13", "all runs share one fixed init file")
def fixed_init_file(script: Script) -> Iterator[Found]:
    if not _REMOVES.isdisjoint(called_names(script.tree)):
        return
    for place in once(places(script, INIT, _STORE)):
        call = place.last
        at = (0, "file_name") if call.name == _STORE else (1, "init_method")
        node, (path, is_default) = call.arg_node(*at), text_given(call.arg(*at))
        if path is None or node is None or (call.name == INIT and not path.startswith("file:")):
            continue
        what = "is the default, so all runs share one file" if is_default else "is the same file for each run"
        shown = repr(path) if isinstance(node, ast.Constant) else f"`{text_of(node)}`"
        yield Found(
            node,
            f"{shown} {what}: one that was killed leaves it behind, and the next hangs; two at once join each other",
            'use "env://" under a launcher, or put the job\'s id into the path',
        )


_MAKES = frozenset({INIT, "accelerate.Accelerator", "lightning.fabric.Fabric"})


@rule("RW211", "error", "I16", "the process group is created twice")
def init_twice(script: Script) -> Iterator[Found]:
    for entry in script.entries:
        for call, message in _again(entry):
            node = node_in(script, call)
            if node is not None:
                yield Found(node, message, "create the group once, or test `if not dist.is_initialized()` first")


def _again(entry: Entry) -> Iterator[tuple[Call, str]]:
    calls = [call for call in entry.histories[0].calls if call.name in {*_MAKES, DESTROY, "?destroy_process_group"}]
    spawns = {id(call.node) for call in entry.histories[0].calls if call.name == SPAWN}
    held: Call | None = None
    for call in calls:
        if call.name.endswith("destroy_process_group"):
            held = None
        elif call.name == INIT:
            if _asks(call) or _is_made_once(call):
                held = held or call
                continue
            if (
                held is not None
                and _process_of(held, spawns) == _process_of(call, spawns)
                and not _other_arm(held, call)
                and is_sequence(entry, held, call)
            ):
                yield (
                    call,
                    f"the process group already exists (line {line_of(held)}): this raises ValueError",
                )
            elif call.loops and not _destroyed_in_loop(calls, call):
                yield (
                    call,
                    "the process group is created in each iteration of the loop and never destroyed: the second iteration raises ValueError",
                )
            held = call
        elif held is None and not call.args:
            held = call


def _process_of(call: Call, spawns: set[int]) -> tuple[int, ...]:
    """The calls that led to the process that makes a call: each mp.spawn starts new ones."""
    sites = [id(site.node) for site in call.stack]
    return tuple(sites[: max((sites.index(one) + 1 for one in spawns if one in sites), default=0)])


def _asks(call: Call) -> bool:
    tests = [*(node for node, _, _ in call.tests), *(guard.node for guard in call.guards)]
    node = getattr(call.function, "node", None)
    # A decided test leaves no trace in the call; its function's text does.
    return any("initialized" in ast.unparse(test) for test in tests) or (
        node is not None and "is_initialized" in ast.unparse(node)
    )


def _is_made_once(call: Call) -> bool:
    """Whether it is in the constructor of a singleton, or of a class that remembers the call."""
    function = call.function
    owner = getattr(function, "owner", None)
    if owner is None:
        return False
    return (
        "__new__" in owner.attrs
        or any(base.path.endswith("Singleton") for base in owner.bases)
        or (getattr(function.node, "name", "") == "__init__" and "instance" in ast.unparse(owner.node).lower())
    )


def _other_arm(one: Call, other: Call) -> bool:
    # Whatever made the first one under a test may have left with it, or exclude the second; a handler runs where the
    # first one has failed.
    catching = {node for node, _, _ in other.tests if isinstance(node, ast.ExceptHandler)}
    return not catching <= {node for node, _, _ in one.tests} or not arms_of(one.tests) <= arms_of(other.tests)


def _destroyed_in_loop(calls: list[Call], call: Call) -> bool:
    return any(one.name.endswith("destroy_process_group") and call.loops[-1] in one.loops for one in calls)


#: The position of the timeout.
_POSITIONS = {
    INIT: 2,
    "torch.distributed.new_group": 1,
    "torch.distributed.monitored_barrier": 1,
    "torch.distributed.TCPStore": 4,
    "torch.distributed.new_subgroups": None,
    "accelerate.InitProcessGroupKwargs": None,
}


@rule("RW214", "error", "I19", "a process group's timeout is a number")
def timeout_not_timedelta(script: Script) -> Iterator[Found]:
    for place in once(places(script, *_POSITIONS)):
        call = place.last
        position = _POSITIONS[call.name]
        node, value = call.arg_node(position, "timeout"), call.arg(position, "timeout")
        if node is not None and value is not None and _is_number(value):
            text = text_of(node)
            yield Found(
                node,
                f"timeout={text} is a number, and {call.name.rpartition('.')[2]} takes a datetime.timedelta: it raises TypeError",
                f"timeout=timedelta(seconds={text})",
            )


def _is_number(value: Value) -> bool:
    """Whether it is a number, or an option that is read as one and not converted since."""
    option = option_of(value)
    type_ = option.arg(None, "type") if option is not None else None
    is_read_as_one = type_ is not None and getattr(type_.thing, "name", "") in {
        "builtins.int",
        "builtins.float",
    }
    return is_read_as_one or (is_number(value) and not isinstance(value.const, bool))


@rule("RW216", "hint", "R6", "the process group is never destroyed")
def group_not_destroyed(script: Script) -> Iterator[Found]:
    if "destroy" in script.piece.code or "cleanup" in script.piece.code:
        return
    for place in once(places(script, INIT)):
        calls = [call for history in place.entry.histories for call in history.calls]
        texts = {call.module.text for call in calls}
        if place.entry.is_program and not any("destroy_process_group" in text for text in texts):
            message = "the process group created here is never destroyed: ranks that end early cut off the others"
            yield Found(place.last.node, message, "call dist.destroy_process_group() at the end")
            return
