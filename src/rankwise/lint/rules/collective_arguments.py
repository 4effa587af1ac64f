"""What a collective takes and returns."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.collective_calls import (
    FILLED,
    OBJECTS,
    backends,
    collectives,
    filled_node,
    has_group,
    list_text,
    word_of,
)
from rankwise.lint.analyses.job_view import INIT, backend_of, called_names, function_of, once, places, text_of
from rankwise.lint.analyses.scopes import scopes_of
from rankwise.lint.analyses.tensors import is_on_cpu
from rankwise.lint.analyses.turns import frames_of, is_made_anyway
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.values import Items, Object, is_number
from rankwise.lint.library.collective_table import ACTS
from rankwise.lint.library.constructor_table import TENSOR
from rankwise.lint.paths.phrases import reported_place
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.job_view import Place
    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Script


#: Those that need the rank that gives or takes.
_ROOTED = frozenset({"broadcast", "reduce", "send", "isend"})
_TENSORS = frozenset({"tensor", "input_tensor", "output_tensor", "input", "output"})
_LISTS = frozenset(
    {"tensor_list", "scatter_list", "gather_list", "input_list", "output_tensor_list", "input_tensor_list"}
)
#: A function that asks this may have made another value of a number.
_ASKS = frozenset({"isinstance", "is_tensor", "hasattr", "type"})


@rule("RW308", "error", "C18", "the arguments of a collective do not fit its parameters")
def arguments_do_not_fit(script: Script) -> Iterator[Found]:
    for place in once(places(script, *(name for name, act in ACTS.items() if act.signature))):
        call = place.last
        fault = _misfit(script, call) if isinstance(call.node, ast.Call) and not call.has_star else None
        if fault is not None and is_made_anyway(call) and (fault[0] is call.node or not _is_asked(call)):
            at, why, fix = fault
            names = ", ".join(name for name in ACTS[call.name].signature if not name.startswith("group_"))
            yield Found(
                at, f"{word_of(call)} {why}: it raises when the run comes here", fix or f"{word_of(call)}({names})"
            )


def _misfit(script: Script, call: Call) -> tuple[ast.AST, str, str] | None:
    """Where arguments do not fit, why, and what to do beyond a look at the parameters."""
    names, needed, root = ACTS[call.name].signature, [*ACTS[call.name].needed], ACTS[call.name].root
    if word_of(call) in _ROOTED and root is not None and f"group_{root[1]}" not in call.kwargs:
        needed.append(root[1])
    lacking = [name for name in needed if call.arg(names.index(name), name) is None]
    unknown = sorted(call.kwargs.keys() - set(names))
    if unknown or lacking:
        return call.node, f"has no parameter `{unknown[0]}`" if unknown else f"gets no {' and no '.join(lacking)}", ""
    for at, name in enumerate(names):
        value, node = call.arg(at, name), call.arg_node(at, name)
        if value is None or node is None:
            continue
        if name in _TENSORS and (_is_plain(script, node, value) or list_text(script, node) is not None):
            fix = f"put it into a tensor, `value = torch.tensor({text_of(node)}, device=...)`, and read that afterwards"
            return node, f"takes a tensor, and `{text_of(node)}` is none", fix
        if name in _LISTS and isinstance(value.thing, Object) and value.thing.kind == TENSOR:
            return node, f"takes a list of tensors as {name}, and `{text_of(node)}` is a tensor", ""
    return None


def _is_plain(script: Script, node: ast.AST, value: Value) -> bool:
    """Whether a value is a number, a text or a tuple; what it began with tells this only where nothing else may have set it."""
    if isinstance(value.thing, Items):
        return value.thing.kind == "tuple" and (value.made is None or value.made.name != "either")
    if not value.is_known or isinstance(node, (ast.Constant, ast.Call)):
        return is_number(value) or isinstance(value.const, str)
    scopes = scopes_of(script.tree)
    only = scopes.only(node.id, scopes.scope(node)) if isinstance(node, ast.Name) else None
    is_set_once = only is not None and isinstance(scopes.parents.get(only), ast.Assign)
    return is_set_once and isinstance(value.const, (int, float, str))


def _is_asked(call: Call) -> bool:
    """Whether a function on the way asks what kind of value it has."""
    return any(not _ASKS.isdisjoint(called_names(function_of(module.tree, node))) for module, node in frames_of(call))


@rule("RW320", "error", "", "the list to gather into is empty, or repeats one tensor")
def gather_list_of_one_tensor(script: Script) -> Iterator[Found]:
    for place in collectives(script, "all_gather", "gather", "all_gather_object"):
        call, word, node = place.last, word_of(place.last), filled_node(place.last)
        value = call.arg(*FILLED[word])
        if node is None or value is None:
            continue
        if word != "gather" and _is_empty(script, node) and is_made_anyway(call):
            each = (
                "[None] * world_size"
                if word == "all_gather_object"
                else "[torch.empty_like(x) for _ in range(world_size)]"
            )
            yield Found(
                node,
                f"`{text_of(node)}` is empty, but {word} fills a list with an entry for each rank: every rank fails here",
                f"fill it first: `{each}`",
            )
        elif word != "all_gather_object" and (one := _repeated(value)) is not None and value.made is not None:
            yield Found(
                node,
                f"`{text_of(value.made.node)}` is one tensor repeated: after {word} every entry is the last rank's",
                f"create a tensor for each rank: `[{text_of(one)} for _ in range(world_size)]`",
            )


def _is_empty(script: Script, node: ast.AST) -> bool:
    """Whether it is a new list with nothing in it: it stands in the call, or its name is read there first."""
    text, scopes = list_text(script, node), scopes_of(script.tree)
    if not isinstance(text, ast.List) or text.elts:
        return False
    if not isinstance(node, ast.Name):
        return text is node
    owner = scopes.owner(node.id, scopes.scope(node))
    reads = [one for one, at in scopes.loads if one.id == node.id and scopes.owner(one.id, at) is owner]
    return owner is scopes.scope(node) and min(reads, key=lambda one: (one.lineno, one.col_offset)) is node


def _repeated(value: Value) -> ast.AST | None:
    """``torch.zeros(1)`` of ``[torch.zeros(1)] * n``, whose entries nothing has replaced since."""
    made, parts = value.made, value.thing.values if isinstance(value.thing, Items) else []
    if made is None or made.name != "operator.Mult" or len(parts) != 1 or any(one.const == 1 for one in made.args):
        return None
    # The collective has filled the new list, not the one that was repeated.
    lists = [one.thing.values for one in made.args if isinstance(one.thing, Items)]
    return next((part.made.node for values in lists for part in values if part.made is not None), None)


_DEFAULTS = frozenset({"torch.set_default_device", "torch.set_default_tensor_type"})


@rule("RW307", "error", "C17", "a CPU tensor is passed to NCCL")
def cpu_tensor_on_nccl(script: Script) -> Iterator[Found]:
    if any(call.name in _DEFAULTS for call in script.all_calls):
        return
    found: dict[tuple[int, str], list[Call]] = {}
    for one_place in collectives(script, *(set(FILLED) - OBJECTS), "send", "isend"):
        call = one_place.last
        act = ACTS[call.name]
        at = [one[:2] for one in (act.takes, act.fills) if one is not None]
        lying = [one for one in at if (value := call.arg(*one)) is not None and is_on_cpu(value)]
        if (
            lying
            and not has_group(call)
            and "device" not in call.contexts
            and _backends_at(script, one_place) == {"nccl"}
        ):
            key = (id(function_of(script.tree, call.node)), text_of(call.arg_node(*lying[0])))
            found.setdefault(key, []).append(call)
    for (_, shown), (call, *others) in found.items():
        yield Found(
            call.node,
            f"`{shown}` is on the CPU and {word_of(call)} uses NCCL, which moves data between GPUs only: every rank fails here",
            f'create it on this rank\'s GPU, `device="cuda"`, pass `{shown}.cuda()`, or start the group with "cpu:gloo,cuda:nccl"',
            also=[reported_place(f"{word_of(one)} gets it, too", one.node, one.module) for one in others],
        )


def _backends_at(script: Script, place: Place) -> set[str | None]:
    """The backends of the groups that the rank which makes a call has then; none if it makes them later only."""
    own = (history for history in place.entry.histories if history.rank == place.last.rank)
    made = [call for history in own for call in history.calls if call.name == INIT]
    return {backend_of(one) for one in made if one.index < place.last.index} if made else backends(script)
