"""A function is named where it should be called, or a context manager called where it should be entered."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.analyses.scopes import Scopes, is_function, scopes_of
from rankwise.lint.analyses.turns import is_caught
from rankwise.lint.finding import Edit, Found, Span, span_of
from rankwise.lint.library.names import canonical
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.script import Script

#: Functions that are there for their effect, and what each takes at least.
_ACTS = frozenset(
    [
        "torch.distributed.barrier",
        "torch.distributed.destroy_process_group",
        "torch.distributed.init_process_group",
        "torch.cuda.synchronize",
        "torch.cuda.empty_cache",
        "torch.cuda.reset_peak_memory_stats",
        "torch.accelerator.synchronize",
        "gc.collect",
    ]
)
#: Functions that are there for what they return.
_ASKS = frozenset(
    f"torch.{name}"
    for name in [
        "distributed.get_rank",
        "distributed.get_world_size",
        "distributed.get_node_local_rank",
        "distributed.get_backend",
        "distributed.is_initialized",
        "distributed.is_available",
        "distributed.is_nccl_available",
        "distributed.is_torchelastic_launched",
        "cuda.is_available",
        "cuda.device_count",
        "cuda.current_device",
    ]
)
#: Methods that are there for their effect.
_METHODS = re.compile(
    r"backward|zero_grad|step|train|eval|set_epoch|wait_for_everyone|destroy_process_group|barrier|synchronize"
)
_STEPS = re.compile(r"opt|sched|scaler|sgd|adam")
_ENTERED = frozenset({"torch.no_grad", "torch.enable_grad", "torch.inference_mode", "torch.random.fork_rng"})
_NEEDS_ARGUMENTS = ("set_epoch", "init_process_group")
_EQUALS = (ast.Eq, ast.NotEq)


@rule("RW809", "error", "", "a function is named but not called", needs_ranks=False, fixable=True)
def call_without_parentheses(script: Script) -> Iterator[Found]:
    scopes = scopes_of(script.tree)
    for statement in scopes.all(ast.Expr):
        node = statement.value
        # The last line of a notebook's cell shows what it names.
        if (
            not (isinstance(node, ast.Name) and script.unit.cells)
            and _is_meant_call(scopes, node)
            and not is_caught(script.tree, statement)
        ):
            yield _reported(script, node, "the line does nothing", can_fix=isinstance(node, ast.Attribute))
    for block in scopes.all(ast.With):
        for item in block.items:
            node = item.context_expr
            is_method = (
                isinstance(node, ast.Attribute) and node.attr == "no_sync" and "def no_sync" not in script.unit.code
            )
            if scopes.dotted(node) in _ENTERED or (is_method and _is_plain(node)):
                text = ast.unparse(node)
                what = f"`with {text}:` without parentheses enters the {'method' if is_method else 'class'} itself: TypeError or AttributeError"
                yield Found(node, what, f"write `with {text}():`")
    for node in (*scopes.all(ast.Attribute), *(name for name, _ in scopes.loads)):
        parent = scopes.parents.get(node)
        if (
            parent is not None
            and not isinstance(parent, (ast.Call, ast.Attribute))
            and (_is_question(scopes, node) or _is_own_test(scopes, node))
            and (what := _effect(node, parent))
        ):
            yield _reported(script, node, what, can_fix=True)


def _reported(script: Script, node: ast.expr, what: str, *, can_fix: bool) -> Found:
    text, span = ast.unparse(node), span_of(node, script.unit.lines)
    needs = text.rpartition(".")[2] in _NEEDS_ARGUMENTS
    edit = Edit(span=Span(span.end_line, span.end_col, span.end_line, span.end_col), text="()")
    return Found(
        node,
        f"`{text}` without parentheses is not called: {what}",
        f"write `{text}({'...' if needs else ''})`",
        edits=[edit] if can_fix and not needs else (),
    )


def _is_meant_call(scopes: Scopes, node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        made = scopes.only(node.id, scopes.scope(node))
        return is_function(made) and not made.decorator_list  # what a decorator has made of a function may not be one
    if not isinstance(node, ast.Attribute):
        return False
    full = scopes.dotted(node)
    if full or not _METHODS.fullmatch(node.attr) or not _is_plain(node.value):
        return full in _ACTS
    # Many things have a step that is a number.
    made = scopes.value(node.value.id, scopes.scope(node)) if isinstance(node.value, ast.Name) else None
    by_torch = isinstance(made, ast.Call) and scopes.dotted(made.func).startswith("torch.optim.")
    return node.attr != "step" or by_torch or bool(_STEPS.search(ast.unparse(node.value).lower()))


def _is_plain(node: ast.expr) -> bool:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return isinstance(node, ast.Name)


def _is_question(scopes: Scopes, node: ast.expr) -> bool:
    """Whether a node is a function that is asked, also under a name of the user's that holds nothing else."""
    value = scopes.value(node.id, scopes.scope(node)) if isinstance(node, ast.Name) else None
    return canonical(scopes.dotted(node)) in _ASKS or (value is not None and canonical(scopes.dotted(value)) in _ASKS)


def _is_own_test(scopes: Scopes, node: ast.expr) -> bool:
    """Whether a test asks a function of the user's that is only named."""
    made = scopes.only(node.id, scopes.scope(node)) if isinstance(node, ast.Name) else None
    inner, outer = node, scopes.parents.get(node)
    while isinstance(outer, ast.BoolOp) or (isinstance(outer, ast.UnaryOp) and isinstance(outer.op, ast.Not)):
        inner, outer = outer, scopes.parents.get(outer)
    return is_function(made) and not made.decorator_list and getattr(outer, "test", None) is inner


def _effect(node: ast.expr, parent: ast.AST) -> str:
    """What happens where a function stands in the place of its result; empty where that is right."""
    if isinstance(parent, ast.BinOp):
        return "" if isinstance(parent.op, ast.Mod) and parent.right is node else "a TypeError"
    is_test = isinstance(parent, (ast.If, ast.While, ast.IfExp, ast.Assert)) and parent.test is node
    if (
        is_test
        or isinstance(parent, ast.BoolOp)
        or (isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not))
    ):
        return "the function itself is always true"
    if not isinstance(parent, ast.Compare) or len(parent.ops) != 1:
        return ""
    op, other = parent.ops[0], parent.comparators[0] if parent.left is node else parent.left
    if isinstance(op, (ast.In, ast.NotIn)):
        is_numbers = isinstance(other, (ast.List, ast.Tuple, ast.Set)) and all(
            isinstance(one, ast.Constant) for one in other.elts
        )
        return "the function itself is compared, not its result" if is_numbers else ""
    if isinstance(op, (ast.Is, ast.IsNot)):
        return ""
    is_plain = isinstance(other, ast.Call) or (isinstance(other, ast.Constant) and other.value is not None)
    return "the function itself is compared, not its result" if is_plain or not isinstance(op, _EQUALS) else ""


#: Context managers of torch, and the effect that is missing where one is only called.
_EFFECTS = {
    **dict.fromkeys(("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad"), "gradients are still recorded"),
    "torch.enable_grad": "the gradient mode stays as it was",
    **dict.fromkeys((f"torch.{name}autocast" for name in ("", "amp.", "cuda.amp.", "cpu.amp.")), "no operation changes its precision"),
    **dict.fromkeys(("torch.cuda.device", "torch.accelerator.device_index"), "the current device stays what it was"),
    "torch.cuda.stream": "the current stream stays what it was",
    **dict.fromkeys((f"torch.{name}" for name in ("profiler.profile", "profiler.record_function", "autograd.profiler.profile")), "nothing is profiled"),
    "torch.random.fork_rng": "the random state is not isolated",
    **dict.fromkeys(("torch.distributed.algorithms.join.Join", "torch.distributed.algorithms.Join"), "uneven inputs are not joined"),
}  # fmt: skip
#: Those that are methods, which only torch, Accelerate and Fabric have.
_METHOD_EFFECTS = {
    **dict.fromkeys(("no_sync", "no_backward_sync"), "gradients are still synchronised in every backward pass"),
    "summon_full_params": "the parameters stay sharded",
    "state_dict_type": "the kind of state dict stays what it was",
    **dict.fromkeys(("main_process_first", "local_main_process_first"), "no process waits for the main one"),
    "join_uneven_inputs": "uneven inputs are not joined",
    "split_between_processes": "nothing is split",
}
_SETTERS = {
    "torch.cuda.device": "torch.cuda.set_device",
    "torch.accelerator.device_index": "torch.accelerator.set_device_index",
}


@rule("RW808", "error", "R13", "a context manager is called but never entered: no effect", needs_ranks=False)
def context_manager_without_with(script: Script) -> Iterator[Found]:
    scopes = scopes_of(script.tree)
    for statement in scopes.all(ast.Expr):
        call = statement.value
        effect = _missing(scopes, call) if isinstance(call, ast.Call) else ""
        if effect and isinstance(call, ast.Call) and not is_caught(script.tree, statement):
            text, setter = ast.unparse(call.func), _SETTERS.get(scopes.dotted(call.func))
            yield Found(
                call,
                f"`{text}(...)` on a line of its own is never entered: {effect}",
                f"write `with {text}(...):` around the lines concerned"
                + (f"; or call `{setter}(...)`, which takes effect at once" if setter else ""),
                failure_class="R13" if setter else "",
            )


def _missing(scopes: Scopes, call: ast.Call) -> str:
    name, func = scopes.dotted(call.func), call.func
    if name in _EFFECTS:
        is_decorating = bool(call.args) and isinstance(call.args[0], ast.Lambda)
        return "" if is_decorating else _EFFECTS[name]
    if not isinstance(func, ast.Attribute):
        return ""
    if func.attr == "join" and isinstance(func.value, ast.Name):
        made = scopes.value(func.value.id, scopes.scope(func))
        is_ddp = isinstance(made, ast.Call) and scopes.dotted(made.func).endswith(".DistributedDataParallel")
        return "uneven inputs are not joined" if is_ddp else ""
    return "" if isinstance(func.value, ast.Call) or name.startswith("_") else _METHOD_EFFECTS.get(func.attr, "")
