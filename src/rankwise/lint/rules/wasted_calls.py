"""Calls whose result is lost or always the same."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.data_flow import loaders_in
from rankwise.lint.analyses.job_view import line_of, node_in, once, places, text_of
from rankwise.lint.analyses.scopes import Scopes, scopes_of
from rankwise.lint.analyses.tensor_text import key_of
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.values import Function, Instance, Object
from rankwise.lint.library.constructor_table import WRAPPERS
from rankwise.lint.library.names import LOADER
from rankwise.lint.paths.phrases import reported_place
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.job_view import Place
    from rankwise.lint.interpreter.values import Call, UserClass, Value
    from rankwise.lint.script import Script


@rule("RW805", "warning", "", "a batch is loaded in every epoch only to read its size", needs_ranks=False)
def batch_thrown_away(script: Script) -> Iterator[Found]:
    for place in once(places(script, "builtins.next", f"{LOADER}.__next__", anywhere=True)):
        call, scopes = place.last, scopes_of(place.last.module.tree)
        loaders = loaders_in(call.args[0] if call.args else call.receiver)
        begun = next((one for one in _iterators_before(place) if loaders_in(one.args[0]) == loaders), None)
        if not loaders or begun is None or not call.loops or begun.loops != call.loops:
            continue
        node = node_in(script, call)
        if (
            node is not None
            and isinstance(call.node, ast.Call)
            and _reads_alone(scopes, call.node)
            and _only_sized(scopes, call.node)
        ):
            text = text_of(begun.arg_node(0))
            yield Found(
                node,
                f"next(iter({text})) starts the loader's workers and discards a batch each time, only to read a size",
                f"read `{text}.batch_size`, or read the size of the batch inside the loop over `{text}`",
            )


def _iterators_before(place: Place) -> Iterator[Call]:
    """What the rank of a place has begun to go over before, the latest first."""
    index = place.last.index
    for history in place.entry.histories:
        if history.calls[index : index + 1] == [place.last]:
            return (one for one in reversed(history.calls[:index]) if one.name == "builtins.iter" and one.args)
    return iter(())


def _reads_alone(scopes: Scopes, call: ast.Call) -> bool:
    """Whether nothing else reads the iterator whose first batch a call takes."""
    taken = call.args[0] if call.args else getattr(call.func, "value", None)
    if not isinstance(taken, ast.Name):
        return True
    owner = scopes.owner(taken.id, scopes.scope(taken))
    return sum(one.id == taken.id and scopes.owner(one.id, at) is owner for one, at in scopes.loads) == 1


def _only_sized(scopes: Scopes, call: ast.expr) -> bool:
    """Whether all that is read of a batch is its length or a dimension."""
    node: ast.AST = call
    above = scopes.parents[node]
    while isinstance(above, ast.Subscript) and above.value is node:
        node, above = above, scopes.parents[above]
    if isinstance(above, ast.Call) and isinstance(above.func, ast.Name) and above.func.id == "len":
        return True
    if isinstance(above, ast.Attribute):
        return above.attr in ("shape", "size")
    return isinstance(above, ast.Assign) and len(above.targets) == 1 and _names_only_sized(scopes, above.targets[0])


def _names_only_sized(scopes: Scopes, target: ast.expr) -> bool:
    """Whether names that a batch is stored in are read for their sizes, and for nothing else."""
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    read: list[ast.Name] = []
    for name in names:
        if not isinstance(name, ast.Name) or len(scopes.bindings(name.id, scopes.scope(name))) != 1:
            return False
        owner = scopes.owner(name.id, scopes.scope(name))
        read += [n for n, at in scopes.loads if n.id == name.id and scopes.owner(n.id, at) is owner]
    return bool(read) and all(_only_sized(scopes, n) for n in read)


#: Where layers take the number of their outputs.
_OUTPUTS = {
    "torch.nn.Linear": (1, "out_features"),
    "torch.nn.LazyLinear": (0, "out_features"),
    "torch.nn.Bilinear": (2, "out_features"),
}


@rule("RW806", "error", "", "cross-entropy of a model with one output is always 0", needs_ranks=False)
def cross_entropy_of_one_output(script: Script) -> Iterator[Found]:
    for place in once(places(script, "torch.nn.functional.cross_entropy", "torch.nn.CrossEntropyLoss.__call__")):
        predicted = place.last.arg(0, "input")
        layer = _last_layer(predicted.made.receiver) if predicted is not None and predicted.made is not None else None
        outputs = layer.arg(*_OUTPUTS[layer.name]) if layer is not None and layer.name in _OUTPUTS else None
        if layer is not None and outputs is not None and type(outputs.const) is int and outputs.const == 1:
            yield Found(
                place.last.node,
                f"the loss is always 0: cross-entropy of a model whose last layer, line {line_of(layer)}, has one output",
                "for regression use nn.MSELoss, for yes or no nn.BCEWithLogitsLoss, for classes one output for each",
                also=[reported_place("the last layer", layer.node, layer.module)],
            )


def _last_layer(model: Value, depth: int = 0) -> Call | None:
    """The call that made the layer whose result a model returns; None where that is not certain."""
    thing = model.thing
    if not isinstance(thing, (Instance, Object)) or thing.call is None or depth > 8:
        return None
    if model.made is None or model.made.name == "either":
        return None
    inner: Value | None = None
    if isinstance(thing, Instance):
        inner = thing.attrs.get(_called_last(thing.cls))
    elif thing.kind in WRAPPERS or thing.kind == "torch.nn.Sequential":
        inner = thing.call.args[0 if thing.kind in WRAPPERS else -1] if thing.call.args else None
    else:
        return thing.call
    return _last_layer(inner, depth + 1) if inner is not None else None


def _called_last(cls: UserClass) -> str:
    """The attribute whose result a `forward` without branches returns: ``return self.head(x)``, also through a name."""
    forward = cls.find("forward")
    function = forward.thing if forward is not None else None
    body = function.node.body if isinstance(function, Function) and not isinstance(function.node, ast.Lambda) else []
    returned = body[-1].value if body and isinstance(body[-1], ast.Return) else None
    if isinstance(returned, ast.Name):
        stored = [one.value for one in body if isinstance(one, ast.Assign) and key_of(one.targets[0]) == returned.id]
        returned = stored[-1] if stored else None
    has_branches = any(isinstance(one, (ast.If, ast.For, ast.While, ast.Try)) for one in body)
    return key_of(returned.func).removeprefix("self.") if isinstance(returned, ast.Call) and not has_branches else ""
