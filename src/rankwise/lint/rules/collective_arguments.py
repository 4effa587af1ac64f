"""What a collective takes and returns."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.collective_calls import FILLED, collectives, filled_node, word_of
from rankwise.lint.analyses.job_view import once, places, text_of
from rankwise.lint.analyses.turns import is_caught
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.notes import NoneUse
from rankwise.lint.interpreter.values import Items, Object, is_number
from rankwise.lint.library.collective_table import ACTS
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.interpreter.calls import Call
    from rankwise.lint.interpreter.values import Value
    from rankwise.lint.script import Script

#: Parameters that a call may leave out.
_OPTIONAL = frozenset(
    [
        "op",
        "group",
        "async_op",
        "tag",
        "device",
        "device_ids",
        "timeout",
        "wait_all_ranks",
        "use_batch",
        "src",
        "dst",
        "group_src",
        "group_dst",
        "gather_list",
        "scatter_list",
        "object_gather_list",
        "scatter_object_input_list",
        "output_split_sizes",
        "input_split_sizes",
    ]
)
#: Those that must know the rank that gives or takes; for the others it is rank 0, or any.
_ROOTED = frozenset({"broadcast", "reduce", "send", "isend", "broadcast_object_list", "send_object_list"})
_TENSORS = frozenset({"tensor", "input_tensor", "output_tensor", "input", "output"})
_LISTS = frozenset(
    {
        "tensor_list",
        "gather_list",
        "scatter_list",
        "input_list",
        "output_tensor_list",
        "input_tensor_list",
        "object_list",
    }
)


@rule("RW308", "error", "C18", "the arguments of a collective do not fit its parameters")
def arguments_do_not_fit(script: Script) -> Iterator[Found]:
    for place in once(places(script, *(name for name, act in ACTS.items() if act.signature))):
        call = place.last
        names = ACTS[call.name].signature
        for fault in _faults(call, names) if isinstance(call.node, ast.Call) and not call.has_star else ():
            takes = f"{word_of(call)}({', '.join(name for name in names if name[:6] != 'group_')})"
            yield Found(fault[0], f"{fault[1]}: every rank fails here", fault[2] or f"its parameters are {takes}")
            break


def _faults(call: Call, names: tuple[str, ...]) -> Iterator[tuple[ast.AST, str, str]]:
    """Where arguments do not fit, why, and what to do beyond the look at the parameters."""
    word, num_given = word_of(call), len(getattr(call.node, "args", ()))
    if num_given > len(names) or not call.kwargs.keys() <= set(names):
        unknown = next((name for name in call.kwargs if name not in names), "")
        yield (
            call.node,
            f"{word} has no parameter `{unknown}`"
            if unknown
            else f"{word} gets {num_given} arguments, more than it has parameters",
            "",
        )
    if lacking := [name for name in names[num_given:] if name not in call.kwargs and name not in _OPTIONAL]:
        yield call.node, f"{word} gets no {' and no '.join(lacking)}", ""
    root = ACTS[call.name].root
    if word in _ROOTED and root is not None and call.arg(*root) is None and f"group_{root[1]}" not in call.kwargs:
        yield (
            call.node,
            f"{word} must be told the rank that {'gives' if root[1] == 'src' else 'takes'}: it gets no {root[1]}",
            f"pass {root[1]}=0",
        )
    for at, name in enumerate(names):
        value, node = call.arg(at, name), call.arg_node(at, name)
        if value is None or node is None:
            continue
        kind, shown = getattr(value.thing, "kind", ""), text_of(node)
        is_list, is_tensor = (
            isinstance(value.thing, Items) and value.thing.kind != "dict",
            kind == "torch.Tensor",
        )
        if name in _TENSORS and _is_no_tensor(value):
            yield (
                node,
                f"{word} takes a tensor, and `{shown}` is not one",
                f"pass a tensor that you keep: `value = torch.tensor({shown}, device=...)`, and read `value.item()` afterwards",
            )
        elif (name in _LISTS and (is_tensor or isinstance(value.const, (int, str)))) or (
            name in {"src", "dst"} and (is_tensor or is_list or isinstance(value.const, str))
        ):
            yield (
                node,
                f"{word} takes {'a list' if name in _LISTS else 'a rank'} as `{name}`, and `{shown}` is not one",
                "",
            )


def _is_no_tensor(value: Value) -> bool:
    """Whether it is surely a number, a text, or a list that was just written down."""
    is_display = isinstance(value.thing, Items) and (value.thing.is_whole or value.thing.keys is not None)
    return is_number(value) or isinstance(value.const, str) or is_display


#: Functions that fail with a None, or show it.
_FAIL_WITH_NONE = frozenset(
    {
        *(f"builtins.{name}" for name in "print float int len sum abs round list tuple min max".split()),  # noqa: SIM905
        "torch.stack",
        "torch.cat",
        "torch.mean",
        "torch.sum",
    }
)


@rule("RW319", "error", "", "what an in-place collective returns, a None, is used", needs_ranks=False)
def result_of_collective_is_none(script: Script) -> Iterator[Found]:
    reported: set[ast.AST] = set()
    for use in sorted(_uses(script), key=lambda use: (use.node.lineno, use.node.col_offset)):
        made = use.made.node
        if (
            use.module is script.module
            and use.made.module is script.module
            and made not in reported
            and not is_caught(script.tree, use.node)
        ):
            reported.add(made)
            act = ACTS[use.made.name]
            filled = text_of(use.made.arg_node(*act.fills[:2])) if act.fills is not None else ""
            name = text_of(getattr(made, "func", made))
            yield Found(
                use.node,
                f"`{name}` returns None{f' and its result is in `{filled}`' if filled else ''}, but `{text_of(use.node)}` uses the None",
                f"call `{text_of(made)}` on a line of its own{f' and continue with `{filled}`' if filled else ''}",
            )


def _uses(script: Script) -> Iterator[NoneUse]:
    yield from (note for note in script.notes if isinstance(note, NoneUse))
    for call in script.all_calls:
        if call.name in _FAIL_WITH_NONE and isinstance(call.node, ast.expr):
            for value in call.args:
                thing = value.thing
                if isinstance(thing, Object) and thing.kind == "None" and thing.call is not None:
                    yield NoneUse(call.node, call.module, thing.call)


@rule("RW320", "error", "", "the list to gather into is empty, or repeats one tensor")
def gather_list_of_one_tensor(script: Script) -> Iterator[Found]:
    for place in collectives(script, "all_gather", "gather", "all_gather_object"):
        call, word, node = place.last, word_of(place.last), filled_node(place.last)
        value = call.arg(*FILLED[word])
        if node is None or value is None:
            continue
        thing = value.thing
        # Ranks that do not receive may give an empty list to gather.
        if (
            word != "gather"
            and isinstance(thing, Items)
            and thing.kind == "list"
            and thing.is_whole
            and not thing.values
        ):
            new = (
                "[None] * world_size"
                if word == "all_gather_object"
                else "[torch.empty_like(x) for _ in range(world_size)]"
            )
            yield Found(
                node,
                f"`{text_of(node)}` is empty, but {word} needs a list with one entry for each rank: every rank fails",
                f"fill it first: `{new}`",
            )
        elif word != "all_gather_object" and (one := _repeated(value)) is not None and value.made is not None:
            yield Found(
                node,
                f"`{text_of(value.made.node)}` is one tensor repeated: after {word} every entry is the last rank's",
                f"create a tensor for each rank: `[{text_of(one)} for _ in range(world_size)]`",
            )


def _repeated(value: Value) -> ast.AST | None:
    """``torch.zeros(1)`` of ``[torch.zeros(1)] * n``, whose entries nothing has replaced since."""
    made, parts = value.made, value.thing.values if isinstance(value.thing, Items) else []
    if made is None or made.name != "operator.Mult" or len(parts) != 1 or any(one.const == 1 for one in made.args):
        return None
    # The collective has filled the new list, not the one that was repeated.
    lists = [one.thing.values for one in made.args if isinstance(one.thing, Items)]
    return next((part.made.node for values in lists for part in values if part.made is not None), None)
