"""Calls whose result is lost or always the same."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import Found, span_of
from rankwise.lint.rule import rule
from rankwise.lint.topics.origins import Origins
from rankwise.lint.topics.scopes import FunctionNode, Scopes, is_function, scopes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.script import Script


@rule("RW805", "warning", "", "a batch is loaded in every epoch only to read its size", needs_ranks=False)
def batch_thrown_away(script: Script) -> Iterator[Found]:
    if "iter(" not in script.piece.code or "next" not in script.piece.code:
        return
    scopes = scopes_of(script.tree)
    for call in scopes.all(ast.Call):
        source = _source(scopes, call)
        if source is None or not _is_loader(scopes, source):
            continue
        if _only_sized(scopes, call) and _runs_often(scopes, call):
            text = ast.unparse(source)
            yield Found(
                call,
                f"next(iter({text})) starts the loader's workers and discards a batch each time, only to read a size",
                f"read `{text}.batch_size`, or read the size of the batch inside the loop over `{text}`",
            )


def _source(scopes: Scopes, call: ast.Call) -> ast.expr | None:
    """What is iterated in ``next(iter(x))``, also through a name or ``__next__``."""
    if isinstance(call.func, ast.Name) and call.func.id == "next" and len(call.args) == 1:
        inner = call.args[0]
    elif isinstance(call.func, ast.Attribute) and call.func.attr in ("next", "__next__") and not call.args:
        inner = call.func.value
    else:
        return None
    if isinstance(inner, ast.Name):
        owner = scopes.owner(inner.id, scopes.scope(inner))
        if sum(n.id == inner.id and scopes.owner(n.id, at) is owner for n, at in scopes.loads) == 1:
            inner = scopes.value(inner.id, scopes.scope(inner)) or inner
    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "iter":
        return inner.args[0] if inner.args else None
    return None


def _is_loader(scopes: Scopes, source: ast.expr) -> bool:
    name = (
        source.id
        if isinstance(source, ast.Name)
        else source.attr
        if isinstance(source, ast.Attribute)
        else ""
    )
    if "loader" in name.lower() or name.lower().endswith("_dl"):
        return True
    if "data" in name.lower() and isinstance(source, ast.Attribute):
        return True
    value = scopes.value(name, scopes.scope(source)) if isinstance(source, ast.Name) else None
    return isinstance(value, ast.Call) and ast.unparse(value.func).endswith("DataLoader")


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
    return (
        isinstance(above, ast.Assign)
        and len(above.targets) == 1
        and _names_only_sized(scopes, above.targets[0])
    )


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


def _runs_often(scopes: Scopes, node: ast.AST, depth: int = 0) -> bool:
    """Whether a node is in a loop, or in a function that a loop of this file calls, directly or not."""
    for above in scopes.above(node):
        if isinstance(above, (ast.For, ast.While, ast.AsyncFor)):
            return True
        if is_function(above):
            return "epoch" in above.name or (depth < 3 and _is_called_often(scopes, above, depth))
    return False


def _is_called_often(scopes: Scopes, function: FunctionNode, depth: int) -> bool:
    is_method = isinstance(scopes.parents.get(function), ast.ClassDef)
    for call in scopes.all(ast.Call):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        is_it = name == function.name and isinstance(call.func, ast.Attribute) == is_method
        if is_it and function not in scopes.above(call) and _runs_often(scopes, call, depth + 1):
            return True
    return False


_OUTPUTS_AT = {"torch.nn.Linear": 1, "torch.nn.LazyLinear": 0, "torch.nn.Bilinear": 2}


@rule("RW806", "error", "", "cross-entropy of a model with one output is always 0", needs_ranks=False)
def cross_entropy_of_one_output(script: Script) -> Iterator[Found]:
    code = script.piece.code
    if ("CrossEntropyLoss" not in code and "cross_entropy" not in code) or "Linear" not in code:
        return
    scopes = scopes_of(script.tree)
    origins = Origins(scopes)
    for call in scopes.all(ast.Call):
        predicted = _predicted(call)
        if predicted is None or not _is_cross_entropy(scopes, origins, call):
            continue
        layer = _one_output_layer(origins, predicted, scopes)
        if layer is not None:
            yield Found(
                call,
                f"the loss is always 0: cross-entropy of a model whose last layer, line {layer.lineno}, has one output",
                "for regression use nn.MSELoss, for yes or no nn.BCEWithLogitsLoss, for classes one output for each",
                also=[("the last layer", script.piece.path, span_of(layer, script.lines))],
            )


def _predicted(call: ast.Call) -> ast.expr | None:
    if call.args:
        return call.args[0]
    return next((k.value for k in call.keywords if k.arg == "input"), None)


def _is_cross_entropy(scopes: Scopes, origins: Origins, call: ast.Call) -> bool:
    if not isinstance(call.func, (ast.Name, ast.Attribute, ast.Call)) or not (call.args or call.keywords):
        return False
    word = scopes.dotted(_unnamed(scopes, call.func))
    if word:
        return word == "torch.nn.functional.cross_entropy"
    if isinstance(call.func, ast.Attribute) and not isinstance(call.func.value, ast.Name):
        return False
    made = origins.of(call.func)
    return bool(made) and all(_is_loss_class(scopes, m) for m in made or ())


def _unnamed(scopes: Scopes, node: ast.expr) -> ast.expr:
    """A function of torch behind a name that was given to it."""
    value = scopes.value(node.id, scopes.scope(node)) if isinstance(node, ast.Name) else None
    return value if isinstance(value, ast.Attribute) else node


def _is_loss_class(scopes: Scopes, call: ast.Call) -> bool:
    word = scopes.dotted(call.func)
    return word in ("torch.nn.CrossEntropyLoss", "torch.nn.modules.loss.CrossEntropyLoss")


def _one_output_layer(origins: Origins, predicted: ast.expr, scopes: Scopes) -> ast.Call | None:
    """The layer with one output whose result is passed to the loss unchanged."""
    outputs = origins.of(predicted)
    if not outputs or any(isinstance(o.func, ast.Call) for o in outputs):
        return None
    layers: list[ast.Call] = []
    for output in outputs:
        made = (
            None
            if scopes.dotted(output.func) or scopes.called_class(output.func)
            else origins.of(output.func)
        )
        if not made:
            return None
        for model in made:
            layer = origins.last_layer(model)
            if layer is None or not _has_one_output(scopes, layer):
                return None
            layers.append(layer)
    return layers[0]


def _has_one_output(scopes: Scopes, layer: ast.Call) -> bool:
    position = _OUTPUTS_AT.get(scopes.dotted(layer.func))
    if position is None:
        return False
    given = next((k.value for k in layer.keywords if k.arg == "out_features"), None)
    if given is None and position < len(layer.args):
        given = layer.args[position]
    return isinstance(given, ast.Constant) and given.value == 1 and given.value is not True
