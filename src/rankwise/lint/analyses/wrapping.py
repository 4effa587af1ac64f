"""Models that ranks train together: where they are wrapped, what is inside, and what happens to them afterwards."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.lint.analyses.in_ranks import inside
from rankwise.lint.analyses.job_view import statement_of
from rankwise.lint.analyses.tensor_text import key_of, targets_of
from rankwise.lint.analyses.tensors import OFF
from rankwise.lint.interpreter.values import Instance, Items, Object
from rankwise.lint.library.names import DDP, FSDP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Entry, Script


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrap:
    """One model, wrapped in one place.

    Attributes:
        entry: In which run.
        call: What wrapped it: DDP's or FSDP's constructor, `accelerator.prepare`, `fabric.setup`.
        wrapper: The wrapped model.
        inner: The model inside.
        names: What the wrapper is called in the text.
    """

    entry: Entry
    call: Call
    wrapper: Object
    inner: Value
    names: frozenset[str]

    @property
    def kind(self) -> str:
        """DDP or FSDP."""
        return self.wrapper.kind

    def calls_after(self) -> Iterator[Call]:
        """What rank 0 calls after the wrapping."""
        for call in self.entry.histories[0].calls:
            if call.index > self.call.index and not self.call.excludes(call):
                yield call

    def parts(self) -> set[int]:
        """Ids of the model inside and of its parts."""
        return {id(one) for one in parts_of(self.inner)}

    def holds(self, value: Value) -> bool:
        """Whether a value is the wrapper, the model inside, or a part of it."""
        thing = value.thing
        return thing is not None and (thing is self.wrapper or id(thing) in self.parts())

    def is_wrapped_again(self, index: int) -> bool:
        """Whether the model is wrapped once more after that call."""
        inner = self.inner.thing
        return any(
            call.index > index
            and call.name in {DDP, FSDP}
            and call.args
            and (call.args[0].thing is inner or inner is None)
            for call in self.calls_after()
        )


def wraps(script: Script) -> list[Wrap]:
    """Models that are wrapped on rank 0, each once for each entry."""
    found = []
    for entry in script.entries:
        seen: set[int] = set()
        for call in entry.histories[0].calls:
            for thing in _wrapped_by(call):
                if id(thing) not in seen and thing.call is not None:
                    seen.add(id(thing))
                    found.append(_wrap(entry, call, thing))
    return found


def _wrapped_by(call: Call) -> Iterator[Object]:
    if not call.name.endswith(("Parallel", ".prepare", ".prepare_model", ".setup", ".setup_module")):
        return
    thing = call.result.thing
    values = thing.values if isinstance(thing, Items) else [call.result]
    for value in values:
        if isinstance(value.thing, Object) and value.thing.kind in {DDP, FSDP}:
            yield value.thing


def _wrap(entry: Entry, call: Call, thing: Object) -> Wrap:
    made = thing.call or call
    inner = made.arg(0, "module")
    statement = statement_of(call.module.tree, call.node)
    names = _names(call, thing, targets_of(statement)) if statement is not None else set()
    return Wrap(
        entry=entry, call=call, wrapper=thing, inner=inner if inner is not None else call.result, names=frozenset(names)
    )


def _names(call: Call, thing: Object, targets: list[ast.expr]) -> set[str]:
    if call.name in {DDP, FSDP} or not isinstance(call.result.thing, Items):
        return {key_of(one) for one in targets[:1]} - {""}
    values = call.result.thing.values
    return {key_of(one) for one, value in zip(targets, values, strict=False) if value.thing is thing} - {""}


def parts_of(value: Value) -> Iterator[object]:
    """A model and the modules it is made of, as far as they are known."""
    yield from (one.thing for one in inside(value) if isinstance(one.thing, (Instance, Object)))


def trains_later(wrap: Wrap, call: Call) -> bool:
    """Whether a forward pass of the wrapper with gradients follows a call, or stands in a loop with it."""
    return any(
        one.name == f"{wrap.kind}.__call__"
        and one.receiver.thing is wrap.wrapper
        and not OFF & set(one.contexts)
        and (one.index > call.index or any(loop in one.loops for loop in call.loops))
        for one in wrap.entry.histories[0].calls
    )


def refers_to(node: ast.AST, wrap: Wrap) -> bool:
    """Whether an expression of the text begins with the wrapper, by its name: ``ddp.module.head``."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        if key_of(node) in wrap.names:
            return True
        node = node.func if isinstance(node, ast.Call) else node.value
    return key_of(node) in wrap.names
