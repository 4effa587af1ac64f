"""What a collective writes, and what becomes of the gradient."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import Found
from rankwise.lint.rule import rule
from rankwise.lint.topics.collective_calls import (
    OBJECTS,
    ROOTED,
    D,
    collectives,
    filled_node,
    root_rank,
    word_of,
)
from rankwise.lint.topics.job_view import function_of, places, text_of
from rankwise.lint.topics.summing import divides, is_sum
from rankwise.lint.topics.tensor_text import (
    VIEWS,
    backward_of,
    bindings,
    is_in,
    is_made_up,
    key_of,
    last_value,
    mention,
    model_calls,
    root_of,
    targets_of,
    touches_model,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.model.calls import Call
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


@rule("RW301", "error", "C15", "a collective writes into a tensor that nothing keeps")
def collective_on_temporary(script: Script) -> Iterator[Found]:
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
        yield Found(
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


_OFF = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})


@rule("RW303", "error", "C13", "a loss is reduced in place before the backward pass")
def reduced_loss_goes_backward(script: Script) -> Iterator[Found]:
    models = model_calls(script.all_calls)
    for place in collectives(script, "all_reduce", "reduce", "broadcast"):
        node = filled_node(place.last)
        key = key_of(node)
        if not key or node is None or is_made_up(script.tree, node, place.last.node):
            continue
        for call in _as_called(script, place.last):
            if _OFF & set(call.contexts):
                continue
            value = call.arg(0, "tensor")
            if not (value is not None and value.via) and not touches_model(script.tree, node, models):
                continue
            back = backward_of(call.module, call.node, key, call.stack)
            if back is None:
                continue
            yield Found(
                call.node,
                f"`{key}` is reduced in place before its backward pass; {word_of(call)} is not part of the graph, so the gradients are wrong",
                f"call `{key}.backward()` first, and reduce `{key}.detach().clone()` for the log",
                also=mention(script, "the backward pass", back),
            )
            break


def _as_called(script: Script, call: Call) -> list[Call]:
    """The call as each of its callers makes it: a helper may be right for a metric and wrong for a loss."""
    found = [one for place in places(script, call.name) for one in place.calls if one.node is call.node]
    others = [
        one
        for entry in script.entries
        for history in entry.histories[:1]
        for one in history.calls
        if one.node is call.node
    ]
    return [*found, *others]


@rule("RW304", "error", "C13", "parameters are summed over the ranks in place")
def parameter_reduced_in_place(script: Script) -> Iterator[Found]:
    for place in collectives(script, "all_reduce"):
        call, node = place.last, filled_node(place.last)
        shown = root_of(node)
        if shown is None or not is_sum(call) or not _is_parameter(script.tree, shown, call.node):
            continue
        if divides(script, function_of(script.tree, call.node), besides="grad"):
            continue
        yield Found(
            call.node,
            f"all_reduce sums the parameter `{text_of(node)}` over all ranks in place, so weights grow with the number of ranks",
            f"reduce the gradient, `{text_of(shown)}.grad`, and divide it by the world size, or wrap the model in DistributedDataParallel",
        )


def _is_parameter(tree: ast.Module, node: ast.AST, at: ast.AST) -> bool:
    key = key_of(node)
    if not key:
        return False
    for statement, value in bindings(tree, key, at)[-1:]:
        if isinstance(statement, ast.For) and value is None:
            words = {
                key_of(one.func).rpartition(".")[2]
                for one in ast.walk(statement.iter)
                if isinstance(one, ast.Call)
            }
            return bool(words & {"parameters", "named_parameters"})
        if isinstance(value, ast.Call):
            return key_of(value.func).rpartition(".")[2] == "Parameter"
    return False


_FILLING = frozenset({D + "all_gather", D + "all_gather_into_tensor", D + "_all_gather_base"})
_RETURNING = frozenset({"accelerate.Accelerator.gather", "accelerate.utils.gather"})


@rule("RW305", "error", "C14", "the loss uses gathered features that carry no gradient")
def gathered_features_without_gradient(script: Script) -> Iterator[Found]:
    models = model_calls(script.all_calls)
    seen: set[int] = set()
    for call in _calls(script):
        if id(call.node) in seen or _OFF & set(call.contexts) or _is_autograd(call) or _is_of_numbers(call):
            continue
        given = call.arg_node(0 if call.name in _RETURNING else 1, "tensor", "input_tensor")
        value = call.arg(0 if call.name in _RETURNING else 1, "tensor", "input_tensor")
        if given is None or is_made_up(call.module.tree, given, call.node):
            continue
        if not ((value is not None and value.via) or touches_model(call.module.tree, given, models)):
            continue
        back = _back(call)
        if back is None:
            continue
        node = call.node if call.module is script.module else back
        if not is_in(script.tree, node):
            continue
        seen.add(id(call.node))
        shown = ast.unparse(given)
        yield Found(
            node,
            f"the loss uses what {word_of(call)} gathered from `{shown}`, which carries no gradient, not even for this rank's part",
            _fix(call, shown),
            also=mention(script, "the backward pass", back),
        )


def _calls(script: Script) -> Iterator[Call]:
    for entry in script.entries:
        for history in entry.histories[:1]:
            yield from (call for call in history.calls if call.name in _FILLING | _RETURNING)


def _is_of_numbers(call: Call) -> bool:
    """Whether a function that averages statistics gathers them: a weight in the loss needs no gradient."""
    name = getattr(getattr(call.function, "node", None), "name", "").lower()
    return any(word in name for word in ("average", "sum", "stat", "metric", "count"))


def _is_autograd(call: Call) -> bool:
    owner = getattr(call.function, "owner", None)
    return owner is not None and any("Function" in name for name in owner.library_bases())


def _back(call: Call) -> ast.Call | None:
    if call.name in _RETURNING:
        return backward_of(call.module, call.node, "", call.stack)
    key = key_of(root_of(_filled(call)))
    return backward_of(call.module, call.node, key, call.stack, stops=_puts_back) if key else None


def _filled(call: Call) -> ast.AST | None:
    if call.name.endswith("_all_gather_base"):
        return call.arg_node(0, "output_tensor")
    return filled_node(call)


def _puts_back(statement: ast.AST, key: str) -> bool:
    """`parts[rank] = z`, or a new list with this rank's part in it."""
    return any(
        isinstance(one, ast.Subscript) and key_of(root_of(one)) == key for one in targets_of(statement)
    ) or (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, (ast.List, ast.BinOp))
        and any(key_of(one) == key for one in statement.targets)
    )


def _fix(call: Call, shown: str) -> str:
    if call.name in _FILLING and call.name.endswith("all_gather"):
        name = key_of(root_of(_filled(call)))
        return f"put this rank's part back, `{name}[dist.get_rank()] = {shown}`, or use torch.distributed.nn.all_gather"
    return f"use `torch.distributed.nn.all_gather({shown})`, which has a backward pass"
