"""Ranks pass tensors of different shapes to one collective.

**Why it breaks.** Collectives do not compare shapes. With Gloo one rank aborts and the other may exit with garbage in
its result; with NCCL the job hangs.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
mine = torch.zeros(2 if rank == 0 else 3)
parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(parts, mine)
dist.destroy_process_group()
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
mine = torch.zeros(3)
parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(parts, mine)
dist.destroy_process_group()
```

**When it says nothing.** The shape depends on the data: the code does not show whether a last batch is shorter.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.model.values import Items, Object
from rankwise.lint.rule import Rule
from rankwise.lint.topics.collective_calls import collectives, has_group, word_of
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.tensor_text import last_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.finding import Finding
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script

_GIVEN = {"all_reduce": (0, "tensor"), "all_gather": (1, "tensor"), "broadcast": (0, "tensor"), "reduce": (0, "tensor"), "gather": (0, "tensor"),
          "all_gather_into_tensor": (1, "input_tensor"), "reduce_scatter_tensor": (1, "input")}  # fmt: skip
_SIZED = frozenset(
    {"torch.zeros", "torch.ones", "torch.empty", "torch.rand", "torch.randn", "torch.full", "torch.arange"}
)


#: Methods that keep the length.
_KEEPS = frozenset({"contiguous", "float", "detach", "clone", "to", "cuda", "cpu", "half", "double"})
_ASK = frozenset({"torch.isfinite", "torch.isnan", "torch.where", "torch.nonzero"})


def check(script: Script) -> Iterator[Finding]:
    """Tensors created with a known size that differs between ranks."""
    for place in collectives(script, *_GIVEN):
        if has_group(place.last) or len(place.calls) < 2:
            continue
        position, name = _GIVEN[word_of(place.last)]
        shapes = {call.rank: _shape(call.arg(position, name)) for call in place.calls}
        if None in shapes.values() or len(set(shapes.values())) < 2:
            continue
        node = place.last.arg_node(position, name) or place.last.node
        first, last = min(shapes), next(rank for rank in shapes if shapes[rank] != shapes[min(shapes)])
        yield script.finding(
            RULE,
            node,
            f"`{text_of(node)}` has size {_shown(shapes[first])} on rank {first} and {_shown(shapes[last])} on rank {last}: {word_of(place.last)} aborts, hangs or returns garbage",
            "pad to one size, or gather the sizes first and then tensors of the largest",
        )
    yield from _selected(script)


def _selected(script: Script) -> Iterator[Finding]:
    """``x[x > 0.5]`` of each rank's own data, gathered as if all ranks had selected equally many."""
    for place in collectives(script, "all_gather", "all_gather_into_tensor"):
        call = place.last
        value, node = call.arg(1, "tensor", "input_tensor"), call.arg_node(1, "tensor", "input_tensor")
        if value is None or node is None or not value.spread or has_group(call):
            continue
        if "share" in value.origin:
            message = f"`{text_of(node)}` is every rank's share of something: the shares differ in length if it can't be divided evenly, and {word_of(call)} aborts, hangs or returns garbage"
            yield script.finding(RULE, node, message, _FIX, severity="warning")
            continue
        made = last_value(script.tree, node, call.node)
        while (
            isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr in _KEEPS
        ):
            made = last_value(script.tree, made.func.value, made)
        if _picks(script.tree, made):
            yield script.finding(
                RULE,
                node,
                f"`{text_of(made)}` selects from each rank's own data, so `{text_of(node)}` has a different length on each rank: {word_of(call)} aborts, hangs or returns garbage",
                _FIX,
            )


def _picks(tree: ast.Module, node: ast.AST) -> bool:
    """Whether the resulting length depends on the values."""
    if isinstance(node, ast.Subscript):
        index = last_value(tree, node.slice, node)
        return isinstance(index, ast.Compare) or (isinstance(index, ast.Call) and text_of(index.func) in _ASK)
    if isinstance(node, ast.Call):
        word = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        return word in {"nonzero", "masked_select", "unique", "argwhere"}
    return False


def _shape(value: Value | None) -> tuple[int, ...] | None:
    thing = value.thing if value is not None else None
    call = thing.call if isinstance(thing, Object) else None
    if call is None or call.name not in _SIZED or call.has_star or "out" in call.kwargs:
        return None
    given = list(call.args)
    if call.name == "torch.full":
        given = given[:1]
    if len(given) == 1 and isinstance(given[0].thing, Items) and given[0].thing.is_whole:
        given = given[0].thing.values
    numbers = tuple(one.const for one in given)
    return numbers if numbers and all(isinstance(one, int) for one in numbers) else None


def _shown(shape: tuple[int, ...] | None) -> str:
    return "x".join(str(one) for one in shape or ())


_FIX = "gather the lengths first, then pad to the longest, gather, and remove the padding"

RULE: Rule[Script] = Rule(
    id="RW317",
    name="shape-differs-between-ranks",
    severity="error",
    classes=("C5",),
    summary="ranks pass tensors of different shapes to one collective",
    check=check,
)
