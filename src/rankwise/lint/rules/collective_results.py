"""What a collective writes, and what becomes of the gradient."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.collective_calls import FILLED, ROOTED, D, collectives, filled_node, root_rank, word_of
from rankwise.lint.analyses.job_view import function_of, text_of
from rankwise.lint.analyses.scopes import scopes_of
from rankwise.lint.analyses.summing import divides, is_sum
from rankwise.lint.analyses.tensor_text import VIEWS, is_in, key_of, mention, root_of
from rankwise.lint.analyses.tensors import backward_passes, learns, sources_of
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.values import Items, Method, is_number
from rankwise.lint.library.constructor_table import DRAWN, FACTORIES, OF_VALUES, RETURNS_SELF
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.job_view import Place
    from rankwise.lint.analyses.scopes import Scopes
    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Script


@rule("RW301", "error", "C15", "a collective writes into a tensor that nothing keeps")
def collective_on_temporary(script: Script) -> Iterator[Found]:
    for place in collectives(script):
        call = place.last
        node = filled_node(call)
        shown_at = _where_shown(scopes_of(script.tree), call)
        if node is not None and shown_at is not None:
            message = f"{word_of(call)} returns None, and that is what is shown or written here: the result is in `{text_of(node)}`"
            yield Found(shown_at, message, f"call `{word_of(call)}` in a line of its own, and use `{text_of(node)}`")
        if node is None or _is_needless(place) or "_coalescing_manager" in call.contexts:
            continue
        value = call.arg(*FILLED[word_of(call)])
        is_given = isinstance(getattr(value, "thing", None), Items) and word_of(call) in {"gather", "scatter"}
        if value is None or is_given or not _is_temporary(value, node):
            continue
        shown = text_of(node)
        yield Found(
            node,
            f"{word_of(call)} writes its result into `{shown}`, which is created here and not kept, so the result is lost on every rank",
            f"give it a name first: `result = {shown}`, then `{word_of(call)}(result, ...)`, and continue with `result`",
        )


#: What shows or writes whatever it is given, and what may stand between.
_SHOWS = frozenset({"print", "str", "format", "log", "debug", "info", "warning", "error", "dump", "dumps", "write"})
_AROUND = (ast.Dict, ast.List, ast.Tuple, ast.keyword)


def _where_shown(scopes: Scopes, call: Call) -> ast.AST | None:
    """Where the None that a collective returned is printed, logged or written, if nothing asks what it is."""
    if not call.result.is_known or call.result.const is not None or call.node not in scopes.parents:
        return None
    parent, scope, reads = scopes.parents[call.node], scopes.scope(call.node), [call.node]
    if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name):
        name = parent.targets[0].id
        if len(scopes.bindings(name, scope)) != 1:
            return None
        owner = scopes.owner(name, scope)
        reads = [node for node, at in scopes.loads if node.id == name and scopes.owner(name, at) is owner]
    if any(isinstance(scopes.parents[one], (ast.Compare, ast.If, ast.IfExp, ast.BoolOp)) for one in reads):
        return None
    return next((one for one in reads if _is_shown(scopes, one)), None)


def _is_shown(scopes: Scopes, node: ast.AST) -> bool:
    above = scopes.parents[node]
    while isinstance(above, _AROUND):
        above = scopes.parents[above]
    if isinstance(above, ast.Call):
        return getattr(above.func, "attr", getattr(above.func, "id", "")) in _SHOWS
    return isinstance(above, ast.FormattedValue)


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


def _is_temporary(value: Value, node: ast.AST) -> bool:
    """Whether what is written to was made in the argument itself, and holds something: no view of what others hold."""
    made = value.made
    if isinstance(value.thing, Items):
        inside, is_new = set(ast.walk(node)), isinstance(node, (ast.List, ast.ListComp, ast.BinOp))
        parts = value.thing.values
        return (
            bool(parts)
            and is_new
            and all(one.const is None or (one.made is not None and one.made.node in inside) for one in parts)
        )
    if made is None or made.node is not node or is_number(value):
        return False
    word = made.name.rpartition(".")[2]
    is_copy = word == "contiguous" and getattr(made.receiver.made, "name", "").rpartition(".")[2] in _STRIDED
    if (word in VIEWS and not is_copy) or word.endswith("_") or made.name == "operator.Subscript":
        is_picked = isinstance(getattr(node, "slice", None), (ast.Compare, ast.List))
        owner = made.args[0] if word == "Subscript" else made.receiver
        return is_picked or _is_temporary(owner, getattr(getattr(node, "func", node), "value", node))
    is_computed = any(
        one.made is not None and one.made.name.startswith(("torch.", "operator.", "?.clone"))
        for one in sources_of(value, cuts=False)
    )
    return is_computed and not _is_blank(value, node)


def _is_blank(value: Value, node: ast.AST) -> bool:
    """`torch.zeros(1).cuda()`, all in the argument: a warm-up, or a barrier."""
    made = value.made
    if made is None or made.node not in ast.walk(node):
        return False
    if made.name.rpartition(".")[2] in RETURNS_SELF:
        return _is_blank(made.receiver, node)
    is_of_values = made.name in OF_VALUES and not isinstance(made.arg_node(0), ast.Constant)
    return made.name in FACTORIES | DRAWN and not is_of_values


#: What a tensor is not contiguous after: then `contiguous()` copies, and else it returns the tensor itself.
_STRIDED = frozenset({"t", "T", "mT", "transpose", "permute", "swapaxes", "movedim", "expand"})
_REDUCING = frozenset({D + "all_reduce", D + "reduce", D + "broadcast"})


@rule("RW303", "error", "C13", "a loss is reduced in place before the backward pass")
def reduced_loss_goes_backward(script: Script) -> Iterator[Found]:
    for back, call in _behind(script, _REDUCING):
        if call.module is script.module and learns(call.arg(0, "tensor")):
            shown = text_of(filled_node(call))
            yield Found(
                call.node,
                f"`{shown}` is reduced in place before its backward pass; {word_of(call)} is not part of the graph, so the gradients are wrong",
                f"call `{shown}.backward()` first, and reduce `{shown}.detach().clone()` for the log",
                also=mention(script, "the backward pass", back.node),
            )


def _behind(script: Script, names: frozenset[str]) -> Iterator[tuple[Call, Call]]:
    """Backward passes, each with a collective of one of these names whose result its loss was computed from."""
    for entry in script.entries:
        for back, loss in backward_passes(entry.histories[0].calls):
            for made in (one.made for one in sources_of(loss)):
                if made is not None and made.name in names:
                    yield back, made


@rule("RW304", "error", "C13", "parameters are summed over the ranks in place")
def parameter_reduced_in_place(script: Script) -> Iterator[Found]:
    for place in collectives(script, "all_reduce"):
        call, node = place.last, filled_node(place.last)
        shown, value = root_of(node), call.arg(0, "tensor")
        if shown is None or value is None or not is_sum(call) or not _is_parameter(value):
            continue
        if divides(script, function_of(script.tree, call.node), besides="grad"):
            continue
        yield Found(
            call.node,
            f"all_reduce sums the parameter `{text_of(node)}` over all ranks in place, so weights grow with the number of ranks",
            f"reduce the gradient, `{text_of(shown)}.grad`, and divide it by the world size, or wrap the model in DistributedDataParallel",
        )


def _is_parameter(value: Value) -> bool:
    while isinstance(value.thing, Method) and value.thing.name == "data":
        value = value.thing.receiver
    return getattr(value.thing, "kind", "") in {"parameter", "torch.nn.Parameter"}


_RETURNING = frozenset({"accelerate.Accelerator.gather", "accelerate.utils.gather"})
_GATHERING = frozenset({D + "all_gather", D + "all_gather_into_tensor", D + "_all_gather_base", *_RETURNING})


@rule("RW305", "error", "C14", "the loss uses gathered features that carry no gradient")
def gathered_features_without_gradient(script: Script) -> Iterator[Found]:
    for back, call in _behind(script, _GATHERING):
        at = 0 if call.name in _RETURNING else 1
        given, node = call.arg(at, "tensor", "input_tensor"), call.arg_node(at, "tensor", "input_tensor")
        place = call.node if call.module is script.module else back.node
        if not learns(given) or _is_autograd(call) or _is_put_back(call) or not is_in(script.tree, place):
            continue
        shown = text_of(node)
        name = key_of(root_of(filled_node(call))) if call.name.endswith("all_gather") else ""
        put_back = (
            f"put this rank's part back, `{name}[dist.get_rank()] = {shown}`, or use torch.distributed.nn.all_gather"
        )
        yield Found(
            place,
            f"the loss uses what {word_of(call)} gathered from `{shown}`, which carries no gradient, not even for this rank's part",
            put_back if name else f"use `torch.distributed.nn.all_gather({shown})`, which has a backward pass",
            also=mention(script, "the backward pass", back.node),
        )


def _is_put_back(call: Call) -> bool:
    """`parts[rank] = z`: the list holds more than what was gathered."""
    parts = call.args[0].thing if call.args else None
    return isinstance(parts, Items) and any(one.made is not call for one in parts.values)


def _is_autograd(call: Call) -> bool:
    owner = getattr(call.function, "owner", None)
    return owner is not None and any("Function" in name for name in owner.library_bases)
