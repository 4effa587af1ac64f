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
from rankwise.lint.analyses.job_view import INIT, backend_of, function_of, text_of
from rankwise.lint.analyses.scopes import scopes_of
from rankwise.lint.analyses.tensors import is_on_cpu
from rankwise.lint.analyses.turns import is_made_anyway
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.values import Items
from rankwise.lint.library.collective_table import ACTS
from rankwise.lint.paths.words import reported_place
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.job_view import Place
    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Script


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
            and (_own_backends(one_place) or backends(script)) == {"nccl"}
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


def _own_backends(place: Place) -> set[str | None]:
    """The backends of the groups that the rank which makes a call has made."""
    own = (history for history in place.entry.histories if history.rank == place.last.rank)
    return {backend_of(one) for history in own for one in history.calls if one.name == INIT}
