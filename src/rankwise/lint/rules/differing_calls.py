"""Ranks call the same collectives in another order or with other shapes."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import Found
from rankwise.lint.library.acts import ACTS
from rankwise.lint.model.values import Items, Object
from rankwise.lint.rule import rule
from rankwise.lint.topics.collective_calls import D, collectives, has_group, word_of
from rankwise.lint.topics.job_view import text_of, together
from rankwise.lint.topics.tensor_text import bindings, key_of, last_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script


_SET_METHODS = frozenset({"union", "intersection", "difference", "symmetric_difference"})


_LISTINGS = frozenset({"listdir", "glob", "iglob", "rglob", "scandir", "iterdir"})


_KEEPING = frozenset({"list", "tuple", "enumerate", "iter", "reversed", "map", "filter", "tqdm"})


_DEEPEST = 6


#: Orders that certainly differ: a listing of a folder that ranks share does not have to.
_OF_SETS = ("a set", "a set of keys")


@rule("RW315", "error", "C4", "collectives run in the order of a set or of a directory listing")
def order_differs_between_ranks(script: Script) -> Iterator[Found]:
    told: set[int] = set()
    for op in together(script):
        if op.family == "barrier":
            # Any two of them can be paired.
            continue
        for loop in op.call.loops:
            sources = (
                [loop.iter]
                if isinstance(loop, (ast.For, ast.AsyncFor))
                else [one.iter for one in getattr(loop, "generators", ())]
            )
            for source in sources:
                order = (
                    _order(script.tree, source, 0)
                    if id(source) not in told and _is_here(script, source)
                    else ""
                )
                if not order:
                    continue
                told.add(id(source))
                yield Found(
                    source,
                    f"{order} has a different order in each process, so ranks call `{op.name}` for different items of `{text_of(source)}`",
                    f"loop over `sorted({text_of(source)})`",
                    severity="error" if order in _OF_SETS else "warning",
                )


def _is_here(script: Script, node: ast.AST) -> bool:
    return any(one is node for one in ast.walk(script.tree))


def _order(tree: ast.Module, node: ast.AST, depth: int) -> str:
    """What makes the order differ; empty if nothing known does."""
    if depth > _DEEPEST:
        return ""
    if isinstance(node, ast.Set):
        return (
            ""
            if all(isinstance(one, ast.Constant) and isinstance(one.value, (int, float)) for one in node.elts)
            else "a set"
        )
    if isinstance(node, ast.SetComp):
        return "" if isinstance(node.elt, ast.Call) and key_of(node.elt.func) in {"int", "len"} else "a set"
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Sub, ast.BitAnd, ast.BitOr, ast.BitXor)):
        return _of_operation(tree, node, depth)
    if isinstance(node, ast.Call):
        return _of_call(tree, node, depth)
    key = key_of(node)
    found = [value for _, value in bindings(tree, key, node) if value is not None] if key else []
    if not found and isinstance(node, ast.Attribute):
        found = _attribute_values(tree, node.attr)
    orders = [_order(tree, value, depth + 1) for value in found]
    return (
        orders[-1] if orders and (all(orders) or "." not in key) and not _is_sorted_later(tree, key) else ""
    )


def _attribute_values(tree: ast.Module, name: str) -> list[ast.expr]:
    """All values assigned to `self.name` in the file, for `model.name`."""
    return [
        one.value
        for one in ast.walk(tree)
        if isinstance(one, ast.Assign)
        and any(isinstance(target, ast.Attribute) and target.attr == name for target in one.targets)
    ]


def _is_sorted_later(tree: ast.Module, key: str) -> bool:
    return any(
        isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr == "sort"
        and key_of(one.func.value) == key
        for one in ast.walk(tree)
    )


def _of_operation(tree: ast.Module, node: ast.BinOp, depth: int) -> str:
    sides = (node.left, node.right)
    if any(
        isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr in {"keys", "items"}
        for one in sides
    ):
        return "a set of keys"
    return next((order for one in sides if (order := _order(tree, one, depth + 1)) in _OF_SETS), "")


def _of_call(tree: ast.Module, node: ast.Call, depth: int) -> str:
    word = key_of(node.func).rpartition(".")[2] or getattr(node.func, "attr", "")
    if word in {"set", "frozenset"} and isinstance(node.func, ast.Name):
        return "a set" if not (node.args and _are_numbers(node.args[0])) else ""
    if word in _SET_METHODS and isinstance(node.func, ast.Attribute):
        return "a set" if _order(tree, node.func.value, depth + 1) else ""
    if word in _LISTINGS:
        return "a directory listing"
    if word == "copy" and isinstance(node.func, ast.Attribute):
        return _order(tree, node.func.value, depth + 1)
    return (
        _order(tree, node.args[-1 if word in {"map", "filter"} else 0], depth + 1)
        if word in _KEEPING and node.args
        else ""
    )


def _are_numbers(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return key_of(node.func) == "range"
    return isinstance(node, (ast.List, ast.Tuple)) and all(
        isinstance(one, ast.Constant) and isinstance(one.value, int) for one in node.elts
    )


_GIVEN = {word: takes for word in ("all_reduce", "all_gather", "broadcast", "reduce", "gather", "all_gather_into_tensor", "reduce_scatter_tensor")
          if (takes := ACTS[D + word].takes)}  # fmt: skip


_SIZED = frozenset(
    {"torch.zeros", "torch.ones", "torch.empty", "torch.rand", "torch.randn", "torch.full", "torch.arange"}
)


#: Methods that keep the length.
_KEEPS = frozenset({"contiguous", "float", "detach", "clone", "to", "cuda", "cpu", "half", "double"})


_ASK = frozenset({"torch.isfinite", "torch.isnan", "torch.where", "torch.nonzero"})


@rule("RW317", "error", "C5", "ranks pass tensors of different shapes to one collective")
def shape_differs_between_ranks(script: Script) -> Iterator[Found]:
    for place in collectives(script, *_GIVEN):
        if has_group(place.last) or len(place.calls) < 2:
            continue
        position, name = _GIVEN[word_of(place.last)]
        shapes = {call.rank: _shape(call.arg(position, name)) for call in place.calls}
        if None in shapes.values() or len(set(shapes.values())) < 2:
            continue
        node = place.last.arg_node(position, name) or place.last.node
        first, last = min(shapes), next(rank for rank in shapes if shapes[rank] != shapes[min(shapes)])
        yield Found(
            node,
            f"`{text_of(node)}` has size {_shown(shapes[first])} on rank {first} and {_shown(shapes[last])} on rank {last}: {word_of(place.last)} aborts, hangs or returns garbage",
            "pad to one size, or gather the sizes first and then tensors of the largest",
        )
    yield from _selected(script)


def _selected(script: Script) -> Iterator[Found]:
    """``x[x > 0.5]`` of each rank's own data, gathered as if all ranks had selected equally many."""
    for place in collectives(script, "all_gather", "all_gather_into_tensor"):
        call = place.last
        value, node = call.arg(1, "tensor", "input_tensor"), call.arg_node(1, "tensor", "input_tensor")
        if value is None or node is None or not value.spread or has_group(call):
            continue
        if "share" in value.origin:
            message = f"`{text_of(node)}` is every rank's share of something: the shares differ in length if it can't be divided evenly, and {word_of(call)} aborts, hangs or returns garbage"
            yield Found(node, message, _FIX, severity="warning")
            continue
        made = last_value(script.tree, node, call.node)
        while (
            isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr in _KEEPS
        ):
            made = last_value(script.tree, made.func.value, made)
        if _picks(script.tree, made):
            yield Found(
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
