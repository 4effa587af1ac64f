"""What lies on the CPU meets what needs a GPU."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.collective_calls import FILLED, OBJECTS, backends, collectives, has_group, word_of
from rankwise.lint.analyses.job_view import INIT, backend_of, function_of, is_hidden, once, places, text_of
from rankwise.lint.analyses.tensors import is_cpu, is_on_cpu, place_given
from rankwise.lint.analyses.wrapping import parts_of
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.calls import arms_of
from rankwise.lint.interpreter.library_calls import kinds_of
from rankwise.lint.interpreter.values import Instance, Items, Object
from rankwise.lint.library.collective_table import ACTS
from rankwise.lint.library.names import DDP
from rankwise.lint.paths.words import reported_place
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.job_view import Place
    from rankwise.lint.interpreter.calls import Call
    from rankwise.lint.interpreter.values import Value
    from rankwise.lint.script import Script


@rule("RW213", "error", "I17", "the backend is NCCL in a script that works on the CPU")
def nccl_without_gpu(script: Script) -> Iterator[Found]:
    for place in once(places(script, INIT)):
        call, bare = place.last, _on_cpu(script)
        tests = " ".join(ast.unparse(test) for test, _, _ in call.tests)
        if backend_of(call) != "nccl" or "is_available" in tests or "cuda" in tests:
            continue
        # Where it goes to a GPU in any case, nothing works without one.
        needs_gpu = any(
            one.name.endswith((".cuda", "cuda.set_device")) and arms_of(one.tests) <= arms_of(call.tests)
            for one in script.all_calls
        )
        line = None if bare or needs_gpu else _fallback(script)
        if bare:
            message = f"the backend is NCCL, but {bare}: NCCL only moves data between GPUs"
        elif line is not None and "exit" not in script.piece.code:
            message = (
                f"without CUDA the device falls back to the CPU (line {line}), but the backend stays NCCL and fails"
            )
        else:
            continue
        fix = 'use "gloo", or "nccl" if torch.cuda.is_available() else "gloo"'
        yield Found(call.arg_node(0, "backend") or call.node, message, fix, severity="error" if bare else "warning")


def _on_cpu(script: Script) -> str:
    """How it shows that all work is done on the CPU; empty if it does not."""
    calls = script.all_calls
    given = [place for call in calls if (place := place_given(call)) is not None]
    named = {str(place.const).partition(":")[0] for place in given if isinstance(place.const, str)}
    if any(map(_may_use_gpu, calls)):
        return ""
    if named:
        return f'all work is done on "{min(named)}"' if named <= {"cpu", "mps"} else ""
    models = [call for call in script.calls_of(DDP) if call.args and isinstance(call.args[0].thing, (Instance, Object))]
    return f"`{text_of(models[0].arg_node(0, 'module'))}` is never moved to a GPU" if models else ""


def _may_use_gpu(call: Call) -> bool:
    """Whether a call is of CUDA's, gets a device that is not known, or is of what may choose one."""
    place = place_given(call)
    is_known = (
        place is None or isinstance(place.const, str) or (place.made is not None and place.made.name == "torch.device")
    )
    is_framework = call.name.startswith(
        (
            "torch.cuda.",
            "torch.accelerator.",
            "torch.set_default_",
            "accelerate.",
            "lightning.",
            "deepspeed.",
            "transformers.",
        )
    )
    return not is_known or is_framework or is_hidden(call) or "device_ids" in call.kwargs or call.name.endswith(".cuda")


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


def _says_cpu(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Constant) and one.value == "cpu" for one in ast.walk(node))


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


@rule("RW411", "error", "D27", "device_ids are passed for a model on the CPU")
def device_ids_of_cpu_model(script: Script) -> Iterator[Found]:
    for call in script.calls_of(DDP):
        ids, model = call.arg(1, "device_ids"), call.arg(0, "module")
        if ids is None or not isinstance(ids.thing, Items) or model is None or not _stays_on_cpu(script, call, model):
            continue
        node = call.arg_node(1, "device_ids") or call.node
        yield Found(
            node,
            f"device_ids={text_of(node)} is for a model on a GPU, but this one is on the CPU: DistributedDataParallel fails with a ValueError",
            "remove `device_ids` and `output_device`, or move the model to the GPU before it is wrapped",
        )


#: Calls that put a model, or all that is made from now on, elsewhere.
_MOVES = frozenset({"to", "cuda", "cpu", "to_empty", "set_default_device", "set_default_tensor_type"})


def _stays_on_cpu(script: Script, call: Call, model: Value) -> bool:
    """Whether the model is created in the file, and is moved to the CPU, or nowhere."""
    made = getattr(model.thing, "call", None)
    is_module = any(one.startswith(("torch.nn.", "torchvision.models.")) for one in kinds_of(model))
    if made is None or not is_module or "device" in {*made.kwargs, *call.contexts}:
        return False
    parts = {id(one) for one in parts_of(model)}
    moves = [one for one in script.all_calls if one.name.rpartition(".")[2] in _MOVES]
    # A way of the program that does not wrap it may well move it.
    mine = [one for one in moves if id(one.receiver.thing) in parts and not one.excludes(call)]
    if mine:
        return all(one.name.endswith(".cpu") or any(map(is_cpu, one.args)) for one in mine)
    may_be = any(
        one.name.startswith("torch.set_default")
        or (one.receiver.thing is None and one.args and not one.receiver.spread)
        for one in moves
    )
    return not may_be
