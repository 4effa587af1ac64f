"""What a collective takes and returns."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import Found
from rankwise.lint.library.acts import ACTS
from rankwise.lint.library.names import canonical
from rankwise.lint.model.notes import NoneUse
from rankwise.lint.model.values import Items, Object
from rankwise.lint.rule import rule
from rankwise.lint.topics.collective_calls import collectives, word_of
from rankwise.lint.topics.job_view import text_of
from rankwise.lint.topics.scopes import Scopes, scopes_of
from rankwise.lint.topics.tensor_places import is_number
from rankwise.lint.topics.tensor_text import bindings, key_of, last_value
from rankwise.lint.topics.turns import is_caught

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script


_TAKES = {"all_reduce": (0, "tensor"), "broadcast": (0, "tensor"), "reduce": (0, "tensor"), "all_gather": (1, "tensor"), "gather": (0, "tensor"),
          "scatter": (0, "tensor"), "send": (0, "tensor"), "recv": (0, "tensor"), "isend": (0, "tensor"), "irecv": (0, "tensor"),
          "all_gather_into_tensor": (1, "input_tensor"), "reduce_scatter_tensor": (1, "input")}  # fmt: skip


@rule("RW308", "error", "C18", "a number is passed where a collective takes a tensor")
def number_given_to_collective(script: Script) -> Iterator[Found]:
    for place in collectives(script, *_TAKES):
        call = place.last
        position, name = _TAKES[word_of(call)]
        node = call.arg_node(position, name)
        if (
            node is None
            or isinstance(node, ast.Starred)
            or not (_is_no_tensor(script.tree, node) or _is_known_list(call.arg(position, name)))
        ):
            continue
        shown = text_of(node)
        yield Found(
            node,
            f"{word_of(call)} takes a tensor, and `{shown}` is not one: every rank fails with a TypeError",
            f"pass a tensor that you keep: `value = torch.tensor({shown}, device=...)`, and read `value.item()` afterwards",
        )


def _is_no_tensor(tree: ast.Module, node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return node.value is not None
    if isinstance(node, (ast.List, ast.Tuple, ast.ListComp, ast.Dict, ast.JoinedStr)):
        return True
    if is_number(tree, node, node):
        return True
    value = last_value(tree, node, node)
    return (
        value is not node
        and isinstance(value, (ast.List, ast.Tuple, ast.ListComp, ast.Dict))
        and not _is_changed(tree, node)
    )


def _is_known_list(value: Value | None) -> bool:
    thing = value.thing if value is not None else None
    return isinstance(thing, Items) and thing.is_whole and bool(thing.values) and thing.kind != "dict"


def _is_changed(tree: ast.Module, node: ast.AST) -> bool:
    return len(bindings(tree, key_of(node), node)) > 1


#: Functions that fail with a None, or show it.
_TAKES_RW319 = frozenset({*(f"builtins.{name}" for name in "print float int len sum abs round list tuple min max".split()),  # noqa: SIM905
                    "torch.stack", "torch.cat", "torch.mean", "torch.sum"})  # fmt: skip


@rule("RW319", "error", "", "the return value of an in-place collective is used, but it is None", needs_ranks=False)  # fmt: skip
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
        if call.name in _TAKES_RW319 and isinstance(call.node, ast.expr):
            for value in call.args:
                thing = value.thing
                if isinstance(thing, Object) and thing.kind == "None" and thing.call is not None:
                    yield NoneUse(call.node, call.module, thing.call)


_D = "torch.distributed."


_LISTS = {
    "all_gather": (0, "tensor_list"),
    "gather": (1, "gather_list"),
    "all_gather_object": (0, "object_list"),
}


_MAKES = frozenset({"zeros", "empty", "ones", "zeros_like", "empty_like", "ones_like", "tensor", "rand", "randn", "full",
                    "full_like", "rand_like", "randn_like", "clone", "new_zeros", "new_empty", "new_ones", "new_full"})  # fmt: skip


_FILLS = frozenset({"append", "extend", "insert"})


@rule("RW320", "error", "", "the list to gather into is empty, or repeats one tensor", needs_ranks=False)
def gather_list_of_one_tensor(script: Script) -> Iterator[Found]:
    if "gather" not in script.piece.code:
        return
    scopes = scopes_of(script.tree)
    for call in scopes.all(ast.Call):
        full = canonical(scopes.dotted(call.func))
        word = full.removeprefix(_D)
        if full == _D + word and word in _LISTS:
            node = _list_of(call, *_LISTS[word])
            made = _made(scopes, node, call) if node is not None else None
            if made is not None and node is not None:
                yield from _judged(word, node, made)


def _judged(word: str, node: ast.expr, made: ast.expr) -> Iterator[Found]:
    shown = ast.unparse(node)
    if _is_empty(made) and word != "gather":  # ranks that do not receive may give an empty list to gather
        new = (
            "[None] * world_size"
            if word.endswith("object")
            else "[torch.empty_like(x) for _ in range(world_size)]"
        )
        yield Found(
            node,
            f"`{shown}` is empty, but {word} needs a list with one entry for each rank: every rank fails",
            f"fill it first: `{new}`",
        )
        return
    inside = _repeated(made)
    if inside is not None and word != "all_gather_object" and _is_tensor(inside):
        text = ast.unparse(inside)
        yield Found(
            node,
            f"`{ast.unparse(made)}` is one tensor repeated: after {word} every entry is the last rank's",
            f"create a tensor for each rank: `[{text} for _ in range(world_size)]`",
        )


def _list_of(call: ast.Call, position: int, name: str) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if any(isinstance(one, ast.Starred) for one in call.args) or position >= len(call.args):
        return None
    return call.args[position]


def _made(scopes: Scopes, node: ast.expr, call: ast.Call) -> ast.expr | None:
    """The expression that created a list, if nothing has changed it before the call."""
    if not isinstance(node, ast.Name):
        return node
    made = scopes.value(node.id, scopes.scope(node))
    return None if made is None or _is_changed_rw320(scopes, node, call) else made


def _is_changed_rw320(scopes: Scopes, node: ast.Name, call: ast.Call) -> bool:
    owner = scopes.owner(node.id, scopes.scope(node))
    for load, scope in scopes.loads:
        if load.id != node.id or load is node or scopes.owner(load.id, scope) is not owner:
            continue
        parent = scopes.parents.get(load)
        if isinstance(parent, ast.Attribute) and parent.attr in _FILLS:
            return True
        if isinstance(parent, ast.Subscript) and not isinstance(parent.ctx, ast.Load):
            return True
        if (
            not isinstance(parent, (ast.Attribute, ast.Subscript))
            and load.lineno < call.lineno
            and not _only_read(parent)
        ):
            return True
    return False


def _only_read(parent: ast.AST | None) -> bool:
    return (
        isinstance(parent, ast.Call)
        and isinstance(parent.func, ast.Name)
        and parent.func.id in {"print", "len"}
    )


def _is_empty(made: ast.expr) -> bool:
    if isinstance(made, ast.List):
        return not made.elts
    return (
        isinstance(made, ast.Call)
        and isinstance(made.func, ast.Name)
        and made.func.id == "list"
        and not made.args
    )


def _repeated(made: ast.expr) -> ast.expr | None:
    """``x`` of ``[x] * n`` and ``n * [x]``."""
    if not (isinstance(made, ast.BinOp) and isinstance(made.op, ast.Mult)):
        return None
    for one, times in ((made.left, made.right), (made.right, made.left)):
        if isinstance(one, ast.List) and len(one.elts) == 1:
            is_once = isinstance(times, ast.Constant) and times.value == 1
            return None if is_once else one.elts[0]
    return None


def _is_tensor(node: ast.expr) -> bool:
    """Whether an expression surely makes a tensor: ``torch.zeros(1).cuda()``."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in _MAKES:
            return True
        node = node.func.value
    return False
