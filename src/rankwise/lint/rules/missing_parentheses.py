"""A function is named where it should be called."""

from __future__ import annotations

import ast
import re
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from rankwise.lint.finding import Edit, Found, Span, span_of
from rankwise.lint.library.names import canonical
from rankwise.lint.rule import rule
from rankwise.lint.topics.scopes import Scopes, is_function, scopes_of
from rankwise.lint.topics.turns import is_caught

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.script import Script


_REAL = frozenset({"__main__", "__mp_main__", "__builtin__", "builtins"})


@rule("RW807", "error", "", "a misspelt test for `__main__` is never true: the script does nothing", needs_ranks=False, fixable=True)  # fmt: skip
def main_guard_misspelt(script: Script) -> Iterator[Found]:
    if "__name__" not in script.piece.code and "main" not in script.piece.code:
        return
    scopes = scopes_of(script.tree)
    for node in scopes.all(ast.Compare):
        if len(node.ops) == 1 and isinstance(node.ops[0], (ast.Eq, ast.Is)):
            yield from _compared(script, scopes, node)
    for statement in scopes.all(ast.Assign):
        target = statement.targets[0]
        if isinstance(target, ast.Name) and target.id == "__name__" and _text(statement.value) == "__main__":
            yield Found(
                statement,
                '`__name__ = "__main__"` assigns instead of testing: what follows also runs when the file is imported',
                'write `if __name__ == "__main__":` and indent what follows',
                severity="warning",
            )


def _compared(script: Script, scopes: Scopes, node: ast.Compare) -> Iterator[Found]:
    left, right = node.left, node.comparators[0]
    if isinstance(left, ast.Constant) and isinstance(right, ast.Name):
        left, right = right, left
    if isinstance(left, ast.Name) and left.id == "__name__" and _is_slip(_text(right)):
        what = f'`__name__` is never "{_text(right)}", so the code under this test never runs'
    elif {_text(left), _text(right)} == {"__name__", "__main__"}:
        what = "two strings are compared that are never equal: `__name__` must not be quoted"
    elif lost := _lost_name(scopes, left, right):
        what = f"`{lost}` is not defined (NameError)"
    else:
        return
    yield Found(
        node,
        what,
        'write `if __name__ == "__main__":`',
        edits=[Edit(span=span_of(node, script.lines), text='__name__ == "__main__"')],
    )


def _lost_name(scopes: Scopes, left: ast.expr, right: ast.expr) -> str:
    """A misspelt ``__name__``, or "__main__" without quotes; empty if the file has such a name."""
    if scopes.has_star_import or not isinstance(left, ast.Name):
        return ""
    if left.id == "__name__":
        is_lost = isinstance(right, ast.Name) and right.id == "__main__" and _is_unknown(scopes, right)
        return "__main__" if is_lost else ""
    is_pair = {left.id.strip("_"), _text(right).strip("_")} == {"name", "main"}
    return left.id if is_pair and _is_unknown(scopes, left) else ""


def _is_unknown(scopes: Scopes, name: ast.Name) -> bool:
    return scopes.owner(name.id, scopes.scope(name)) is None


def _is_slip(value: str) -> bool:
    if value in _REAL or "." in value:
        return False
    word = value.strip("_ ").lower()
    return word in ("main", "name") or (
        value[:1] == "_" and SequenceMatcher(None, word, "main").ratio() >= 0.75
    )


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


_FUNCTIONS = frozenset(
    {
        "torch.distributed.barrier",
        "torch.distributed.destroy_process_group",
        "torch.distributed.init_process_group",
        "torch.cuda.synchronize",
        "torch.cuda.empty_cache",
        "torch.cuda.reset_peak_memory_stats",
        "torch.accelerator.synchronize",
        "gc.collect",
    }
)


_CONTEXTS = frozenset({"torch.no_grad", "torch.enable_grad", "torch.inference_mode", "torch.random.fork_rng"})


_METHODS = frozenset(
    [
        "backward",
        "zero_grad",
        "step",
        "train",
        "eval",
        "set_epoch",
        "wait_for_everyone",
        "destroy_process_group",
        "barrier",
        "synchronize",
    ]
)


_STEPS = re.compile(r"opt|sched|scaler|sgd|adam")


_NEEDS_ARGUMENTS = frozenset({"set_epoch", "init_process_group"})


@rule("RW809", "error", "", "a function is named on a line of its own but not called", needs_ranks=False, fixable=True)  # fmt: skip
def call_without_parentheses(script: Script) -> Iterator[Found]:
    scopes = scopes_of(script.tree)
    for statement in scopes.all(ast.Expr):
        node = statement.value
        if isinstance(node, ast.Name) and script.piece.cells:
            continue  # the last line of a notebook's cell shows what it names
        if (
            isinstance(node, (ast.Name, ast.Attribute))
            and _is_meant_call(scopes, node)
            and not is_caught(script.tree, statement)
        ):
            yield _finding(script, node)
    yield from _entered(script, scopes)


def _entered(script: Script, scopes: Scopes) -> Iterator[Found]:
    """Context managers of torch that a ``with`` gets without a call."""
    for statement in scopes.all(ast.With):
        for item in statement.items:
            node = item.context_expr
            if isinstance(node, (ast.Name, ast.Attribute)) and (
                scopes.dotted(node) in _CONTEXTS or _is_no_sync(script, node)
            ):
                text = ast.unparse(node)
                what = "the method" if _is_no_sync(script, node) else "the class"
                yield Found(
                    node,
                    f"`with {text}:` without parentheses enters {what} itself: TypeError or AttributeError",
                    f"write `with {text}():`",
                )


def _is_no_sync(script: Script, node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "no_sync"
        and _is_plain(node)
        and "def no_sync" not in script.piece.code
    )


def _finding(script: Script, node: ast.Name | ast.Attribute) -> Found:
    text = ast.unparse(node)
    name = text.rpartition(".")[2]
    span = span_of(node, script.lines)
    behind = Span(span.end_line, span.end_col, span.end_line, span.end_col)
    takes_none = isinstance(node, ast.Attribute) and name not in _NEEDS_ARGUMENTS
    return Found(
        node,
        f"`{text}` without parentheses is not called: the line does nothing",
        f"write `{text}({'' if name not in _NEEDS_ARGUMENTS else '...'})`",
        edits=[Edit(span=behind, text="()")] if takes_none else (),
    )


def _is_meant_call(scopes: Scopes, node: ast.Name | ast.Attribute) -> bool:
    if isinstance(node, ast.Name):
        return _is_plain_function(scopes.only(node.id, scopes.scope(node)))
    full = scopes.dotted(node)
    if full or node.attr not in _METHODS or not _is_plain(node.value):
        return full in _FUNCTIONS
    # Many things have a step that is a number.
    return (
        node.attr != "step"
        or bool(_STEPS.search(ast.unparse(node.value).lower()))
        or _is_made_by_torch_optim(scopes, node.value)
    )


def _is_made_by_torch_optim(scopes: Scopes, node: ast.expr) -> bool:
    made = scopes.value(node.id, scopes.scope(node)) if isinstance(node, ast.Name) else None
    return isinstance(made, ast.Call) and scopes.dotted(made.func).startswith("torch.optim.")


def _is_plain_function(node: ast.AST | None) -> bool:
    # What a decorator has made of a function may not be one.
    return is_function(node) and not node.decorator_list


def _is_plain(node: ast.expr) -> bool:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return isinstance(node, ast.Name)


_FUNCTIONS_RW816 = frozenset(
    {
        "torch.distributed.get_rank",
        "torch.distributed.get_world_size",
        "torch.distributed.get_node_local_rank",
        "torch.distributed.get_backend",
        "torch.distributed.is_initialized",
        "torch.distributed.is_available",
        "torch.distributed.is_nccl_available",
        "torch.distributed.is_torchelastic_launched",
        "torch.cuda.is_available",
        "torch.cuda.device_count",
        "torch.cuda.current_device",
    }
)


_EQUALS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn)


@rule("RW816", "error", "", "a function such as dist.get_rank is compared or tested but not called", needs_ranks=False, fixable=True)  # fmt: skip
def function_tested_without_parentheses(script: Script) -> Iterator[Found]:
    if "torch" not in script.piece.code:
        return
    scopes = scopes_of(script.tree)
    for node in (*scopes.all(ast.Attribute), *(name for name, _ in scopes.loads)):
        parent = scopes.parents.get(node)
        if isinstance(parent, (ast.Call, ast.Attribute)):
            continue
        word = _function(scopes, node)
        if word and parent is not None:
            what = _what_happens(node, parent)
            if what:
                yield _finding_rw816(script, node, what)


def _function(scopes: Scopes, node: ast.expr) -> str:
    """The function that a node is, also under a name of the user's that holds nothing else."""
    full = canonical(scopes.dotted(node))
    if full not in _FUNCTIONS_RW816 and isinstance(node, ast.Name):
        value = scopes.value(node.id, scopes.scope(node))
        full = canonical(scopes.dotted(value)) if value is not None else ""
    return full if full in _FUNCTIONS_RW816 else ""


def _what_happens(node: ast.expr, parent: ast.AST) -> str:
    if isinstance(parent, ast.Compare):
        return _of_comparison(node, parent)
    if isinstance(parent, ast.BinOp):
        is_text = isinstance(parent.op, ast.Mod) and parent.right is node
        return "" if is_text else "a TypeError"
    if isinstance(parent, ast.BoolOp) or (isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not)):
        return "the function itself is always true"
    is_test = isinstance(parent, (ast.If, ast.While, ast.IfExp, ast.Assert)) and parent.test is node
    return "the function itself is always true" if is_test else ""


def _of_comparison(node: ast.expr, parent: ast.Compare) -> str:
    if len(parent.ops) != 1 or not isinstance(parent.ops[0], _EQUALS):
        return ""
    other = parent.comparators[0] if parent.left is node else parent.left
    if not isinstance(parent.ops[0], (ast.Eq, ast.NotEq)):
        is_searched = isinstance(parent.ops[0], (ast.In, ast.NotIn)) and not _holds_constants(other)
        return "" if is_searched else "the function itself is compared, not its result"
    is_plain = (isinstance(other, ast.Constant) and other.value is not None) or isinstance(other, ast.Call)
    return "the function itself equals nothing else, on any rank" if is_plain else ""


def _holds_constants(node: ast.expr) -> bool:
    return isinstance(node, (ast.List, ast.Tuple, ast.Set)) and all(
        isinstance(one, ast.Constant) for one in node.elts
    )


def _finding_rw816(script: Script, node: ast.expr, what: str) -> Found:
    text = ast.unparse(node)
    span = span_of(node, script.lines)
    behind = Span(span.end_line, span.end_col, span.end_line, span.end_col)
    return Found(
        node,
        f"`{text}` without parentheses is not called: {what}",
        f"write `{text}()`",
        edits=[Edit(span=behind, text="()")],
    )
