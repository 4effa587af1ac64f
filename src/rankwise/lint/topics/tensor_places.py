"""Whether an expression of the text is a tensor on the CPU, or a plain number: as far as its words tell."""

from __future__ import annotations

import ast

from rankwise.lint.topics.job_view import function_of
from rankwise.lint.topics.tensor_text import VIEWS, bindings, key_of

_MADE = frozenset({"tensor", "zeros", "ones", "empty", "full", "rand", "randn", "arange", "randint", "eye", "linspace", "Tensor", "FloatTensor",
                   "LongTensor", "IntTensor", "DoubleTensor", "HalfTensor", "BoolTensor", "ByteTensor", "from_numpy", "as_tensor", "randperm"})  # fmt: skip
_LIKE = frozenset({"zeros_like", "ones_like", "empty_like", "rand_like", "full_like", "randn_like", "clone", "abs", "sum", "mean", "sqrt"})  # fmt: skip
_JOINING = frozenset({"cat", "stack", "concat", "vstack", "hstack"})
#: Methods whose result lies where their tensor does.
_STAYING = frozenset({"clone", "float", "double", "long", "int", "half", "sum", "mean", "max", "min", "abs", "sqrt", "bool", "new_zeros", "new_ones",
                      "new_empty", "new_full", "add", "mul", "div", "sub", "pow", "repeat", "add_", "mul_", "div_", "zero_", "fill_", "norm"})  # fmt: skip
_NUMBERS = frozenset(
    {"item", "len", "int", "float", "time", "perf_counter", "round", "numel", "monotonic", "bool"}
)
_TORCH = frozenset({"torch", "th"})
_DEEPEST = 6


def is_on_cpu(tree: ast.Module, node: ast.AST, at: ast.AST, depth: int = 0) -> bool:  # noqa: PLR0911 - one line for each form
    """Whether a tensor was made on the CPU and not moved since."""
    if depth > _DEEPEST:
        return False
    if isinstance(node, ast.Call):
        return _call_on_cpu(tree, node, at, depth)
    if isinstance(node, (ast.List, ast.Tuple)):
        return bool(node.elts) and all(is_on_cpu(tree, one, at, depth + 1) for one in node.elts)
    if isinstance(node, ast.ListComp):
        return is_on_cpu(tree, node.elt, node, depth + 1)
    if isinstance(node, ast.BinOp):
        sides = (node.left, node.right)
        tensors = [one for one in sides if not is_number(tree, one, at)]
        if isinstance(node.op, ast.Mult) and any(isinstance(one, ast.List) for one in sides):
            return any(is_on_cpu(tree, one, at, depth + 1) for one in sides if isinstance(one, ast.List))
        return bool(tensors) and all(is_on_cpu(tree, one, at, depth + 1) for one in tensors)
    if isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr in VIEWS):
        return is_on_cpu(tree, node.value, at, depth + 1)
    key = key_of(node)
    return bool(key) and _name_on_cpu(tree, key, at, depth)


def _name_on_cpu(tree: ast.Module, key: str, at: ast.AST, depth: int) -> bool:
    found = bindings(tree, key, at)
    if not found:
        return False
    kept = []
    for statement, value in found:
        if isinstance(statement, ast.AugAssign):
            continue
        if (
            isinstance(statement, ast.For)
            and isinstance(statement.iter, (ast.Tuple, ast.List))
            and isinstance(statement.target, ast.Name)
        ):
            kept.append(is_on_cpu(tree, statement.iter, statement, depth + 1))
        else:
            kept.append(value is not None and is_on_cpu(tree, value, statement, depth + 1))
    if "." in key:
        return bool(kept) and all(kept)
    return bool(kept) and kept[-1]


def _call_on_cpu(tree: ast.Module, node: ast.Call, at: ast.AST, depth: int) -> bool:  # noqa: PLR0911 - one line for each form
    func = node.func
    if not isinstance(func, ast.Attribute):
        return False
    if isinstance(func.value, ast.Name) and func.value.id in _TORCH:
        return _made_on_cpu(tree, node, func.attr, at, depth)
    if func.attr == "cpu":
        return True
    if func.attr == "to":
        place = (
            node.args[0]
            if node.args
            else next((one.value for one in node.keywords if one.arg == "device"), None)
        )
        if isinstance(place, ast.Attribute) and key_of(place).startswith("torch."):
            return is_on_cpu(tree, func.value, at, depth + 1)
        return _is_cpu_name(place)
    if func.attr in _STAYING or func.attr in VIEWS:
        device = next((one.value for one in node.keywords if one.arg == "device"), None)
        return device is None and is_on_cpu(tree, func.value, at, depth + 1)
    return False


def _made_on_cpu(tree: ast.Module, node: ast.Call, word: str, at: ast.AST, depth: int) -> bool:
    device = next((one.value for one in node.keywords if one.arg == "device"), None)
    if device is not None:
        return _is_cpu_name(device)
    if any(one.arg is None for one in node.keywords) or any(
        isinstance(one, ast.Starred) and word not in {"zeros", "ones"} for one in node.args
    ):
        return False
    if word == "as_tensor":
        return bool(node.args) and (
            isinstance(node.args[0], (ast.Constant, ast.List)) or is_number(tree, node.args[0], at)
        )
    if word in _MADE:
        return True
    if word in _LIKE and node.args:
        return is_on_cpu(tree, node.args[0], at, depth + 1)
    return word in _JOINING and bool(node.args) and is_on_cpu(tree, node.args[0], at, depth + 1)


def _is_cpu_name(node: ast.AST | None) -> bool:
    if isinstance(node, ast.Call) and key_of(node.func) == "torch.device" and node.args:
        node = node.args[0]
    return isinstance(node, ast.Constant) and node.value == "cpu"


def is_number(tree: ast.Module, node: ast.AST, at: ast.AST, depth: int = 0) -> bool:  # noqa: PLR0911 - one line for each form
    """Whether an expression is a number of Python's: a constant, `len(x)`, `loss.item()`, or computed of such."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float)) or node.value is None
    if depth > _DEEPEST:
        return False
    if isinstance(node, ast.UnaryOp):
        return is_number(tree, node.operand, at, depth + 1)
    if isinstance(node, ast.BinOp):
        return is_number(tree, node.left, at, depth + 1) and is_number(tree, node.right, at, depth + 1)
    if isinstance(node, ast.Call):
        return key_of(node.func).rpartition(".")[2] in _NUMBERS or (
            isinstance(node.func, ast.Attribute) and node.func.attr == "item"
        )
    key = key_of(node)
    found = bindings(tree, key, at) if key else []
    if not found and isinstance(node, ast.Name):
        return _is_number_parameter(tree, node, depth)
    return any(not isinstance(one, ast.AugAssign) for one, _ in found) and all(
        _gives_number(tree, *one, depth) for one in found
    )


def _is_number_parameter(tree: ast.Module, node: ast.Name, depth: int) -> bool:
    """A parameter whose default is a number, and for which no call in the text gives anything else."""
    function = function_of(tree, node)
    args = getattr(function, "args", None)
    if args is None:
        return False
    names = [one.arg for one in (*args.posonlyargs, *args.args)]
    defaults = dict(zip(names[len(names) - len(args.defaults) :], args.defaults, strict=True))
    default = defaults.get(node.id)
    if not isinstance(default, ast.Constant) or not isinstance(default.value, (int, float)):
        return False
    position = names.index(node.id) - (names[0] in {"self", "cls"})
    name = getattr(function, "name", "")
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and key_of(call.func).rpartition(".")[2] == name:
            given = next(
                (one.value for one in call.keywords if one.arg == node.id),
                call.args[position] if position < len(call.args) else None,
            )
            if given is not None and not is_number(tree, given, call, depth + 1):
                return False
    return True


def _gives_number(tree: ast.Module, statement: ast.AST, value: ast.expr | None, depth: int) -> bool:
    if isinstance(statement, ast.AugAssign):
        return is_number(tree, statement.value, statement, depth + 1)
    if value is None and isinstance(statement, (ast.For,)):
        return isinstance(statement.iter, ast.Call) and key_of(statement.iter.func) == "range"
    if isinstance(value, ast.Constant) and value.value is None:
        return False
    return value is not None and is_number(tree, value, statement, depth + 1)
