"""A collective writes its result into a tensor that nothing keeps.

**Why it breaks.** Collectives work in place. `dist.all_reduce(torch.tensor(count))` creates a tensor, sums it over the
ranks and discards it: `count` keeps this rank's value, and the metric is silently that of one rank. The same holds for
`x.clone()`, `x / n`, and `x.to(device)` wherever that makes a copy.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
correct = 17
dist.all_reduce(torch.tensor(correct))
print(correct)
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
correct = torch.tensor(17)
dist.all_reduce(correct)
print(correct.item())
dist.destroy_process_group()
```

**When it says nothing.** Views of a tensor that is kept (`x.view(-1)`, `x[0]`, `x.data`, `p.grad`), a warm-up with
`torch.zeros(1)`, the source of a broadcast and the senders of a `reduce`, which need no result.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import (
    OBJECTS,
    ROOTED,
    collectives,
    filled_node,
    root_rank,
    word_of,
)
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.tensor_text import VIEWS, last_value, root_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.finding import Finding
    from rankwise.lint.script import Script
    from rankwise.lint.topics.job_view import Place

_COPIES = frozenset({"clone", "cuda", "cpu", "to", "float", "double", "half", "bfloat16", "long", "int", "bool", "type", "sum", "mean", "max", "min",
                     "abs", "mul", "div", "add", "sub", "pow", "sqrt", "norm", "astype", "type_as", "new_tensor", "prod", "std", "var", "exp", "log",
                     "cumsum", "masked_select", "index_select", "gather", "repeat", "new_full", "new_zeros", "new_ones", "square"})  # fmt: skip
_MAKES = frozenset({"tensor", "stack", "cat", "sum", "mean", "clone", "Tensor", "FloatTensor", "LongTensor", "IntTensor", "DoubleTensor", "max", "min",
                    "zeros_like", "ones_like", "full", "count_nonzero", "bincount", "norm", "concat", "concatenate", "hstack", "vstack"})  # fmt: skip
#: Contents that nothing can use.
_BLANK = frozenset(
    {"zeros", "ones", "empty", "rand", "randn", "full", "empty_like", "zeros_like", "ones_like", "arange"}
)


def check(script: Script) -> Iterator[Finding]:
    """Collectives whose result goes into a tensor created in the call."""
    for place in collectives(script):
        call = place.last
        node = filled_node(call)
        if node is None or _is_needless(place) or "_coalescing_manager" in call.contexts:
            continue
        severity = _severity(
            script.tree,
            node,
            is_list=word_of(call) in OBJECTS or word_of(call) in {"all_gather", "all_to_all"},
        )
        if severity is None:
            continue
        shown = text_of(node)
        yield script.finding(
            RULE,
            node,
            f"{word_of(call)} writes its result into `{shown}`, which is created here and not kept, so the result is lost on every rank",
            f"give it a name first: `result = {shown}`, then `{word_of(call)}(result, ...)`, and continue with `result`",
            severity=severity,
        )


def _is_needless(place: Place) -> bool:
    """Whether only ranks that do not need the result get here."""
    call, word = place.last, word_of(place.last)
    if word not in ROOTED:
        return False
    root = root_rank(call)
    if root is None:
        return place.last.is_guarded
    is_source = word in {"broadcast", "broadcast_object_list"}
    if is_source:
        return place.ranks == {root}
    return word in {"reduce", "gather", "gather_object"} and root not in place.ranks


def _severity(tree: ast.Module, node: ast.AST, *, is_list: bool) -> Severity | None:
    if isinstance(node, (ast.ListComp, ast.List)) and is_list:
        return (
            "error"
            if isinstance(node, ast.ListComp)
            or (bool(node.elts) and all(isinstance(one, ast.Call) for one in node.elts))
            else None
        )
    if isinstance(node, ast.BinOp):
        if is_list:
            return "error" if isinstance(node.op, ast.Mult) else None
        return None if _is_number(node.left) and _is_number(node.right) else "error"
    if isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.List, ast.Compare, ast.ListComp)):
        return "error"
    if isinstance(node, ast.Subscript) and isinstance(last_value(tree, node.slice, node), ast.Compare):
        return "error"
    return _of_call(tree, node) if isinstance(node, ast.Call) else None


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) or (
        isinstance(node, ast.Call) and text_of(node.func).endswith((".item", "len", "float", "int"))
    )


def _of_call(tree: ast.Module, node: ast.Call) -> Severity | None:  # noqa: PLR0911 - one line for each form
    if not isinstance(node.func, ast.Attribute):
        return None
    word, owner = node.func.attr, node.func.value
    if isinstance(owner, ast.Name) and owner.id in {"torch", "th", "T"}:
        if word in _BLANK or (word == "tensor" and node.args and isinstance(node.args[0], ast.Constant)):
            return None
        return "error" if word in _MAKES else None
    if word == "item" or word not in _COPIES:
        if word == "contiguous" and not isinstance(root_of(owner), ast.Call):
            return "warning"
        inner = owner if word in VIEWS else None
        return _of_call(tree, inner) if isinstance(inner, ast.Call) else None
    if _is_blank(owner):
        return None
    return "error"


def _is_blank(node: ast.AST) -> bool:
    """`torch.zeros(1).cuda()`: a warm-up, or a barrier."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if isinstance(node.func.value, ast.Name) and node.func.value.id in {"torch", "th"}:
            constant = node.args and isinstance(node.args[0], ast.Constant)
            return node.func.attr in _BLANK or (node.func.attr == "tensor" and bool(constant))
        node = node.func.value
    return False


RULE: Rule[Script] = Rule(
    id="RW301",
    name="collective-on-temporary",
    severity="error",
    classes=("C15",),
    summary="a collective writes into a tensor that nothing keeps",
    check=check,
)
