"""A model is changed after it was wrapped."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from rankwise.lint.analyses.job_view import node_in, statement_of, text_of
from rankwise.lint.analyses.tensor_text import is_in, mention
from rankwise.lint.analyses.tensors import place_given
from rankwise.lint.analyses.wrapping import trains_later, wraps
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.values import Instance, Method, Object
from rankwise.lint.library.names import DDP
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.wrapping import Wrap
    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Script

_ADDERS = frozenset({"add_module", "register_module", "register_parameter", "append", "insert", "extend"})


@rule("RW404", "error", "D8", "a wrapped model gets new parameters")
def parameters_added_after_wrapping(script: Script) -> Iterator[Found]:
    for wrap in wraps(script):
        for call in wrap.calls_after():
            if call.module is not script.module or not _adds(wrap, call) or wrap.is_wrapped_again(call.index):
                continue
            node = statement_of(script.tree, call.node) if "__set" in call.name else call.node
            yield Found(
                node or call.node,
                f"`{text_of(node)}` adds parameters after `{_name(wrap)}` was wrapped, which knows only the earlier ones: these differ between ranks",
                "build the complete model first, then wrap it",
                also=mention(script, "wrapped here", wrap.call.node),
            )


def _name(wrap: Wrap) -> str:
    return min(wrap.names, default="the model")


def _adds(wrap: Wrap, call: Call) -> bool:
    """Whether a call gives the wrapped model a new part."""
    word = call.name.rpartition(".")[2]
    if not call.args or not _is_module(call.args[-1]):
        return False
    if call.name == "builtins.setattr":
        return wrap.holds(call.args[0])
    return wrap.holds(_module_of(call.receiver)) and word in _ADDERS | {"__setattr__", "__setitem__"}


def _is_module(value: Value) -> bool:
    """Whether it has parameters, or may have: a layer, a parameter, a module of the user's."""
    thing = value.thing
    if isinstance(thing, Object):
        return thing.kind.startswith("torch.nn.") and any(word in thing.kind for word in _HEAVY)
    return isinstance(thing, Instance) and any("Module" in name for name in thing.cls.library_bases)


#: Words in the names of layers that have parameters.
_HEAVY = tuple(
    """Linear Conv Embedding LSTM GRU RNN Norm Attention Transformer Parameter Sequential ModuleList ModuleDict
    Bilinear PReLU""".split()  # noqa: SIM905
)


class _Change(NamedTuple):
    node: ast.AST
    value: bool | None
    is_whole: bool


@rule("RW405", "error", "D9", "parameters are frozen or unfrozen after the model was wrapped")
def frozen_after_wrapping(script: Script) -> Iterator[Found]:
    for wrap in wraps(script):
        if not wrap.kind.endswith("DistributedDataParallel"):
            continue
        changes = [change for call in wrap.calls_after() if (change := _change(script, wrap, call))]
        # Off and on in turn is legal; and where all is frozen, as in a teacher, nothing is left to wait for.
        if len({change.value for change in changes}) != 1 or wrap.is_wrapped_again(wrap.call.index + 1):
            continue
        node, value, is_whole = changes[0]
        if is_whole:
            continue
        name = _name(wrap)
        verb = "frozen or unfrozen" if value is None else "unfrozen" if value else "frozen"
        what = (
            "is still waited for: the second step fails" if value is False else "trains on this rank's gradients alone"
        )
        yield Found(
            node,
            f"`{text_of(node)}` comes after `{name}` was wrapped, which had chosen its parameters by then: what is {verb} {what}",
            "set `requires_grad` before the model is wrapped, or wrap it again after the change",
            severity="warning" if value and not _is_stepped(wrap) else "error",
            also=mention(script, "wrapped here", wrap.call.node),
        )


def _is_stepped(wrap: Wrap) -> bool:
    """Whether an optimizer has all of the model's parameters, and not only those that were trainable when it was made."""
    given = [
        one.thing for call in wrap.entry.histories[0].calls if call.name.startswith("torch.optim.") for one in call.args
    ]
    return any(getattr(one, "kind", "") == "parameters" and wrap.holds(_module_of(one.call.receiver)) for one in given)


def _change(script: Script, wrap: Wrap, call: Call) -> _Change | None:
    """`part.requires_grad_(...)`, or `p.requires_grad = ...` for a parameter of it."""
    if call.name.endswith(".requires_grad_"):
        given = call.arg(0, "requires_grad")
        value = True if given is None else given.const
    elif call.name == "parameter.__setattr__" and call.args[0].const == "requires_grad":
        value = call.args[1].const
    else:
        return None
    owner, tests = call.receiver, call.tests
    if isinstance(owner.thing, Object) and owner.thing.kind == "parameter" and owner.thing.call is not None:
        listed = owner.thing.call
        owner, tests = listed.receiver, call.tests[len(listed.tests) :]
    module = _module_of(owner)
    node = node_in(script, call)
    if node is None or not wrap.holds(module) or not trains_later(wrap, call):
        return None
    is_whole = value is False and not tests and owner.thing in {wrap.wrapper, wrap.inner.thing}
    node = statement_of(script.tree, node) if call.name == "parameter.__setattr__" else node
    return None if node is None else _Change(node, value if isinstance(value, bool) else None, is_whole)


def _module_of(value: Value) -> Value:
    """The model that ``model.module.layer4`` is a part of, where its own parts are not known."""
    while isinstance(value.thing, Method):
        value = value.thing.receiver
    return value


_MOVES = frozenset({"to", "cuda", "cpu", "half", "bfloat16", "double", "to_empty"})


@rule("RW406", "error", "D10", "a wrapped model is moved to another device")
def moved_after_wrapping(script: Script) -> Iterator[Found]:
    for wrap in wraps(script):
        if not wrap.kind.endswith("DistributedDataParallel") or not wrap.call.name.endswith("Parallel"):
            continue
        for call in wrap.calls_after():
            if not _is_move(call, wrap) or not is_in(script.tree, call.node) or wrap.is_wrapped_again(call.index):
                continue
            if not trains_later(wrap, call) or _stays(call, wrap):
                continue
            name = _name(wrap)
            yield Found(
                call.node,
                f"`{text_of(call.node)}` moves the model after it was wrapped; DDP keeps the old parameters, and gradients are no longer averaged",
                f"move the model before it is wrapped; to save it, take a copy of `{name}.module.state_dict()` to the CPU",
                also=mention(script, "wrapped here", wrap.call.node),
            )
            break


def _is_move(call: Call, wrap: Wrap) -> bool:
    word = call.name.rpartition(".")[2]
    if word not in _MOVES or not isinstance(call.node, ast.Call) or not isinstance(call.node.func, ast.Attribute):
        return False
    thing = call.receiver.thing
    if thing is None or (thing is not wrap.wrapper and thing is not wrap.inner.thing):
        return False
    return word != "to" or (place_given(call) is not None and "memory_format" not in call.kwargs)


def _stays(call: Call, wrap: Wrap) -> bool:
    """Whether the model goes to where it was: to the CPU if it was never moved, else to the device that it was moved to."""
    word = call.name.rpartition(".")[2]
    is_to_cpu = word == "cpu" or any(value.const == "cpu" for value in call.args)
    return word in {"to", "cuda", "cpu"} and is_to_cpu is not _was_moved(wrap)


def _was_moved(wrap: Wrap) -> bool:
    inner = wrap.inner.thing
    if inner is None or wrap.call.arg(1, "device_ids") is not None:
        return True
    history = wrap.entry.histories[0].calls
    return any(
        one.index < wrap.call.index and one.name.rpartition(".")[2] in {"to", "cuda"} and one.receiver.thing is inner
        for one in history
    )


_CONVERT = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"


@rule("RW407", "error", "D20", "SyncBatchNorm is created after the model was wrapped")
def sync_batchnorm_misplaced(script: Script) -> Iterator[Found]:
    for call in script.calls_of(_CONVERT):
        given = call.arg(0, "module")
        if given is not None and isinstance(given.thing, Object) and given.thing.kind == DDP:
            yield Found(
                call.node,
                "the model is already wrapped: DDP does not know the SyncBatchNorm layers created here, and their gradients are never reduced",
                _fix(call, given.thing),
            )


def _fix(call: Call, wrapped: Object) -> str:
    convert, made = text_of(getattr(call.node, "func", None)), wrapped.call
    inner = made.arg_node(0, "module") if made is not None and made.name == DDP else None
    if made is None or inner is None:
        return f"convert first, then wrap: call `{convert}(...)` on the model before it is wrapped"
    wrap, more = (text_of(getattr(made.node, "func", None)), ", ..." if len(made.args) + len(made.kwargs) > 1 else "")
    return f"convert first, then wrap: `{wrap}({convert}({text_of(inner)}){more})`"
