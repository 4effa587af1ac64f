"""What lies on the CPU meets what needs a GPU."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.finding import Found
from rankwise.lint.library.names import DDP
from rankwise.lint.model.values import Instance, Object
from rankwise.lint.paths.words import told_place
from rankwise.lint.rule import rule
from rankwise.lint.topics.collective_calls import FILLED, OBJECTS, backends, collectives, has_group, word_of
from rankwise.lint.topics.job_view import INIT, backend_of, function_of, once, places, text_of
from rankwise.lint.topics.tensor_places import is_on_cpu
from rankwise.lint.topics.tensor_text import last_value
from rankwise.lint.topics.wrapping import parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

#: Words of a script that has to do with GPUs.
_GPU = re.compile(r"cuda|gpu|device_id|accelerat|prepare|local_rank|xpu", re.IGNORECASE)


@rule("RW213", "error", "I17", "the backend is NCCL in a script that works on the CPU")
def nccl_without_gpu(script: Script) -> Iterator[Found]:
    for place in once(places(script, INIT)):
        call, bare = place.last, _on_cpu(script)
        tests = " ".join(ast.unparse(test) for test, _, _ in call.tests)
        if backend_of(call) != "nccl" or "is_available" in tests or "cuda" in tests:
            continue
        line = None if bare else _fallback(script)
        if bare:
            message = f"the backend is NCCL, but {bare}: NCCL only moves data between GPUs"
        elif line is not None and not _is_elsewhere(script, call, line) and "exit" not in script.piece.code:
            message = f"without CUDA the device falls back to the CPU (line {line}), but the backend stays NCCL and fails"
        else:
            continue
        fix = 'use "gloo", or "nccl" if torch.cuda.is_available() else "gloo"'
        yield Found(
            call.arg_node(0, "backend") or call.node, message, fix, severity="error" if bare else "warning"
        )


def _on_cpu(script: Script) -> str:
    """How it shows that all work is done on the CPU; empty if it does not."""
    code, calls = ast.unparse(script.tree), script.all_calls
    # ``model.to(rank)``: a number names a GPU.
    moved = [call.args[0] for call in calls if call.name.endswith(".to") and call.args]
    if _GPU.search(code) or any(
        isinstance(one.const, int) or "rank" in one.path or one.spread for one in moved
    ):
        return ""
    named = {
        str(call.args[0].const).partition(":")[0] for call in script.calls_of("torch.device") if call.args
    }
    named |= {
        "cpu"
        for one in ast.walk(script.tree)
        if isinstance(one, ast.Assign) and _says_cpu(one.value) and isinstance(one.value, ast.Constant)
    }
    if named:
        return f'all work is done on "{min(named)}"' if named <= {"cpu", "mps"} else ""
    if ".to(" in code or "device" in code or len({call.module for call in calls}) > 1:
        return ""
    models = [
        call
        for call in script.calls_of(DDP)
        if isinstance(getattr(call.arg(0, "module"), "thing", None), (Instance, Object))
    ]
    return f"`{text_of(models[0].arg_node(0, 'module'))}` is never moved to a GPU" if models else ""


def _fallback(script: Script) -> int | None:
    """The line where the device becomes the CPU if there is no CUDA."""
    tests = [
        one
        for one in ast.walk(script.tree)
        if isinstance(one, (ast.If, ast.IfExp)) and "cuda.is_available" in ast.unparse(one.test)
    ]
    for node in tests:
        others = node.orelse if isinstance(node, ast.If) else [node.orelse]
        if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return):
            others = [*others, *getattr(function_of(script.tree, node), "body", [])[-1:]]
        if any(map(_says_cpu, others)):
            return node.lineno
    return None


def _is_elsewhere(script: Script, call: Call, line: int) -> bool:
    """Whether the process group is created in one branch of a test, and a line is in the other."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.If) and node.orelse:
            arms = (node.body, node.orelse)
            inits = [any(call.node in ast.walk(one) for one in arm) for arm in arms]
            lines = [any(one.lineno <= line <= (one.end_lineno or line) for one in arm) for arm in arms]
            if any(inits) and any(lines) and inits != lines:
                return True
    return False


def _says_cpu(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Constant) and one.value == "cpu" for one in ast.walk(node))


_DEFAULTS = frozenset({"torch.set_default_device", "torch.set_default_tensor_type"})


@rule("RW307", "error", "C17", "a CPU tensor is passed to NCCL")
def cpu_tensor_on_nccl(script: Script) -> Iterator[Found]:
    if backends(script) != {"nccl"} or any(call.name in _DEFAULTS for call in script.all_calls):
        return
    found: dict[tuple[int, str], list[Call]] = {}
    for one_place in collectives(script, *(set(FILLED) - OBJECTS), "send", "isend"):
        call = one_place.last
        if has_group(call) or {"device"} & set(call.contexts):
            continue
        node = next((one for one in _tensors(call) if is_on_cpu(script.tree, one, call.node)), None)
        if node is None:
            continue
        key = (id(function_of(script.tree, call.node)), text_of(node))
        found.setdefault(key, []).append(call)
    for (_, shown), (call, *others) in found.items():
        yield Found(
            call.node,
            f"`{shown}` is on the CPU and {word_of(call)} uses NCCL, which moves data between GPUs only: every rank fails here",
            f'create it on this rank\'s GPU, `device="cuda"`, pass `{shown}.cuda()`, or start the group with "cpu:gloo,cuda:nccl"',
            also=[told_place(f"{word_of(one)} gets it, too", one.node, one.module) for one in others],
        )


def _tensors(call: Call) -> list[ast.AST]:
    names = (
        "tensor",
        "input_tensor",
        "input",
        "output_tensor",
        "output",
        "tensor_list",
        "gather_list",
        "scatter_list",
    )
    given = [call.arg_node(None, name) for name in names]
    return [
        one
        for one in (*getattr(call.node, "args", ())[:2], *given)
        if one is not None and not isinstance(one, ast.Constant)
    ]


@rule("RW411", "error", "D27", "device_ids are passed for a model on the CPU")
def device_ids_of_cpu_model(script: Script) -> Iterator[Found]:
    for call in script.calls_of(DDP):
        ids, node = call.arg(1, "device_ids"), call.arg_node(1, "device_ids")
        if (
            ids is None
            or node is None
            or (ids.is_known and ids.const is None)
            or not isinstance(last_value(script.tree, node, call.node), ast.List)
        ):
            continue
        if not (_is_cpu_text(script, call) or _stays_on_cpu(script, call)):
            continue
        yield Found(
            node,
            f"device_ids={text_of(node)} is for a model on a GPU, but this one is on the CPU: DistributedDataParallel fails with a ValueError",
            "remove `device_ids` and `output_device`, or move the model to the GPU before it is wrapped",
        )


def _is_cpu_text(script: Script, call: Call) -> bool:
    """`DDP(net.cpu(), ...)`, `DDP(net.to("cpu"), ...)`, or `net = Net().cpu()` just before."""
    node = call.arg_node(0, "module")
    value = last_value(script.tree, node, call.node) if node is not None else None
    method = value.func.attr if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) else ""
    return method == "cpu" or (
        method == "to"
        and isinstance(value, ast.Call)
        and bool(value.args)
        and _names_cpu(script, value.args[0], call)
    )


def _names_cpu(script: Script, node: ast.AST, call: Call) -> bool:
    where = last_value(script.tree, node, call.node)
    stores = [
        one.id
        for one in ast.walk(script.tree)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    ]
    where = where.args[0] if isinstance(where, ast.Call) and where.args else where
    return (
        isinstance(where, ast.Constant) and where.value == "cpu" and stores.count(getattr(node, "id", "")) < 2
    )


#: Calls that put a model, or all that is made from now on, elsewhere.
_MOVES = frozenset({"to", "cuda", "to_empty", "set_default_device", "set_default_tensor_type"})


def _stays_on_cpu(script: Script, call: Call) -> bool:
    """Whether the model is created in the file, nothing is ever moved, and GPUs are never mentioned."""
    model = call.arg(0, "module")
    thing = model.thing if model is not None else None
    kinds = (
        {thing.kind}
        if isinstance(thing, Object) and thing.call is not None and "device" not in thing.call.kwargs
        else set[str]()
    )
    kinds |= thing.cls.library_bases() if isinstance(thing, Instance) else set()
    if model is None or "device" in call.contexts or not any(one.startswith("torch.nn.") for one in kinds):
        return False
    parts = {id(one) for one in parts_of(model)}
    moves = [one for one in script.all_calls if one.name.rpartition(".")[2] in _MOVES]
    mine = [one for one in moves if id(one.receiver.thing) in parts]
    if mine:
        return all(_goes_to_cpu(one) for one in mine)
    may_be = any(
        one.name.startswith("torch.set_default")
        or (one.receiver.thing is None and one.args and one.name.startswith("?"))
        for one in moves
    )
    return not may_be and bool(backends(script)) and backends(script) <= {"gloo", "nccl"}


def _goes_to_cpu(call: Call) -> bool:
    return any(value.const == "cpu" or (isinstance(value.thing, Object) and value.thing.call is not None and any(
        one.const == "cpu" for one in value.thing.call.args)) for value in call.args)  # fmt: skip
