"""Cross-entropy of a model with one output is always 0.

**Why it breaks.** Softmax over one class is 1, and its logarithm 0: the loss is 0 whatever the model outputs, and so
are all gradients. The run looks fine; nothing is learned. (A class index other than 0 fails with ``Target ... is out of
bounds``.)

Bad:

```python
import torch
from torch import nn

model = nn.Linear(20, 1)
criterion = nn.CrossEntropyLoss()
loss = criterion(model(torch.rand(8, 20)), torch.rand(8, 1))
```

Good:

```python
import torch
from torch import nn

model = nn.Linear(20, 1)
criterion = nn.MSELoss()
loss = criterion(model(torch.rand(8, 20)), torch.rand(8, 1))
```

**When it says nothing.** The model, its last layer or what is done with its output can't be traced within the file.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import span_of
from rankwise.lint.rule import Rule
from rankwise.lint.topics.origins import Origins
from rankwise.lint.topics.scopes import Scopes, scopes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script

_OUTPUTS_AT = {"torch.nn.Linear": 1, "torch.nn.LazyLinear": 0, "torch.nn.Bilinear": 2}


def check(script: Script) -> Iterator[Finding]:
    """Losses of cross-entropy whose input is a model's only output."""
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
            yield script.finding(
                RULE,
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


RULE: Rule[Script] = Rule(
    id="RW806",
    name="cross-entropy-of-one-output",
    severity="error",
    classes=(),
    summary="cross-entropy of a model with one output is always 0",
    check=check,
    needs_ranks=False,
)
