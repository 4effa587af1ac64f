"""`rankwise plan`: how much memory a script's model will need on each GPU, and which way to spread it fits."""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import LaunchError, ModelError, UsageError
from rankwise.base.flags import Parser
from rankwise.cli.flag_values import Given
from rankwise.cli.plan_text import render
from rankwise.cli.printing import put

if TYPE_CHECKING:
    from collections.abc import Sequence

_BUILDERS = ("build_model", "make_model", "get_model", "create_model")
#: The script runs in a process of its own: the command stays free of torch, and of whatever the script does. That
#: process takes this very rankwise, wherever it lies, and nothing else from beside it.
_CHILD = "import sys; sys.path.insert(0, {root!r}); import rankwise; sys.path.remove({root!r}); from rankwise.parallel.plan_script import main; main()"
_EXIT_CODES = "exit codes: 0 something fits; 1 nothing does, or the model can't be planned; 2 the command is wrong"


def main(argv: Sequence[str]) -> int:
    """Plan the memory of a script's model; return the exit code."""
    arguments = _build_parser().parse_args(argv)
    if arguments.gpus < 1:
        raise UsageError(f"--gpus {arguments.gpus}: at least one is needed", hint="the number of ranks, one GPU each")
    target, call = _read_target(arguments.target, arguments.call)
    if find_spec("torch") is None:
        raise UsageError(
            f"this command needs torch, and {sys.executable} has none", hint="run it with the Python that trains"
        )
    request = {name: value for name, value in vars(arguments).items() if name != "format"}
    answer = _ask(request | {"target": target, "call": call, "inputs": arguments.input or []})
    put((json.dumps(answer, indent=1) if arguments.format == "json" else render(answer, arguments.optimizer)) + "\n")
    return 1 if answer["proposal"] is None and answer["memory_bytes"] is not None else 0


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "rankwise plan",
        description="Show how much memory a training will need on each GPU, for each way to spread the model, and propose the cheapest that fits. "
        "The script is imported, under a name other than __main__, and its model is built on the meta device: nothing is allocated.",
        epilog=_EXIT_CODES,
    )
    add = parser.add_argument
    add("target", metavar="SCRIPT.py|MODULE:FUNCTION", action=Given, help="where the model is built")
    add(
        "--call",
        metavar="NAME",
        action=Given,
        help=f"the script's function that returns the model, without arguments (default: {', '.join(_BUILDERS)}, if it has one of them)",
    )
    add("--gpus", metavar="N", type=int, required=True, help="how many ranks, one GPU each")
    add("--memory", metavar="SIZE", default="80GB", action=Given, help="of one GPU (default: 80GB; GB is 2**30 bytes)")
    add(
        "--reserve",
        metavar="SIZE",
        action=Given,
        help="what of it stays free (default: 1GB for CUDA and NCCL, and a twentieth for fragmentation)",
    )
    add("--ranks-per-node", metavar="N", type=int, default=8, help="GPUs of a host (default: 8)")
    add(
        "--optimizer",
        metavar="NAME",
        default="adamw",
        action=Given,
        help="sgd, momentum, adamw, or another class of torch.optim (default: adamw)",
    )
    add(
        "--precision",
        choices=("fp32", "bf16", "fp16", "bf16-params"),
        help="bf16: fp32 weights, autocast; bf16-params: all in bf16 (default: both)",
    )
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument(
        "--input",
        metavar="SHAPE[:DTYPE]",
        type=_read_input,
        action="append",
        help="a tensor that the model is called with: 8,1024:int64 (default dtype: float32); once for each",
    )
    batch.add_argument(
        "--batch", metavar="NAME", action=Given, help="the script's function that returns what the model is called with"
    )
    add(
        "--loss",
        metavar="NAME",
        action=Given,
        help="the script's function from model and batch to the loss, so that what it keeps is counted",
    )
    add(
        "--micro-batch",
        metavar="N",
        type=int,
        help="samples of one forward pass (default: those of the batch)",
    )
    add(
        "--allocate", action="store_true", help="build the model in the host's memory: for builders that look at values"
    )
    add("--format", choices=("text", "json"), default="text")
    add("--json", dest="format", action="store_const", const="json", help="the same as --format json")
    return parser


def _read_input(text: str) -> tuple[list[int], str]:
    shape, _, dtype = text.partition(":")
    try:
        sizes = [int(size) for size in shape.replace("x", ",").split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: use 8,1024:int64")
    return sizes, dtype or "float32"


def _read_target(target: str, call: str | None) -> tuple[str, str]:
    """Return the script or module, and the function in it."""
    path = Path(target)
    if not path.is_file():
        module, _, function = target.partition(":")
        if not function or module.endswith(".py"):
            raise UsageError(
                f"there is no file {module if function else target}", hint="give a script, or package.module:function"
            )
        return module, call or function
    if path.suffix != ".py":
        raise UsageError(f"{target} is not a Python script: its name does not end with .py")
    return target, call or _find_builder(path)


def _find_builder(path: Path) -> str:
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} is not valid Python: {error}") from error
    functions = [one.name for one in tree.body if isinstance(one, ast.FunctionDef)]
    found = [name for name in _BUILDERS if name in functions]
    if len(found) == 1:
        return found[0]
    what = f"has {' and '.join(found)}" if found else f"has none of {', '.join(_BUILDERS)}"
    own = f"its functions are {', '.join(functions)}" if functions else "it defines no function"
    hint = (
        "say which one returns the model, without arguments"
        if functions
        else "put what builds the model into one, and name it"
    )
    raise UsageError(f"{path} {what}; {own}", hint=f"{hint}: --call NAME")


def _ask(request: dict[str, Any]) -> dict[str, Any]:
    code = _CHILD.format(root=str(Path(__file__).parents[2]))
    command = [sys.executable, "-c", code, json.dumps(request)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=False
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise LaunchError(
            f"the process that imports {request['target']} ended with exit code {done.returncode} before it had answered"
        ) from None
    if "error" in answer:
        raise (ModelError if answer["is_model"] else UsageError)(answer["error"], hint=answer["hint"])
    plan: dict[str, Any] = answer["plan"]
    return plan
