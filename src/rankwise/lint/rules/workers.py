"""What the workers of a loader and signal handlers must not do."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.collective_calls import word_of
from rankwise.lint.analyses.data_flow import given
from rankwise.lint.analyses.job_view import is_distributed, node_in, once, places, text_of
from rankwise.lint.analyses.saved_files import is_write
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.values import ANY, Bound, Function, Instance
from rankwise.lint.library.collective_table import ACTS
from rankwise.lint.library.names import LOADER
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.job_view import Place
    from rankwise.lint.interpreter.calls import Call
    from rankwise.lint.interpreter.values import UserClass
    from rankwise.lint.script import Script


@rule("RW519", "error", "X15", "the forked workers of a loader use CUDA")
def cuda_in_loader_worker(script: Script) -> Iterator[Found]:
    if any(
        call.name.endswith("set_start_method") and call.args and call.args[0].const in {"spawn", "forkserver"}
        for call in script.all_calls
    ):
        return
    for place in once(places(script, LOADER)):
        call = place.last
        workers = given(call, "num_workers")
        if (
            workers is None
            or not isinstance(workers.const, int)
            or workers.const < 1
            or not is_distributed(place.entry)
        ):
            continue
        if given(call, "multiprocessing_context") is not None or call.has_star:
            continue
        where = _uses_cuda(call)
        node = node_in(script, call)
        if where and node is not None:
            message = f"{where} uses CUDA in the {workers.const} forked workers of this loader: Cannot re-initialize CUDA in forked subprocess"
            yield Found(
                node,
                message,
                "stay on the CPU there, and move the batch in the training loop (pin_memory=True, non_blocking=True)",
            )


def _uses_cuda(call: Call) -> str:
    collate = given(call, "collate_fn")
    thing = collate.thing if collate is not None else None
    function = thing.function if isinstance(thing, Bound) else thing
    if isinstance(function, Function) and _moves(function.node):
        return f"`{function.name}`"
    dataset = given(call, "dataset")
    if dataset is None or not isinstance(dataset.thing, Instance):
        return ""
    cls = dataset.thing.cls
    for name in ("__getitem__", "__iter__"):
        method = cls.find(name)
        node = getattr(method.thing, "node", None) if method is not None else None
        if node is not None and (_moves(node) or _reads_cuda(cls, node)):
            return f"`{cls.node.name}.{name}`"
    return ""


def _moves(node: ast.AST) -> bool:
    """Whether something is moved to, or made on, the GPU."""
    for part in ast.walk(node):
        if not isinstance(part, ast.Call):
            continue
        if (
            isinstance(part.func, ast.Attribute)
            and part.func.attr == "cuda"
            and not text_of(part.func).startswith("torch.cuda")
        ):
            return True
        places_named = [
            *(part.args[:1] if isinstance(part.func, ast.Attribute) and part.func.attr == "to" else []),
            *(one.value for one in part.keywords if one.arg == "device"),
        ]
        if any(isinstance(one, ast.Constant) and str(one.value).startswith("cuda") for one in places_named):
            return True
    return False


def _reads_cuda(cls: UserClass, getter: ast.AST) -> bool:
    """Whether a method reads an attribute that the class has put on the GPU."""
    read = {
        part.attr
        for part in ast.walk(getter)
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
    }
    for part in ast.walk(cls.node):
        if isinstance(part, ast.Assign) and _moves(part.value):
            names = {one.attr for one in part.targets if isinstance(one, ast.Attribute)}
            if names & read:
                return True
    return False


_EXITS = frozenset({"sys.exit", "os._exit", "os.abort", "builtins.exit", "builtins.quit"})


@rule("RW610", "warning", "K9 R7", "a signal handler saves or waits for other ranks")
def work_in_signal_handler(script: Script) -> Iterator[Found]:
    for place in once(places(script, "signal.signal")):
        if is_distributed(place.entry):
            yield from _handled(place)


def _handled(place: Place) -> Iterator[Found]:
    made = place.last
    number, handler = (
        getattr(value.thing, "name", "") for value in (made.arg(0, "signalnum") or ANY, made.arg(1, "handler") or ANY)
    )
    inside = [
        call
        for history in place.entry.histories
        for call in history.calls
        if any(site.node is made.node for site in call.stack)
    ]
    met = next((call for call in inside if call.name in ACTS and ACTS[call.name].family), None)
    saved = next((call for call in inside if is_write(call)), None)
    if met is not None:
        message = (
            f"the handler calls {word_of(met)} in the middle of a step: other ranks are elsewhere and do not call it"
        )
        yield Found(made.node, message, _FIX, severity="error")
    elif saved is not None:
        message = f"the handler calls {word_of(saved)} in the middle of a step: it may save a partial update"
        yield Found(made.node, message, _FIX)
    elif number == "signal.SIGTERM" and any(call.name in _EXITS for call in inside):
        message = "the SIGTERM handler exits at once: all work since the last checkpoint is lost"
        yield Found(made.node, message, _FIX, failure_class="R7")
    elif number == "signal.SIGTERM" and handler == "signal.SIG_IGN":
        message = (
            "SIGTERM is ignored: on preemption the scheduler kills the job after its grace period, and nothing is saved"
        )
        yield Found(made.node, message, _FIX, failure_class="R7")


_FIX = "only set a flag in the handler; at the end of a step let all ranks agree on it, save, and exit"
