"""Where a tensor in the text comes from and where it goes, by the names it is given."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import TYPE_CHECKING

from rankwise.lint.finding import Span, span_of
from rankwise.lint.topics.job_view import above, function_of, statement_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rankwise.lint.model.calls import Call, Site
    from rankwise.lint.program import Module
    from rankwise.lint.script import Script

#: Methods and attributes that show the same memory in another way.
VIEWS = frozenset({"view", "view_as", "data", "detach", "squeeze", "unsqueeze", "narrow", "select", "expand", "contiguous", "flatten",
                   "reshape", "requires_grad_", "t", "T", "transpose", "permute", "mT", "detach_", "real", "swapaxes", "movedim"})  # fmt: skip
#: Behind these no gradient goes on, or no tensor.
_CUTS = frozenset({"detach", "item", "tolist", "shape", "size", "dim", "numel", "device", "dtype", "numpy", "argmax", "float", "int", "len",
                   "str", "bool", "data", "isfinite", "isnan", "repr", "print", "no_grad", "ndim", "state_dict", "isinstance", "hasattr"})  # fmt: skip
_BACKWARD = frozenset({"backward", "manual_backward"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_DEEPEST = 8


def key_of(node: ast.AST | None) -> str:
    """The name of a variable or attribute, ``total`` or ``self.total``; empty for all else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = key_of(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def root_of(node: ast.AST | None) -> ast.AST | None:
    """What a view is taken of: ``x`` for ``x.data.view(-1)``, ``x[0]`` and ``x.add_(1)``."""
    while node is not None:
        if isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr in VIEWS):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_view(node.func.attr):
            node = node.func.value
        else:
            return node
    return None


def _is_view(method: str) -> bool:
    return method in VIEWS or (method.endswith("_") and not method.startswith("_"))


@lru_cache(maxsize=512)
def nodes_in(function: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a function's own body in the order of the text; functions defined inside are left out."""
    found: list[ast.AST] = []
    todo = list(getattr(function, "body", ()))[::-1]
    while todo:
        node = todo.pop()
        found.append(node)
        if not isinstance(node, _FUNCTIONS):
            todo += list(ast.iter_child_nodes(node))[::-1]
    return tuple(found)


def statements_in(function: ast.AST) -> list[ast.stmt]:
    """The statements of a function's own body, also nested ones, in order."""
    return [node for node in nodes_in(function) if isinstance(node, ast.stmt)]


def targets_of(statement: ast.AST) -> list[ast.expr]:
    """What a statement assigns to, tuples taken apart."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = list(statement.targets)
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor, ast.NamedExpr)):
        targets = [statement.target]
    found: list[ast.expr] = []
    while targets:
        one = targets.pop(0)
        if isinstance(one, (ast.Tuple, ast.List)):
            targets = [*one.elts, *targets]
        else:
            found.append(one.value if isinstance(one, ast.Starred) else one)
    return found


def value_of(statement: ast.AST, target: ast.expr) -> ast.expr | None:
    """The expression that a statement gives to one of its targets; None if it is a part of something."""
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.Assign) and target not in statement.targets:
        for one in statement.targets:
            if (
                isinstance(one, ast.Tuple)
                and isinstance(value, ast.Tuple)
                and target in one.elts
                and len(one.elts) == len(value.elts)
            ):
                return value.elts[one.elts.index(target)]
        return None
    return value if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) else None


def bindings(tree: ast.Module, key: str, at: ast.AST) -> list[tuple[ast.AST, ast.expr | None]]:
    """Statements that give a name its value before ``at``, with that value; for ``self.x`` all of the class."""
    around: ast.AST = function_of(tree, at)
    is_attribute = "." in key
    if is_attribute:
        around = next((one for one in above(tree, at) if isinstance(one, ast.ClassDef)), around)
        nodes: Sequence[ast.AST] = list(ast.walk(around))
    else:
        nodes = nodes_in(around)
    found = _bound_in(nodes, key, None if is_attribute else at)
    if not found and not is_attribute and around is not tree and not _is_parameter(around, key):
        found = _bound_in(nodes_in(tree), key, None)
    return found


def _bound_in(
    nodes: Sequence[ast.AST], key: str, at: ast.AST | None
) -> list[tuple[ast.AST, ast.expr | None]]:
    end = _start(at) if at is not None else None
    return [
        (node, value_of(node, target))
        for node in nodes
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.NamedExpr))
        and (end is None or (_start(node) if isinstance(node, ast.For) else _end(node)) <= end)
        for target in targets_of(node)
        if key_of(target) == key
    ]


def _start(node: ast.AST) -> tuple[int, int]:
    return (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))


def _end(node: ast.AST) -> tuple[int, int]:
    return (getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0))


def is_in(tree: ast.Module, node: ast.AST) -> bool:
    """Whether a node is one of this text's."""
    return next((one for one in above(tree, node)), None) is not None


def mention(script: Script, what: str, node: ast.AST) -> list[tuple[str, str, Span]]:
    """A place beside that of a finding, if it is in this text."""
    return [(what, script.piece.path, span_of(node, script.lines))] if is_in(script.tree, node) else []


def is_behind(node: ast.AST, other: ast.AST) -> bool:
    """Whether a node stands behind another one in the text."""
    return _start(node) >= _end(other)


def _is_parameter(function: ast.AST, name: str) -> bool:
    args = getattr(function, "args", None)
    return args is not None and any(
        one.arg == name for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)
    )


_CREATORS = ("torch.rand", "torch.zeros", "torch.ones", "torch.empty", "torch.full", "torch.arange")


def is_made_up(tree: ast.Module, node: ast.AST, before: ast.AST) -> bool:
    """Whether a name holds a tensor that was just created: an input, which nobody trains."""
    value = last_value(tree, node, before)
    return ast.unparse(value).startswith(_CREATORS)


def last_value(tree: ast.Module, node: ast.AST, at: ast.AST) -> ast.AST:
    """What a name was given last before ``at``, if that is one plain expression; the node itself otherwise."""
    for _ in range(_DEEPEST):
        key = key_of(node)
        if not key:
            return node
        found = bindings(tree, key, at)
        if not found or ("." in key and len(found) > 1):
            return node
        statement, value = found[-1]
        if value is None or isinstance(statement, ast.AugAssign):
            return node
        node, at = value, statement
    return node


def own_parts(statement: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement without the statements inside of it."""
    todo = [
        one
        for one in ast.iter_child_nodes(statement)
        if not isinstance(one, (ast.stmt, ast.ExceptHandler, ast.match_case))
    ]
    while todo:
        node = todo.pop(0)
        yield node
        todo += [one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.stmt)]


def loads(nodes: Iterator[ast.AST] | Sequence[ast.AST], key: str) -> list[ast.AST]:
    """Where a variable is read."""
    return [
        one
        for one in nodes
        if isinstance(one, (ast.Name, ast.Attribute)) and isinstance(one.ctx, ast.Load) and key_of(one) == key
    ]


def is_cut(tree: ast.Module, node: ast.AST) -> bool:
    """Whether what is read is used in a way that carries no gradient: ``x.item()``, ``len(x)``, ``x.detach()``."""
    inner = node
    for one in above(tree, node):
        if isinstance(one, ast.stmt):
            return False
        if isinstance(one, ast.Attribute) and one.value is inner and one.attr in _CUTS:
            return True
        if (
            isinstance(one, ast.Call)
            and inner is not one.func
            and isinstance(one.func, (ast.Name, ast.Attribute))
        ):
            word = one.func.id if isinstance(one.func, ast.Name) else one.func.attr
            if word in _CUTS:
                return True
        if isinstance(one, (ast.Compare, ast.Subscript)) and getattr(one, "slice", None) is inner:
            return True
        inner = one
    return False


def backward_of(
    module: Module,
    start: ast.AST,
    key: str,
    stack: tuple[Site, ...],
    *,
    stops: Callable[[ast.AST, str], bool] | None = None,
    depth: int = 0,
) -> ast.Call | None:
    """The backward pass that a value goes into; in the same function, or in those that called it.

    Args:
        module: Where ``start`` stands.
        start: The expression whose value is followed, or, with a key, the place from which on that name holds it.
        key: The variable that holds it, or empty.
        stack: Who called the function, outermost first.
        stops: Whether a statement makes the value harmless.
        depth: How many calls it has come up already.
    """
    tree = module.tree
    held = {key} if key else set()
    statement = statement_of(tree, start)
    if statement is None or depth > _DEEPEST:
        return None
    if not key:
        direct = _direct(tree, start)
        if direct is not None:
            return direct
        if is_cut(tree, start):
            return None
        held = (
            {root for one in targets_of(statement) if (root := key_of(root_of(one)))}
            if not isinstance(statement, ast.For)
            else set()
        )
    returned = not key and isinstance(statement, ast.Return)
    for one in [] if returned else statements_in(function_of(tree, start)):
        if _start(one) <= _start(statement):
            continue
        found = _sink(tree, one, held)
        if found is not None:
            return found
        if isinstance(one, ast.Return) and _reads(tree, one, held):
            returned = True
        else:
            _step(tree, one, held, stops)
    if returned and stack and isinstance(stack[-1].node, ast.Call):
        return backward_of(stack[-1].module, stack[-1].node, "", stack[:-1], stops=stops, depth=depth + 1)
    return None


def _direct(tree: ast.Module, node: ast.AST) -> ast.Call | None:
    """`f(x).mean().backward()`, `accelerator.backward(f(x))`."""
    for one in above(tree, node):
        if isinstance(one, ast.stmt):
            return None
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in _BACKWARD:
            return one
    return None


def _reads(tree: ast.Module, statement: ast.AST, held: set[str]) -> bool:
    return any(
        isinstance(one, (ast.Name, ast.Attribute))
        and isinstance(one.ctx, ast.Load)
        and key_of(one) in held
        and not is_cut(tree, one)
        for one in own_parts(statement)
    )


def _sink(tree: ast.Module, statement: ast.AST, held: set[str]) -> ast.Call | None:
    for one in own_parts(statement):
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in _BACKWARD:
            parts = [*ast.walk(one.func.value), *(part for arg in one.args for part in ast.walk(arg))]
            if any(
                isinstance(part, (ast.Name, ast.Attribute))
                and key_of(part) in held
                and not is_cut(tree, part)
                for part in parts
            ):
                return one
    return None


def _step(
    tree: ast.Module, statement: ast.AST, held: set[str], stops: Callable[[ast.AST, str], bool] | None
) -> None:
    if stops is not None:
        held -= {key for key in held if stops(statement, key)}
    targets = targets_of(statement)
    reads = _reads(tree, statement, held)
    for target in targets:
        name = key_of(root_of(target))
        if reads and name:
            held.add(name)
        elif key_of(target) and isinstance(statement, (ast.Assign, ast.AnnAssign)):
            held.discard(name)
    if not targets and reads:
        held |= _appended(tree, statement, held)


def _appended(tree: ast.Module, statement: ast.AST, held: set[str]) -> set[str]:
    call = getattr(statement, "value", None)
    if (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in {"append", "extend"}
    ):
        takes = any(
            key_of(one) in held and not is_cut(tree, one) for arg in call.args for one in ast.walk(arg)
        )
        return {key_of(call.func.value)} - {""} if takes else set()
    return set()


def touches_model(tree: ast.Module, node: ast.AST, models: frozenset[int], depth: int = 0) -> bool:
    """Whether a gradient goes from an expression back to one of these calls of models (by id of the node)."""
    for one in ast.walk(node):
        if (id(one) in models or _asks_gradient(one)) and not is_cut(tree, one):
            return True
        key = key_of(one) if isinstance(one, (ast.Name, ast.Attribute)) else ""
        if not key or depth > _DEEPEST or not isinstance(one.ctx, ast.Load) or is_cut(tree, one):  # type: ignore[attr-defined]
            continue
        found = [] if "." in key else bindings(tree, key, one)[-2:]
        if any(value is not None and touches_model(tree, value, models, depth + 1) for _, value in found):
            return True
    return False


def _asks_gradient(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and any(
        word.arg == "requires_grad" and isinstance(word.value, ast.Constant) and word.value.value is True
        for word in node.keywords
    )


def model_calls(calls: Sequence[Call]) -> frozenset[int]:
    """Ids of the nodes at which a model of any kind is called with gradients on."""
    return frozenset(
        id(call.node)
        for call in calls
        if call.name.endswith(".__call__")
        and (
            call.name.startswith(
                ("torch.nn.", "torch.distributed.fsdp", "deepspeed", "torchvision.", "timm.")
            )
        )
        and not {"no_grad", "inference_mode"} & set(call.contexts)
    )
