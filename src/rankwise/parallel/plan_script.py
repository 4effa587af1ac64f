"""Plan the memory of a script's model: the script is imported in a process of its own, which `rankwise plan` starts.

The request is the first argument, as JSON. The answer is one line of JSON on standard output: a plan, or an error. Whatever
the script prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankwise.base.errors import ModelError, RankwiseError, UsageError
from rankwise.parallel.planning import plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType


def main() -> None:
    """Answer one request."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        try:
            answer: dict[str, Any] = {"plan": _plan(json.loads(sys.argv[1]))}
        except RankwiseError as error:
            answer = {"error": error.message, "hint": error.hint, "is_model": isinstance(error, ModelError)}
        answers.write(json.dumps(answer) + "\n")


def _plan(request: dict[str, Any]) -> dict[str, Any]:
    sys.argv = [request["target"]]
    module = _import(request["target"])
    model = _build(module, request["call"], allocates=request["allocate"])
    found = plan(
        model, num_ranks=request["gpus"], memory=request["memory"], reserve=request["reserve"], optimizer=request["optimizer"],
        precision=request["precision"], batch=_make_batch(module, request["batch"], request["inputs"]),
        loss=_find(module, request["loss"]) if request["loss"] else None, micro_batch=request["micro_batch"], ranks_per_node=request["ranks_per_node"],
    )  # fmt: skip
    return found.as_json() | {"model": type(model).__name__}


def _import(target: str) -> ModuleType:
    """Import a script under its own name, which is not __main__, or a module by its dotted one."""
    path = Path(target)
    is_file = path.suffix == ".py"
    # As Python does: a script finds what lies beside it, a module what lies here.
    sys.path.insert(0, str(path.resolve().parent) if is_file else str(Path.cwd()))
    if not is_file:
        found: ModuleType = _run_theirs(lambda: importlib.import_module(target), f"importing {target}")
        return found
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_planned"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{target} can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses and pickles look it up
    loader = spec.loader
    _run_theirs(
        lambda: loader.exec_module(module),
        f"importing {target}",
        hint='it is imported under another name: put what trains, and reads arguments, under `if __name__ == "__main__":`',
    )
    return module


def _build(module: ModuleType, name: str, *, allocates: bool) -> nn.Module:
    builder = _find(module, name)
    try:
        needed = [
            one.name
            for one in inspect.signature(builder).parameters.values()
            if one.default is one.empty and one.kind not in {one.VAR_POSITIONAL, one.VAR_KEYWORD}
        ]
    except (TypeError, ValueError):  # what is written in C has none
        needed = []
    if needed:
        raise UsageError(
            f"{name}() of {module.__name__} needs {', '.join(needed)}",
            hint="name a function that needs no arguments: def build_model(): return Model(...)",
        )
    with contextlib.nullcontext() if allocates else torch.device("meta"):
        model = _run_theirs(
            builder,
            f"{name}()",
            hint=None
            if allocates
            else "on the meta device tensors have no values: if that is the reason, --allocate builds the model in the host's memory",
        )
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name}() of {module.__name__} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _make_batch(module: ModuleType, name: str | None, inputs: Sequence[Sequence[Any]]) -> Any:
    if name is not None:
        return _run_theirs(_find(module, name), f"{name}()")
    made = []
    for shape, dtype in inputs:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise UsageError(f"torch has no dtype {dtype!r}", hint="use --input 8,1024:int64")
        made.append(torch.empty(shape, dtype=kind, device="meta"))
    return tuple(made) or None


def _find(module: ModuleType, name: str) -> Any:
    found = getattr(module, name, None)
    if not callable(found):
        own = {key: one for key, one in vars(module).items() if inspect.isfunction(one)}
        functions = [key for key, one in own.items() if one.__module__ == module.__name__]
        known = f"its functions are {', '.join(functions)}" if functions else "it defines no function"
        raise UsageError(f"{module.__name__} has no function {name!r}; {known}")
    return found


def _run_theirs(call: Callable[[], Any], what: str, *, hint: str | None = None) -> Any:
    """Call what the user has written; what it raises is shown whole, and raised as one line."""
    try:
        return call()
    except SystemExit as leave:
        raise UsageError(
            f"{what} ended the process with SystemExit({leave.code})",
            hint='put what trains, and reads arguments, under `if __name__ == "__main__":`',
        ) from leave
    except Exception as error:  # whatever the script raises
        traceback.print_exc()
        first = str(error).partition("\n")[0]
        raise UsageError(f"{what} raised {type(error).__name__}: {first}", hint=hint) from error
